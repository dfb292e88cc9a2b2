"""Placements: blocks as torch cuts them, and torch's own placements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    as_placement,
    local_meta,
    local_shape,
    placement_to_torch,
    shard_bounds,
)


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_blocks_are_those_of_chunk(size: int, parts: int) -> None:
    bounds = [shard_bounds(size, parts, index) for index in range(parts)]
    sizes = [stop - start for start, stop in bounds]
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)] if size else []
    assert sizes == chunks + [0] * (parts - len(chunks))
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]


@given(size=st.integers(0, 40), parts=st.integers(1, 9), data=st.data())
def test_blocks_are_those_of_dtensor(size: int, parts: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, parts - 1))
    start, stop = shard_bounds(size, parts, index)
    assert TorchShard.local_shard_size_and_offset(size, parts, index) == (stop - start, start)


@pytest.mark.parametrize(
    ("placement", "placements", "text"),
    [
        (Replicate(), TorchReplicate(), "R"),
        (Shard(1), TorchShard(1), "S(1)"),
        (Partial(), TorchPartial("sum"), "P(sum)"),
        (Partial("max"), TorchPartial("max"), "P(max)"),
        (Partial("prod"), TorchPartial("product"), "P(prod)"),
    ],
)
def test_placement_converts_to_torch_and_back(
    placement: Placement, placements: object, text: str
) -> None:
    assert placement_to_torch(placement) == placements
    assert as_placement(placements, dims=2) == placement
    assert str(placement) == text


def test_dims_are_counted_from_the_front() -> None:
    assert as_placement(TorchShard(-1), dims=3) == Shard(2)


@pytest.mark.parametrize(
    ("placements", "said"),
    [
        (TorchShard(2), "2 dims has no dim 2"),
        (TorchPartial("avg"), "use Replicate"),
        ("R", "no placement"),
    ],
)
def test_invalid_placement_is_refused(placements: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        as_placement(placements, dims=2)


def test_local_shapes() -> None:
    assert local_shape((5, 3), Shard(0), 4, 2) == (1, 3)
    assert local_shape((5, 3), Shard(0), 4, 3) == (0, 3)
    assert local_shape((5, 3), Partial(), 4, 3) == (5, 3)
    transposed = TensorMeta.of(torch.empty(3, 5).t())
    assert local_meta(transposed, Shard(0), 2, 0) == TensorMeta.of(torch.empty(3, 3))
    assert local_meta(transposed, Replicate(), 2, 0) == transposed
