"""Who carries collectives: sockets against plain arithmetic, and what torch is given to carry."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lazygt.graph.collectives import EXTRA_BYTES, SOCKET_BYTES, ring_bytes
from lazygt.net.sockets import PeerSocket
from lazygt.runtime.collectives import collective_ops
from lazygt.runtime.collectives.backends import SocketBackend, TorchBackend, Work
from lazygt.runtime.collectives.group import AxisGroup, pin_to_cores
from lazygt.runtime.collectives.shared_backend import SharedMemoryBackend

pytestmark = pytest.mark.timeout(60)

Step = Callable[[int, SocketBackend], object]


def axis(size: int) -> list[SocketBackend]:
    """The sockets of each rank of an axis, all in this process."""
    rows: list[list[PeerSocket | None]] = [[None] * size for _ in range(size)]
    for one in range(size):
        for other in range(one):
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            rows[one][other], rows[other][one] = (
                PeerSocket(here, other, 20),
                PeerSocket(there, one, 20),
            )
    return [SocketBackend(row) for row in rows]


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[SocketBackend]]:
    made = axis(request.param)
    yield made
    for line in made:
        leave(line)


def leave(line: SocketBackend) -> None:
    for peer in line.peers:
        if peer is not None:
            peer.close()


def together(ranks: list[SocketBackend], step: Step) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(step, range(len(ranks)), ranks))


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool])
def test_an_all_reduce_adds_in_the_order_of_the_ranks(
    ranks: list[SocketBackend], op: str, dtype: torch.dtype
) -> None:
    blocks = [torch.randn(5).mul(3).to(dtype) for _ in ranks]
    reduction = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}
    expected = blocks[0]
    for block in blocks[1:]:
        expected = reduction[op](expected, block)

    def step(rank: int, line: SocketBackend) -> torch.Tensor:
        buffer = blocks[rank].clone()
        line.all_reduce(buffer, op).wait()
        return buffer

    for made in together(ranks, step):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_last_text_of_departed_rank_is_read(ranks: list[SocketBackend]) -> None:
    ranks[2].exchange_text("last words")
    leave(ranks[2])
    told = [line.exchange_text(f"of {rank}") for rank, line in enumerate(ranks[:2])]
    for rank, each in enumerate(told):
        each.wait()
        assert each.texts == {1 - rank: f"of {1 - rank}", 2: "last words"}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_after_a_rank_has_left_every_wait_says_so(ranks: list[SocketBackend]) -> None:
    """Nobody reads on where the parts of one rank have been read and those of another not."""
    begun = [line.all_gather(torch.empty(3), torch.ones(1)) for line in ranks[:2] for _ in range(2)]
    leave(ranks[2])
    for work in begun:
        with pytest.raises(ConnectionError, match="rank 2 has left"):
            work.wait()


def test_collectives_may_be_waited_for_in_any_order(ranks: list[SocketBackend]) -> None:
    count = len(ranks)

    def step(rank: int, line: SocketBackend) -> tuple[torch.Tensor, ...]:
        total, gathered = torch.full((2,), rank), torch.empty(2 * count, dtype=torch.int64)
        mine, moved = torch.empty(1, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        first = line.all_reduce(total, "sum")
        told = line.exchange_text(f"from {rank}")
        works: list[Work] = [
            first,
            line.all_gather(gathered, torch.tensor([rank, -rank])),
            line.reduce_scatter(mine, torch.arange(count) + rank, "sum"),
            line.all_to_all(moved, torch.arange(count) * 10 + rank, [1] * count, [1] * count),
        ]
        for work in reversed(works):
            work.wait()
        assert told.texts == {other: f"from {other}" for other in range(count) if other != rank}
        return total, gathered, mine, moved

    sums = sum(range(count))
    for rank, (total, gathered, mine, moved) in enumerate(together(ranks, step)):
        assert total.tolist() == [sums, sums]
        assert gathered.view(-1, 2).tolist() == [[each, -each] for each in range(count)]
        assert mine.tolist() == [rank * count + sums]
        assert moved.tolist() == [rank * 10 + each for each in range(count)]


class Done:
    def wait(self) -> None:
        """It is there."""


class Called:
    """Stands for torch.distributed: keeps what it is given, as a group of one rank would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtype: torch.dtype | None = None
        self.op: Any = None
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, buffer: torch.Tensor, op: Any, _: object, async_op: bool) -> Done:
        assert async_op
        self.dtype, self.op = buffer.dtype, op
        return Done()


