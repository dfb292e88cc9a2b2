"""Copies to a GPU, by what is asked of torch.cuda."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.arenas import Arena
from lazygt.runtime.executors import exchange as host_copies
from lazygt.runtime.executors.exchange import Exchange, HostCopies
from lazygt.runtime.messages import Done, Put
from lazygt.runtime.store import Store
from tests.runtime.copies_stand_in import Cuda

MIB = 1 << 20


def test_an_upload_waits_for_its_copy_and_for_no_kernel() -> None:
    cuda, store = Cuda(), Store()
    arena = Arena.create(MIB)
    copies = HostCopies(torch.device("cpu"), cuda)
    copies.register(arena)
    source = torch.arange(1000.0)
    slot = arena.put(source)
    done = Done(1)
    meta = TensorMeta.of(source)
    exchange = Exchange(store, copies, arena, None, 1)
    exchange.receive(Put(7, meta, slot.offset), iter(()), done)
    assert torch.equal(store.get(7), source)
    assert (cuda.side.waits, cuda.kernels.waits) == (1, 0)
    assert [event.stream for event in cuda.events] == [cuda.kernels]
    assert done.releases == [slot.offset]
    assert cuda.holds(arena.view(slot.offset, slot.nbytes))
    arena.close()


def test_staged_copy_is_kept_until_its_event() -> None:
    cuda = Cuda()
    copies = HostCopies(torch.device("cpu"), cuda)
    source = torch.arange(6.0).view(2, 3).T
    values = [copies.to_device(source) for _ in range(3)]
    assert all(torch.equal(v, source) and v.stride() == source.stride() for v in values)
    assert len(copies._staged) == 3
    cuda.events[0].came.set()
    cuda.events[1].came.set()
    copies.to_device(source)
    assert [event for event, _ in copies._staged] == cuda.events[2:]


def test_each_segment_is_registered_once_and_given_back() -> None:
    cuda = Cuda()
    arena = Arena.create(MIB)
    HostCopies(torch.device("cpu"), cuda).register(arena)
    slots = [arena.put(torch.ones(MIB // 2, dtype=torch.uint8)) for _ in range(5)]
    assert sorted(cuda.registered.values()) == [MIB, 2 * MIB]
    assert all(cuda.holds(arena.view(slot.offset, slot.nbytes)) for slot in slots)
    reader = Arena.attach(ctypes.CDLL(None).dup(arena.fd))
    HostCopies(torch.device("cpu"), cuda).register(reader)
    assert cuda.holds(reader.view(slots[0].offset, slots[0].nbytes))
    assert cuda.asked == 3
    reader.close()
    arena.close()
    assert not cuda.registered


def test_memory_that_cuda_refuses_is_asked_for_once_and_works() -> None:
    cuda = Cuda(error=801)
    arena = Arena.create(MIB)
    HostCopies(torch.device("cpu"), cuda).register(arena)
    for _ in range(3):
        slot = arena.put(torch.ones(MIB, dtype=torch.uint8))
        assert int(arena.view(slot.offset, slot.nbytes).sum()) == MIB
    assert cuda.asked == 1
    arena.close()


def test_a_segment_of_most_of_the_memory_left_is_not_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "memory_left", lambda: 4 * MIB)
    cuda = Cuda()
    arena = Arena.create(MIB)
    HostCopies(torch.device("cpu"), cuda).register(arena)
    arena.put(torch.ones(MIB, dtype=torch.uint8))
    assert list(cuda.registered.values()) == [MIB]
    arena.put(torch.ones(MIB + 1, dtype=torch.uint8))
    assert list(cuda.registered.values()) == [MIB]
    arena.close()
