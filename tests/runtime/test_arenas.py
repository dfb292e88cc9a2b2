"""The arena: allocation, growth, sharing between mappings, and release by death of a view."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazygt.errors import ProtocolError
from lazygt.runtime.arenas import ALIGNMENT, Arena, create_memory, tensor_over

MIB = 1 << 20


@pytest.fixture
def arena():
    made = Arena.create(initial_bytes=1 * MIB)
    yield made
    made.close()


def reader_of(arena: Arena) -> Arena:
    return Arena.attach(os.dup(arena.fd))


def test_a_slot_is_aligned_and_counted(arena):
    one, two = arena.allocate(10), arena.allocate(300)
    assert one.offset % ALIGNMENT == two.offset % ALIGNMENT == 0
    assert arena.bytes_in_use == 256 + 512
    arena.free(one.offset)
    arena.free(two.offset)
    assert arena.bytes_in_use == 0


def test_freed_neighbours_join(arena):
    slots = [arena.allocate(256 * 1024) for _ in range(4)]
    for index in (0, 2, 1, 3):
        arena.free(slots[index].offset)
    assert arena.allocate(MIB).offset == slots[0].offset


def test_an_unknown_offset_is_refused(arena):
    slot = arena.allocate(1)
    arena.free(slot.offset)
    with pytest.raises(ValueError, match="not an allocated slot"):
        arena.free(slot.offset)


def test_views_stay_valid_while_the_arena_grows(arena):
    first = arena.put(torch.arange(1000))
    view = arena.view(first.offset, first.nbytes)
    for _ in range(6):
        arena.allocate(MIB)
    big = arena.put(torch.full((20 * MIB,), 7, dtype=torch.uint8))
    assert torch.equal(view.view(torch.int64), torch.arange(1000))
    with closing(reader_of(arena)) as reader:
        assert torch.equal(reader.view(first.offset, first.nbytes), view)
        assert int(reader.view(big.offset, big.nbytes).sum()) == 7 * big.nbytes


def test_a_big_slot_touches_only_its_own_memory(arena):
    arena.allocate(40 * MIB)
    assert arena.bytes_held <= 64 * MIB
    assert os.fstat(arena.fd).st_blocks * 512 <= 66 * MIB


def test_strided_and_typed_sources(arena):
    for source in (
        torch.randn(64, 32).t(),
        torch.randn(8, dtype=torch.complex64).conj(),
        torch.tensor(3.5),
        torch.tensor([True, False]),
        torch.empty(0, 4),
        torch.randn(4, 1).expand(4, 9).to(torch.bfloat16),
    ):
        slot = arena.put(source)
        back = arena.view(slot.offset, slot.nbytes).view(source.dtype).view(source.shape)
        assert torch.equal(back, source)


def test_changing_the_source_afterwards_does_not_show(arena):
    source = torch.ones(1000)
    slot = arena.put(source)
    source.zero_()
    assert arena.view(slot.offset, slot.nbytes).view(torch.float32).sum() == 1000


def test_an_owner_may_take_over_a_memfd_made_elsewhere():
    fd = create_memory(MIB)
    owner, reader = Arena.own(os.dup(fd)), Arena.attach(fd)
    slot = owner.put(torch.arange(9))
    assert reader.view(slot.offset, slot.nbytes).view(torch.int64).tolist() == list(range(9))
    with pytest.raises(ValueError, match="only maps"):
        reader.allocate(1)
    owner.close()
    reader.close()
    reader.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (-1, 1), (4096, 2 * MIB), (4096, -1), (MIB, 1 * MIB), (1 << 40, 8), (1 << 62, 1)],
)
def test_a_range_outside_is_a_protocol_error(arena, offset, nbytes):
    arena.allocate(1)
    reader = reader_of(arena)
    with pytest.raises(ProtocolError):
        reader.view(offset, nbytes)
    reader.close()


def test_a_file_that_is_no_arena_is_refused():
    fd = os.memfd_create("other")
    with pytest.raises(ProtocolError, match="not an arena"):
        Arena.attach(fd)
    os.close(fd)


def test_the_file_cannot_be_shrunk_under_a_reader(arena):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_release_comes_once_with_the_last_view(arena):
    released: list[int] = []
    slot = arena.put(torch.arange(6))
    tensor = tensor_over(arena, slot.offset, slot.nbytes, released.append)
    part = tensor.view(torch.int64)[2:4]
    array = part.numpy()
    alias = np.asarray(array)[1:]
    del tensor, part, array
    gc.collect()
    assert released == []
    assert alias.tolist() == [3]
    del alias
    gc.collect()
    assert released == [slot.offset]


def test_a_view_outlives_the_arena():
    arena = Arena.create(MIB)
    slot = arena.put(torch.arange(6))
    tensor = tensor_over(arena, slot.offset, slot.nbytes, lambda offset: None)
    arena.close()
    del arena
    assert tensor.view(torch.int64).tolist() == list(range(6))


@pytest.mark.timeout(60)
def test_free_from_a_finalizer_inside_allocate_does_not_deadlock(arena):
    slot = arena.allocate(512)
    with arena._lock:  # as when the collector runs in the middle of `allocate`
        del_me = tensor_over(arena, slot.offset, slot.nbytes, arena.free)
        del del_me
    assert arena.bytes_in_use == 0


@pytest.mark.timeout(60)
def test_many_threads_allocate_write_and_free(arena):
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(100):
            source = torch.full((seed * 50 + step,), seed, dtype=torch.int32)
            slot = arena.put(source)
            if not torch.equal(arena.view(slot.offset, slot.nbytes).view(torch.int32), source):
                wrong.append(seed)
            arena.free(slot.offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.bytes_in_use == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MIB)), max_size=40))
def test_slots_never_overlap(steps):
    arena = Arena.create(64 * 1024)
    live: dict[int, int] = {}
    for drop, number in steps:
        if drop and live:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            arena.free(offset)
        else:
            slot = arena.allocate(number)
            live[slot.offset] = max(number, 1)
            assert arena._index_of(slot.offset, max(number, 1)) in arena._segments
    ends = [offset + size for offset, size in sorted(live.items())]
    starts = sorted(live)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    arena.close()
