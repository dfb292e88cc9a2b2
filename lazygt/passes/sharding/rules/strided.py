"""Strategies that take an operand interleaved, where they take it in S(dim) as well.

An op that runs on blocks alone, and is right for every size of the blocks, computes each row of the
cut dim by itself, or adds up over all. So any rows of a dim will do in the place of neighbours, if
all tensors that the strategy cuts are cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lazygt.graph.node import Node
from lazygt.graph.placement import Placement, Shard, StridedShard
from lazygt.passes.sharding.rules import packed, views
from lazygt.passes.sharding.rules.base import Call, LocalLowering, Metas, Strategy


def strided_strategies(
    node: Node,
    metas: Metas,
    parts: int,
    strategies: Sequence[Strategy],
    place: int,
    placement: StridedShard,
) -> list[Strategy]:
    """Return the strategies in which the operand at ``place`` is interleaved.

    Args:
        strategies: of the node, for blocks.
    """
    if node.op in views.RESHAPES:
        strategy = views.view_row(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    if node.op in packed.TAKES_APART and packed.cut_dim(node, metas, parts) == placement.dim:
        strategy = packed.taken_apart(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    if node.op in packed.HALVES and packed.cut_dim(node, metas, parts) == placement.dim:
        strategy = packed.halves(Call(node, metas, parts), placement)
        return [] if strategy is None else [strategy]
    tensors = [metas[number] for number in node.refs()]
    wanted = (strategy for strategy in strategies if strategy.inputs[place] == Shard(placement.dim))
    made = (_instead(strategy, tensors, node.results, placement) for strategy in wanted)
    return [strategy for strategy in made if strategy is not None]


def _instead(
    strategy: Strategy, operands: Metas, results: Metas, wanted: StridedShard
) -> Strategy | None:
    """Return the strategy with every cut dim interleaved as ``wanted``.

    None where the strategy needs neighbours, or cuts dims of several sizes.
    """
    if not (strategy.lower is None or isinstance(strategy.lower, LocalLowering)):
        return None
    if any(isinstance(made, StridedShard) for made in (*strategy.inputs, *strategy.outputs)):
        return None
    every = list(zip((*strategy.inputs, *strategy.outputs), (*operands, *results), strict=True))
    sizes = {
        meta.shape[placement.dim]
        for placement, meta in every
        if isinstance(placement, Shard) and meta is not None
    }
    if len(sizes) > 1:
        return None
    made = [_as(wanted, placement) for placement, _ in every]
    count = len(strategy.inputs)
    return replace(strategy, inputs=tuple(made[:count]), outputs=tuple(made[count:]))


def _as(wanted: StridedShard, placement: Placement) -> Placement:
    return replace(wanted, dim=placement.dim) if isinstance(placement, Shard) else placement