@pytest.mark.parametrize(
    ("dtype", "op", "carried", "carried_op"),
    [
        (torch.float32, "sum", torch.float32, dist.ReduceOp.SUM),
        (torch.bool, "max", torch.uint8, dist.ReduceOp.MAX),
        (torch.bool, "sum", torch.uint8, dist.ReduceOp.MAX),
        (torch.bool, "prod", torch.uint8, dist.ReduceOp.MIN),
        (torch.int16, "sum", torch.int32, dist.ReduceOp.SUM),
        (torch.float8_e5m2, "sum", torch.float32, dist.ReduceOp.SUM),
    ],
)
def test_torch_backend_gets_supported_dtype_and_reduction(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    op: str,
    carried: torch.dtype,
    carried_op: Any,
) -> None:
    called = Called(monkeypatch)
    buffer = torch.tensor([1, 0, 1]).to(dtype)
    before = buffer.clone()
    TorchBackend(None).all_reduce(buffer, op).wait()
    assert (called.dtype, called.op) == (carried, carried_op)
    assert torch.equal(buffer.float(), before.float())
    assert buffer.dtype == dtype


def line_of(size: int, group: object) -> tuple[AxisGroup, SocketBackend, SharedMemoryBackend]:
    sockets, shared = SocketBackend([None]), SharedMemoryBackend([None])
    return AxisGroup(size, 0, sockets, shared, (None,), group), sockets, shared


def test_each_direction_of_nccl_has_a_group_of_its_own() -> None:
    shared = SharedMemoryBackend([None])
    line = AxisGroup(3, 1, SocketBackend([None]), shared, (None,), "up", "down")
    assert [line.one_way(0, 1), line.one_way(1, 2)] == ["up"] * 2
    assert [line.one_way(1, 0), line.one_way(2, 1)] == ["down"] * 2
    shared.close()


def test_small_host_tensors_use_sockets() -> None:
    line, sockets, shared = line_of(3, object())
    here = torch.empty(1)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert line.backend(here, kind, SOCKET_BYTES // 2 * 3) is sockets
        assert line.backend(here, kind, SOCKET_BYTES // 2 * 3 + 3) is shared
    assert isinstance(line.backend(torch.empty(1, device="meta"), "all_gather", 4), TorchBackend)
    shared.close()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_socket_traffic_exceeds_ring_by_bounded_bytes(size: int) -> None:
    line, sockets, shared = line_of(size, object())
    here = torch.empty(1)
    for nbytes in (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20):
        if line.backend(here, "all_reduce", nbytes) is sockets:
            extra = (size - 1) * nbytes - ring_bytes("all_reduce", nbytes, size)
            assert 0 <= extra <= EXTRA_BYTES
    assert line.backend(here, "all_reduce", 1 << 10) is sockets
    assert (line.backend(here, "all_reduce", 1 << 20) is sockets) == (size == 2)
    shared.close()


def test_without_nccl_a_gpu_sends_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # stands for the copy that a tensor on a GPU makes
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    carried: list[torch.Tensor] = []

    class Host(SocketBackend):
        def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
            carried.append(buffer)
            buffer.mul_(2)
            return Done()

    class OnlyHost(AxisGroup):
        def carries(self, device: torch.device) -> bool:
            return False

    shared = SharedMemoryBackend([None])
    line = OnlyHost(2, 0, Host([None]), shared, (None,))
    monkeypatch.setattr(collective_ops.group, "axis_group", lambda _: line)
    value = torch.arange(6.0).reshape(2, 3)
    flying = collective_ops.launch("all_reduce", [value], [], "sum", "data")
    made = collective_ops.wait(flying, (), (), "data")
    assert torch.equal(made, value * 2)
    expected = value * 2
    collective_ops.launch_("all_reduce", [value], [], "sum", "data")
    assert collective_ops.wait(value, (), (), "data") == []
    assert torch.equal(value, expected)
    assert [buffer.device.type for buffer in carried] == ["cpu", "cpu"]
    shared.close()


@pytest.mark.parametrize(
    ("cores", "threads", "mine"),
    [(8, 2, {4, 5, 6, 7}), (5, 1, {2, 3, 4}), (8, 5, None), (2, 1, None)],
)
def test_a_rank_keeps_to_its_share_of_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, mine: set[int] | None
) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, each: kept.append(set(each)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    pin_to_cores(1, 2)
    assert kept == ([] if mine is None else [mine])
