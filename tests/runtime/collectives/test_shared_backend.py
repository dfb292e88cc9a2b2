"""Collectives of large tensors, in shared memory and between hosts: against plain arithmetic, and
bit by bit against sockets on one host.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zmq

from lazygt.net.sockets import PeerSocket
from lazygt.runtime.collectives import peer_backend, shared_backend
from lazygt.runtime.collectives.backends import Backend, SocketBackend
from lazygt.runtime.collectives.group import _large_value_backend
from lazygt.runtime.collectives.peer_backend import PeerBackend
from lazygt.runtime.collectives.rendezvous import CHUNK_BYTES, EncryptedPeer, context
from lazygt.runtime.collectives.shared_backend import SharedMemoryBackend
from tests.runtime.collectives.encrypted_peers import Rows, encrypted
from tests.support.descriptors import descriptors_before, open_descriptors

pytestmark = pytest.mark.timeout(60)

SLOT = 4096  # small, so that what is sent takes many rounds
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64,
          torch.bool, torch.uint16, torch.uint32, torch.float8_e4m3fn]  # fmt: skip


def connected(hosts: str, timeout: float = 20.0) -> Rows:
    """The peers of each rank of an axis, all in this process; two on different hosts are joined by
    an encrypted connection.

    Args:
        hosts: a letter a rank, that of its host.
    """
    rows: Rows = [[None] * len(hosts) for _ in hosts]
    for low, high in itertools.combinations(range(len(hosts)), 2):
        if hosts[low] == hosts[high]:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            rows[low][high] = PeerSocket(here, high, timeout)
            rows[high][low] = PeerSocket(there, low, timeout)
        else:
            rows[low][high], rows[high][low] = encrypted(timeout, low, high)
    return rows


def together(count: int, step: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(step, range(count)))


class Axis:
    """The ranks of an axis: what carries large tensors on these hosts, and sockets on one host."""

    def __init__(self, hosts: str, timeout: float = 20.0) -> None:
        size = self.size = len(hosts)
        self.rows = [*connected("a" * size, timeout), *connected(hosts, timeout)]
        self.sockets = [SocketBackend(row) for row in self.rows[:size]]
        self.shared: list[Any] = together(
            size, lambda rank: _large_value_backend(self.rows[size + rank])
        )
        kind = SharedMemoryBackend if len(set(hosts)) == 1 else PeerBackend
        assert all(isinstance(backend, kind) for backend in self.shared)

    def leave(self, rank: int) -> None:
        for peer in self.rows[self.size + rank]:
            if peer is not None:
                peer.close()
        self.shared[rank].close()

    def close(self) -> None:
        for row in self.rows:
            for peer in row:
                if peer is not None:
                    peer.close()
        for each in self.shared:
            each.close()
            if each._thread is not None:
                each._thread.join(20)


ONE_HOST = ["aa", "aaa", "aaaaa"]


@pytest.fixture(params=[*ONE_HOST, "ab", "aab", "aabb", "aaab"])
def axis(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Axis]:
    monkeypatch.setattr(shared_backend, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(peer_backend, "PIECE_BYTES", SLOT // 4)
    made = Axis(request.param)
    yield made
    made.close()


def both(axis: Axis, step: Callable[[int, Backend], Any]) -> list[Any]:
    """What each rank gets in shared memory; the same bits as by sockets."""
    found = together(axis.size, lambda rank: step(rank, axis.shared[rank]))
    expected = together(axis.size, lambda rank: step(rank, axis.sockets[rank]))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return found


def drawn(count: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(elements, generator=generator).mul(9).to(dtype) for _ in range(count)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_are_reduced_in_their_order(axis: Axis, op: str, dtype: torch.dtype) -> None:
    for elements in (0, 1, axis.size, 7_001):
        blocks = drawn(axis.size, elements, dtype)

        def step(rank: int, backend: Backend, blocks: list[torch.Tensor] = blocks) -> torch.Tensor:
            buffer = blocks[rank].clone()
            backend.all_reduce(buffer, op).wait()
            return buffer

        first, *others = both(axis, step)
        assert all(torch.equal(first.view(torch.uint8), one.view(torch.uint8)) for one in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint16])
def test_reduce_scatter_gives_each_rank_its_part(axis: Axis, dtype: torch.dtype) -> None:
    for elements in (0, 1, 3_001):
        blocks = drawn(axis.size, elements * axis.size, dtype)

        def step(rank: int, backend: Backend, blocks: list[torch.Tensor] = blocks) -> torch.Tensor:
            buffer = blocks[rank].new_empty(blocks[rank].numel() // axis.size)
            backend.reduce_scatter(buffer, blocks[rank], "sum").wait()
            return buffer

        both(axis, step)


def test_every_rank_gets_all_that_are_gathered(axis: Axis) -> None:
    for elements in (0, 1, 5_003):
        blocks = drawn(axis.size, elements, torch.int8)

        def step(rank: int, backend: Backend, blocks: list[torch.Tensor] = blocks) -> torch.Tensor:
            buffer = blocks[rank].new_empty(axis.size * blocks[rank].numel())
            backend.all_gather(buffer, blocks[rank]).wait()
            return buffer

        assert torch.equal(both(axis, step)[0], torch.cat(blocks))


@pytest.mark.parametrize("scale", [0, 1, 700])
def test_pieces_of_any_sizes_change_places(axis: Axis, scale: int) -> None:
    """Rank r has r * k elements for rank k: nothing for rank 0, much for the last one."""
    ranks = range(axis.size)

    def step(rank: int, backend: Backend) -> torch.Tensor:
        counts = [scale * rank * other for other in ranks]
        sent = torch.cat([torch.full((n,), 10 * rank + to) for to, n in enumerate(counts)])
        buffer = torch.empty(sum(counts), dtype=torch.int64)
        backend.all_to_all(buffer, sent.to(torch.int64), counts, counts).wait()
        return buffer

    for rank, made in enumerate(both(axis, step)):
        parts = [torch.full((scale * rank * other,), 10 * other + rank) for other in ranks]
        assert torch.equal(made, torch.cat(parts).to(torch.int64))


def test_many_are_under_way_and_waited_for_in_any_order(axis: Axis) -> None:
    def step(rank: int) -> list[float]:
        buffers = [torch.full((2_000 + n,), float(rank + n)) for n in range(12)]
        works = [axis.shared[rank].all_reduce(buffer, "sum") for buffer in buffers]
        for work in reversed(works):
            work.wait()
        return [buffer.unique().item() for buffer in buffers]

    ranks = sum(range(axis.size))
    assert together(axis.size, step) == [[ranks + axis.size * n for n in range(12)]] * axis.size


@pytest.mark.parametrize("axis", ONE_HOST, indirect=True)
def test_a_slot_is_not_written_before_all_have_read_it(
    axis: Axis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank stops after each round that it hears of; the others run ahead as far as they can."""
    turn = threading.Barrier(axis.size, timeout=20)
    others = SharedMemoryBackend._finish_round

    def slow(self: SharedMemoryBackend, more: int = 0) -> Any:
        found = others(self, more)
        if self is axis.shared[-1]:
            turn.wait()
        return found

    monkeypatch.setattr(SharedMemoryBackend, "_finish_round", slow)
    rounds = 6

    def step(rank: int) -> list[torch.Tensor]:
        mine = [torch.full((8,), float(10 * rank + n)) for n in range(rounds)]
        found = [torch.empty(8 * axis.size) for _ in range(rounds)]
        works = [axis.shared[rank].all_gather(*pair) for pair in zip(found, mine, strict=True)]
        if rank < axis.size - 1:
            for _ in range(rounds):
                turn.wait()
        for work in works:
            work.wait()
        return found

    for found in together(axis.size, step):
        for number, made in enumerate(found):
            rows = made.view(axis.size, 8)
            assert rows.tolist() == [[10.0 * rank + number] * 8 for rank in range(axis.size)]


