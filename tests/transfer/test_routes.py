"""Routes against plain indexing: every byte of every layout comes once, from who has it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import Partial, Placement, Replicate, Shard, SingleRank
from lazygt.transfer.layout import (
    Batcher,
    ParamLayout,
    ReceiverLayout,
    Request,
    Route,
    block,
    full_bounds,
    interleave,
    localized,
    packed,
    route,
    shape_of,
    slices,
)
from lazygt.transfer.manifest import ALIGNMENT, Manifest, ParamSpec

R = Replicate()


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return Mesh(tuple(f"axis{n}" for n in range(len(sizes))), tuple(sizes))


def labels(draw: st.DrawFn, mesh: Mesh, dims: int, *, held: bool = False) -> tuple[Placement, ...]:
    kinds: list[Placement] = [R, *(Shard(dim) for dim in range(dims))]
    found: list[Placement] = [draw(st.sampled_from(kinds)) for _ in mesh.names]
    if held and draw(st.booleans()):
        axis = draw(st.integers(0, len(found) - 1))
        found[axis] = SingleRank(draw(st.integers(0, mesh.sizes[axis] - 1)))
    return tuple(found)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_element_comes_once_from_a_rank_that_has_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    source, target = data.draw(meshes()), data.draw(meshes())
    placement = labels(data.draw, source, len(shape), held=True)
    wanted = labels(data.draw, target, len(shape))
    targets = [block(target, wanted, shape, rank) for rank in range(target.world_size)]
    values = torch.arange(math.prod(shape)).reshape(shape)
    arrived = [torch.full(shape_of(bounds), -1) for bounds in targets]
    counts = [torch.zeros(shape_of(bounds), dtype=torch.int64) for bounds in targets]
    most = data.draw(st.integers(1, 100))
    layouts = tuple((bounds,) for bounds in targets)
    for move in route(source, (ParamLayout(0, shape, 8, placement),), layouts, most):
        assert move.nbytes <= max(most, 8)
        mine = values[slices(block(source, placement, shape, move.rank))]
        taken = mine[slices(move.source)]
        assert taken.nbytes == move.nbytes
        arrived[move.layout][slices(move.target)] = taken
        counts[move.layout][slices(move.target)] += 1
    for bounds, found, count in zip(targets, arrived, counts, strict=True):
        assert torch.equal(found, values[slices(bounds)])
        assert bool((count == 1).all())


def test_two_axes_cut_one_dim() -> None:
    mesh = Mesh(("data", "model"), (2, 2))
    found = route(mesh, (ParamLayout(0, (7,), 4, (Shard(0), Shard(0))),), ((full_bounds((7,)),),))
    assert [(move.rank, move.target) for move in found] == [
        (0, ((0, 2),)), (1, ((2, 4),)), (2, ((4, 6),)), (3, ((6, 7),)),
    ]  # fmt: skip


def test_copies_share_the_work() -> None:
    mesh = Mesh(("data", "model"), (2, 2))
    parts = tuple(ParamLayout(number, (8, 8), 4, (R, Shard(0))) for number in range(6))
    target = (tuple(full_bounds((8, 8)) for _ in parts),)
    load: Counter[int] = Counter()
    for move in route(mesh, parts, target):
        load[move.rank] += move.nbytes
    assert load == dict.fromkeys(range(4), 6 * 8 * 8 * 4 // 4)


def test_the_same_layout_needs_no_cut() -> None:
    mesh = Mesh(("data",), (3,))
    blocks = tuple((block(mesh, (Shard(0),), (7, 2), rank),) for rank in range(3))
    found = route(mesh, (ParamLayout(0, (7, 2), 4, (Shard(0),)),), blocks)
    assert [(move.rank, move.layout) for move in found] == [(0, 0), (1, 1), (2, 2)]
    assert all(move.source == move.target for move in found)


def test_a_partial_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="partial sum"):
        route(
            Mesh(("data",), (2,)), (ParamLayout(0, (4,), 4, (Partial(),)),), ((full_bounds((4,)),),)
        )


def batched(routes: tuple[Route, ...], threshold: int, unit: int = 1) -> list[Request]:
    """Requests of routes, the routes of each parameter a chunk."""
    batcher = Batcher(threshold, unit)
    chunks = [list(pieces) for _, pieces in groupby(routes, key=lambda piece: piece.param)]
    return [request for chunk in chunks for request in batcher.add(chunk)] + list(batcher.flush())


@pytest.mark.parametrize("request_bytes", [0, 64, 100, 1 << 20])
def test_requests_stay_below_their_threshold(request_bytes: int) -> None:
    mesh = Mesh(("data",), (1,))
    shapes = [(3, 5), (40,), (1,), (16,), (7, 9)]
    parts = tuple(ParamLayout(number, shape, 4, (R,)) for number, shape in enumerate(shapes))
    found = route(mesh, parts, (tuple(map(full_bounds, shapes)),), 48)
    requests = batched(found, request_bytes)
    assert sum(move.nbytes for one in requests for move in one) == 4 * sum(map(math.prod, shapes))
    assert all(move.nbytes <= 48 for one in requests for move in one)
    if request_bytes:
        assert all(0 < sum(move.nbytes for move in one) <= request_bytes for one in requests)
    else:
        assert len(requests) == len(shapes)


@settings(max_examples=100, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=6))
def test_packed_requests_fit_their_buffer_and_nothing_overlaps(shapes: list[list[int]]) -> None:
    mesh = Mesh(("one",), (1,))
    parts = tuple(ParamLayout(n, tuple(shape), 4, (R,)) for n, shape in enumerate(shapes))
    found = route(mesh, parts, (tuple(full_bounds(shape) for shape in shapes),), 512)
    for request in batched(found, 1024, ALIGNMENT):
        offsets, extent = packed(request)
        ends = [at + move.nbytes for at, move in zip(offsets, request, strict=True)]
        assert extent <= 1024
        assert all(end <= start for end, start in zip(ends, [*offsets[1:], extent], strict=True))
        assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_lists_take_turns() -> None:
    one, two, three = ((Route(rank, 0, 0, (), (), 4),) for rank in range(3))
    assert interleave([[one, one, one], [], [two], [three, three]]) == [
        *(one, two, three),
        *(one, three),
        one,
    ]


# -- layouts of receivers ----------------------------------------------------------------------

MANIFEST = Manifest(
    (
        ParamSpec("embed.weight", "F32", (6, 4)),
        ParamSpec("norm.weight", "F32", (4,)),
        ParamSpec("head.weight", "F32", (6, 4), "embed.weight"),
    )
)


def test_a_layout_travels_and_cuts() -> None:
    placements = {"*.weight": {"model": TorchShard(-1)}}
    layout = ReceiverLayout.of({"data": 2, "model": 2}, 1, placements)
    assert ReceiverLayout.unpack(layout.packed) == layout
    blocks = layout.blocks(MANIFEST)
    assert blocks == (((0, 6), (2, 4)), ((2, 4),), ((0, 6), (2, 4)))
    assert [spec.shape for spec in localized(MANIFEST, blocks).params] == [(6, 2), (2,), (6, 2)]
    first = ReceiverLayout.of("model=2", 0, {"norm.*": [TorchReplicate()], "*": [TorchShard(0)]})
    assert first.blocks(MANIFEST)[:2] == (((0, 3), (0, 4)), ((0, 4),))


@pytest.mark.parametrize(
    ("placements", "why"),
    [
        ({"emb.*": [TorchShard(0)]}, "no parameter fits 'emb.*'"),
        ({"norm.weight": [TorchShard(1)]}, r"norm.weight of shape \[4\] has no dim 1"),
        ({"embed.weight": [TorchShard(1)]}, "head.weight is tied to embed.weight"),
    ],
)
def test_a_layout_that_the_model_lacks(placements: dict[str, list[TorchShard]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ReceiverLayout.of("model=2", 0, placements).blocks(MANIFEST)


@pytest.mark.parametrize(
    ("mesh", "rank", "placements", "why"),
    [
        ("model=2", 2, {}, "rank 2: the mesh model=2 has ranks 0 to 1"),
        ("model=2", 0, {"*": {"data": TorchShard(0)}}, "no axis 'data'"),
        ("model=2", 0, {"*": [TorchShard(0), TorchShard(0)]}, "2 placements"),
        ("model=2", 0, {"*": [0]}, "not as 0"),
    ],
)
def test_invalid_layout_is_refused(
    mesh: str, rank: int, placements: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        ReceiverLayout.of(mesh, rank, placements)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [7, ["model=2", 5, []], ["model=2", 0, [["*", [0, 0]]]]])
def test_malformed_layout_is_refused(given: object) -> None:
    with pytest.raises(ProtocolError, match="no layout"):
        ReceiverLayout.unpack(given)
