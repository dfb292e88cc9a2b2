"""What a copier does with requests and memory; and whole transfers between random layouts."""

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
from lazygt.runtime.arenas import Arena, Slot
from lazygt.transfer import sender as sender_module
from lazygt.transfer.copier import Copier
from lazygt.transfer.copy_request import (
    CopyItem,
    CopyReply,
    CopyRequest,
    RemoteModel,
    TensorLocation,
)
from lazygt.transfer.layout import block, slices
from lazygt.transfer.transports import process_group
from lazygt.transfer.transports.shared_memory import SharedMemoryAddress, place_of
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.transfer.child import GIB, RECEIVERS, SENDERS

pytestmark = pytest.mark.timeout(120)

KIB = 1 << 10


@pytest.fixture
def arena() -> Any:
    made = Arena.create(64 * KIB)
    yield made
    made.close()


@pytest.fixture
def copier() -> Any:
    made = Copier(2)
    yield made
    made.close()


def request_for(arena: Arena, slot: Slot, *items: CopyItem) -> CopyRequest:
    place = place_of(arena, slot.offset, slot.nbytes)
    return CopyRequest("here", (place.inode,), "shared_memory", place, "crc32", items)


def test_a_block_is_cast_and_written_where_it_belongs(arena: Arena, copier: Copier) -> None:
    slot = arena.allocate(4 * 6 * 2)
    target = arena.view(slot.offset, slot.nbytes).view(torch.bfloat16).view(4, 6)
    target.zero_()
    value = torch.randn(5, 8)
    block = CopyItem(7, ((1, 3), (2, 6)), 0, "BF16", (4, 6), ((2, 4), (0, 4)))
    (check,), _ = copier.copy(request_for(arena, slot, block), {7: value}.__getitem__)
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
def test_copy_that_does_not_fit_is_refused(
    arena: Arena, copier: Copier, source: Any, target: Any, why: str
) -> None:
    slot = arena.allocate(16)
    bad = request_for(arena, slot, CopyItem(0, source, 0, "F32", (4,), target))
    with pytest.raises(ProtocolError, match=why):
        copier.copy(bad, lambda _: torch.ones(4))


def test_nothing_is_written_beside_a_slot(arena: Arena, copier: Copier) -> None:
    slot = arena.allocate(16)
    for offset in (-4, 4):
        item = CopyItem(0, ((0, 4),), offset, "F32", (4,), ((0, 4),))
        with pytest.raises(ProtocolError, match=f"a slot of 16 bytes has no 16 at {offset}"):
            copier.copy(request_for(arena, slot, item), lambda _: torch.ones(4))


def test_memory_that_was_given_up_is_not_written(copier: Copier) -> None:
    old = Arena.create(KIB)
    item = CopyItem(0, ((0, 4),), 0, "F32", (4,), ((0, 4),))
    request = request_for(old, old.allocate(16), item)
    old.close()
    with pytest.raises(OSError):
        copier.copy(request, lambda _: torch.ones(4))
    new = Arena.create(KIB)
    assert isinstance(request.place, SharedMemoryAddress)
    reused = request._replace(place=request.place._replace(fd=new.fd))
    with pytest.raises(ProtocolError, match="given this memory up"):
        copier.copy(reused, lambda _: torch.ones(4))
    new.close()


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        (),
        ("a", (), "shared_memory", (1, 2), "crc32", (), None, 0),
        ("a", (), "x", (), "crc32", (), None, 0),
        ("a", (), "../x", (), "crc32", (), None, 0),
        ("a", (), "transport", (), "crc32", (), None, 0),
    ],
)
def test_malformed_copy_request_is_refused(given: Any) -> None:
    with pytest.raises(ProtocolError, match="no copy request"):
        CopyRequest.read(given)


def test_an_error_is_a_reply(copier: Copier) -> None:
    assert copier.reply(3, CopyRequest("here", ()), torch.empty) == CopyReply(0, 3, ())
    reply = copier.reply(4, ("here",), torch.empty, rank=2)
    assert (reply.rank, reply.number, list(reply.checks)) == (2, 4, [])
    assert reply.error.startswith("ProtocolError: this is no copy request")


def test_destinations_that_are_not_live_are_dropped(arena: Arena, copier: Copier) -> None:
    slot = arena.allocate(16)
    item = CopyItem(0, ((0, 4),), 0, "F32", (4,), ((0, 4),))
    before = len(descriptors_before())
    for sender in ("here", "there"):
        copier.copy(request_for(arena, slot, item)._replace(sender=sender), lambda _: torch.ones(4))
    one_slot = (len(open_descriptors()) - before) // 2
    assert one_slot > 0
    copier.copy(CopyRequest("here", ()), torch.empty)
    assert len(open_descriptors()) == before + one_slot
    copier.close()
    assert len(open_descriptors()) <= before


# -- whole transfers ---------------------------------------------------------------------------


class Ranks:
    """An origin whose ranks all live in this process, each with its blocks only."""

    def __init__(self, mesh: Mesh, blocks: Sequence[Sequence[Tensor]], where: Any) -> None:
        self.mesh, self.turn = mesh, threading.Lock()
        self._blocks, self._where = blocks, where
        self._copiers = [Copier(1) for _ in range(mesh.world_size)]
        self._answers: list[CopyReply] = []

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        return [TensorLocation(key, placement, None) for key, placement in enumerate(self._where)]

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        sent = wire.unpack(wire.pack(request.packed), Any)
        done = self._copiers[rank].copy_packed(sent, self._blocks[rank].__getitem__)
        self._answers.append(CopyReply(rank, number, done[0], "", done[1]))

    def replies(self, seconds: float) -> list[CopyReply]:
        taken, self._answers = self._answers, []
        return taken

    def let_go(self, sender: str) -> None:
        for copier in self._copiers:
            copier.copy(CopyRequest(sender, ()), lambda _: torch.empty(0))

    def close(self) -> None:
        for copier in self._copiers:
            copier.close()


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
        remote = RemoteModel(origin, dict(enumerate(values.values())))
        patch.setattr(sender_module, "remote_model", lambda _: remote)
        patch.setattr(process_group, "REQUEST_BYTES", threshold)
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