def test_after_a_rank_has_left_every_wait_says_so(axis: Axis) -> None:
    last = axis.size - 1
    begun = [
        axis.shared[rank].all_reduce(torch.ones(9_999), "sum") for rank in range(last) for _ in "ab"
    ]
    axis.leave(last)
    for work in begun:
        with pytest.raises(ConnectionError, match=r"rank \d has left"):
            work.wait()
    with pytest.raises(ConnectionError, match=r"rank \d has left"):
        axis.shared[0].all_gather(torch.empty(axis.size), torch.ones(1)).wait()
    with pytest.raises(ConnectionError, match="this rank has left"):
        axis.shared[last].all_gather(torch.empty(axis.size), torch.ones(1)).wait()


def test_leaving_rank_does_not_wait_for_pending_collectives(axis: Axis) -> None:
    begun = axis.shared[0].all_reduce(torch.ones(9_999), "sum")
    axis.leave(0)
    with pytest.raises(ConnectionError, match=r"rank.* has left"):
        begun.wait()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_rank_that_does_not_come_is_not_waited_for_without_end(hosts: str) -> None:
    axis = Axis(hosts, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 sent nothing for 0\.05 seconds"):
        axis.shared[0].all_reduce(torch.ones(3), "sum").wait()
    axis.close()


def test_ranks_that_are_in_different_rounds_do_not_read_each_other() -> None:
    axis = Axis("aa")
    axis.shared[1]._round_number = 7
    works = [each.all_reduce(torch.ones(3), "sum") for each in axis.shared]
    with pytest.raises(ConnectionError, match="rank 1 is in round 7, not 0"):
        works[0].wait()
    axis.close()


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_memory_and_sockets_are_given_back(hosts: str) -> None:
    context().socket(zmq.PAIR).close()  # its threads are never given back
    before = descriptors_before()
    axis = Axis(hosts)
    together(3, lambda rank: axis.shared[rank].all_reduce(torch.ones(3), "sum").wait())
    axis.close()
    until = time.monotonic() + 60
    while not open_descriptors() <= before:  # ZMQ's own thread closes some
        assert time.monotonic() < until
        threading.Event().wait(0.01)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aaab"])
@pytest.mark.parametrize("elements", [64, 100_003])
def test_rank_sends_bytes_of_ring_all_reduce(hosts: str, elements: int) -> None:
    """Bytes to other ranks, as many as go round; messages of so many bytes, and what is left."""
    axis, count = Axis(hosts), len(hosts)
    together(count, lambda rank: axis.shared[rank].all_reduce(torch.ones(elements), "sum").wait())
    block = -(-elements // count) * 4
    for rank, row in enumerate(axis.rows[count:]):
        for other, peer in enumerate(row):
            if isinstance(peer, EncryptedPeer):
                sizes = [max(min(block, 4 * elements - block * to), 0) for to in (other, rank)]
                met = 1  # the byte by which they have met
                assert peer.sent_bytes == met + sum(sizes)
                assert peer.sent_messages == met + sum(-(-size // CHUNK_BYTES) for size in sizes)
    axis.close()
