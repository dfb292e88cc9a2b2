"""Collectives of one axis, cut along another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND_RECV,
    SHARD,
    Shard,
)
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import strategies_of
from tests.passes.sharding.rules.blocks import Tensor, blocks, joined
from tests.passes.sharding.rules.harness import PARTS
from tests.passes.sharding.rules.lockstep import AXIS, alone, exchange

#: Ranks of the axis that the collectives are of; ``PARTS`` is of the other.
OWN = 3
SHAPE = (5, 4, 3)
CALLS = {
    "all_reduce": (ALL_REDUCE, ("sum", AXIS), None),
    "all_reduce of maxima": (ALL_REDUCE, ("max", AXIS), None),
    "all_gather": (ALL_GATHER, (1, 4, AXIS), 1),
    "reduce_scatter": (REDUCE_SCATTER, (0, "sum", AXIS), None),
    "all_to_all": (ALL_TO_ALL, (0, 2, 3, AXIS), 2),
    "send_recv": (SEND_RECV, (1, ((0, 1, 3), (0, 2, 1), (1, 0, 4), (2, 1, 4)), AXIS), None),
    "shard": (SHARD, (1, AXIS), None),
    "first": (REPLICATE_TO_PARTIAL, (AXIS,), None),
}


def run(op: str, args: tuple[Any, ...], values: list[Tensor]) -> list[Tensor]:
    """What each rank of the collective's own axis gets."""
    if op in COLLECTIVES:
        return exchange(op, args, values)
    return [alone(op, args, value, rank, OWN) for rank, value in enumerate(values)]


def operands(cut: int | None) -> list[Tensor]:
    """What each rank of the collective's own axis has: blocks along ``cut``, or whole tensors."""
    whole = torch.randn(SHAPE, dtype=torch.float64)
    if cut is not None:
        return blocks(whole, Shard(cut), OWN)
    return [torch.randn(SHAPE, dtype=torch.float64) for _ in range(OWN)]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", CALLS)
def test_rows(name: str, parts: int) -> None:
    torch.manual_seed(0)
    op, args, cut = CALLS[name]
    values = operands(cut)
    wanted = run(op, args, values)
    node = Node(op, (Ref(0), *args), (), (TensorMeta.of(wanted[0]),))
    strategies = strategies_of(node, [TensorMeta.of(values[0])], parts)[1:]
    assert len(strategies) > 1
    for strategy in strategies:
        ((have,), (made,)) = strategy.inputs, strategy.outputs
        mine = [blocks(value, have, parts) for value in values]
        got = [run(op, args, [pieces[rank] for pieces in mine]) for rank in range(parts)]
        for own, want in enumerate(wanted):
            pieces = [results[own] for results in got]
            torch.testing.assert_close(joined(pieces, made, tuple(want.shape), parts), want)
        assert strategy.lower is not None
        for rank, results in enumerate(got):
            build = Builder([TensorMeta.of(mine[0][rank])], axis="y", parts=parts, index=rank)
            strategy.lower(build, node, [Ref(0)])
            assert build.nodes[0].args == node.args
            assert build.metas[1] == TensorMeta.of(results[0].contiguous())


def test_dims_that_the_collective_moves_stay_whole() -> None:
    meta = TensorMeta.of(torch.empty(SHAPE))
    node = Node(ALL_TO_ALL, (Ref(0), 0, 2, 3, AXIS), (), (meta,))
    placements = [strategy.inputs[0] for strategy in strategies_of(node, [meta], 2)]
    assert [placement.dim for placement in placements if isinstance(placement, Shard)] == [1]
