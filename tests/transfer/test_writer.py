"""What writes a part: its orders, its memory; and whole transfers between random layouts."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.runtime import wire
from lazygt.runtime.shared_memory import Arena
from lazygt.transfer import broadcast
from lazygt.transfer import sender as sender_module
from lazygt.transfer.orders import Memory, Order, Write
from lazygt.transfer.origins import Located, Remote, Written
from lazygt.transfer.routes import block, slices
from lazygt.transfer.writer import Writer, memory_of
from tests.transfer.child import GIB, RECEIVERS, SENDERS

pytestmark = pytest.mark.timeout(120)

KIB = 1 << 10


@pytest.fixture
def arena() -> Any:
    made = Arena.create(64 * KIB)
    yield made
    made.close()


@pytest.fixture
def writer() -> Any:
    made = Writer(2)
    yield made
    made.close()


def order_for(arena: Arena, *writes: Write) -> Order:
    memory = memory_of(arena)
    return Order("here", (memory.inode,), memory, "crc32", writes)


def test_a_block_is_cast_and_written_where_it_belongs(arena: Arena, writer: Writer) -> None:
    slot = arena.allocate(4 * 6 * 2)
    target = arena.view(slot.offset, slot.nbytes).view(torch.bfloat16).view(4, 6)
    target.zero_()
    value = torch.randn(5, 8)
    block = Write(7, ((1, 3), (2, 6)), slot.offset, "BF16", (4, 6), ((2, 4), (0, 4)))
    (check,) = writer.write(order_for(arena, block), {7: value}.__getitem__).checks
    expected = torch.zeros(4, 6, dtype=torch.bfloat16)
    expected[2:4, 0:4] = value[1:3, 2:6].bfloat16()
    assert torch.equal(target, expected)
    sent = expected[2:4, 0:4].contiguous().view(torch.uint8)
    assert check == zlib.crc32(sent.numpy().tobytes())


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        (((0, 5),), ((0, 5),), r"has no block"),
        (((-1, 3),), ((0, 4),), r"has no block"),
        (((2, 2),), ((2, 2),), r"has no block"),
        (((0, 1), (0, 1)), ((0, 1),), r"has no block"),
        (((0, 1),), ((0, 4),), r"does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(
    arena: Arena, writer: Writer, source: Any, target: Any, why: str
) -> None:
    slot = arena.allocate(16)
    bad = order_for(arena, Write(0, source, slot.offset, "F32", (4,), target))
    with pytest.raises(ProtocolError, match=why):
        writer.write(bad, lambda _: torch.ones(4))


def test_memory_that_was_given_up_is_not_written(writer: Writer) -> None:
    old = Arena.create(KIB)
    order = order_for(old, Write(0, ((0, 4),), old.allocate(16).offset, "F32", (4,), ((0, 4),)))
    old.close()
    with pytest.raises(OSError):
        writer.write(order, lambda _: torch.ones(4))
    new = Arena.create(KIB)
    assert isinstance(order.place, Memory)
    reused = order._replace(place=order.place._replace(fd=new.fd))
    with pytest.raises(ProtocolError, match="given this memory up"):
        writer.write(reused, lambda _: torch.ones(4))
    new.close()


@pytest.mark.parametrize(
    "given",
    [None, 5, (), ("a", (), "memory", (1, 2), "crc32", ()), ("a", (), "x", (), "crc32", ())],
)
def test_what_is_no_order_is_refused(given: Any) -> None:
    with pytest.raises(ProtocolError, match="no order"):
        Order.read(given)


# -- whole transfers ---------------------------------------------------------------------------


class Ranks:
    """An origin whose ranks all live in this process, each with its blocks only."""

    def __init__(self, mesh: Mesh, blocks: Sequence[Sequence[Tensor]], where: Any) -> None:
        self.mesh, self.turn = mesh, threading.Lock()
        self._blocks, self._where = blocks, where
        self._writers = [Writer(1) for _ in range(mesh.world_size)]
        self._answers: list[Written] = []

    def locate(self, tensors: Sequence[Tensor]) -> list[Located]:
        return [Located(key, placement, None) for key, placement in enumerate(self._where)]

    def order(self, rank: int, number: int, order: Order) -> None:
        sent = Order.read(wire.unpack(wire.pack(order.packed)))
        done = self._writers[rank].write(sent, self._blocks[rank].__getitem__)
        self._answers.append(Written(rank, number, done.checks, "", done.handles))

    def answers(self, seconds: float) -> list[Written]:
        taken, self._answers = self._answers, []
        return taken

    def let_go(self, sender: str) -> None:
        for writer in self._writers:
            writer.write(Order(sender, (), None, "none", ()), lambda _: torch.empty(0))

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def draw_mesh(data: st.DataObject) -> Mesh:
    sizes = data.draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (1, 3, 2)]))
    return Mesh(tuple(f"axis{n}" for n in range(len(sizes))), sizes)


def draw_labels(data: st.DataObject, mesh: Mesh, dims: int) -> tuple[Placement, ...]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    return tuple(data.draw(st.sampled_from(kinds)) for _ in mesh.names)


@pytest.mark.parametrize("strategy", SENDERS)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_layout_goes_to_any_other(
    data: st.DataObject, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = draw_mesh(data), draw_mesh(data)
    shapes = data.draw(st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=4))
    values = {f"p{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    where = [draw_labels(data, source, p.dim()) for p in values.values()]
    wanted = [draw_labels(data, target, p.dim()) for p in values.values()]
    blocks = [
        [
            p[slices(block(source, w, p.shape, rank))]
            for p, w in zip(values.values(), where, strict=True)
        ]
        for rank in range(source.world_size)
    ]
    placements = {
        name: [
            TorchShard(one.dim) if isinstance(one, Shard) else TorchReplicate() for one in labels
        ]
        for name, labels in zip(values, wanted, strict=True)
    }
    origin = Ranks(source, blocks, where)
    threshold = data.draw(st.sampled_from([0, 1 * KIB, 64 * KIB]))
    with ExitStack() as stack, monkeypatch.context() as patch:
        stack.callback(origin.close)
        remote = Remote(origin, dict(enumerate(values.values())))
        patch.setattr(sender_module, "remote", lambda _: remote)
        patch.setattr(broadcast, "REQUEST_BYTES", threshold)
        limit = {} if strategy == "broadcast" else {"threshold_gb": threshold / GIB}
        sender = stack.enter_context(SENDERS[strategy](**limit))
        whole = stack.enter_context(RECEIVERS[strategy](sender.address, name="whole"))
        parts = [
            stack.enter_context(
                RECEIVERS[strategy](
                    sender.address,
                    name=f"rank {rank}",
                    mesh=str(target),
                    rank=rank,
                    placements=placements,
                )
            )
            for rank in range(target.world_size)
        ]
        sender.wait_for_receivers(1 + len(parts), 20.0)
        report = lazygt.transfer_weights(values, sender, timeout=20.0)
        assert sum(report.written.values()) >= sum(p.nbytes for p in values.values())
        with whole.reading() as (_, params):
            assert all(torch.equal(params[name], p) for name, p in values.items())
        for rank, receiver in enumerate(parts):
            with receiver.reading() as (_, params):
                for (name, p), labels in zip(values.items(), wanted, strict=True):
                    mine = p[slices(block(target, labels, p.shape, rank))]
                    assert torch.equal(params[name], mine)
                    assert params[name].is_contiguous()
