"""Sharding rules: strategies of ops on the ranks of one mesh axis, one file per op family."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazygt.graph.node import FUSED, Node
from lazygt.graph.placement import Partial
from lazygt.passes.sharding.rules import (
    block_arguments,
    derived,
    embedding,
    indexing,
    internal,
    minmax,
    pointwise,
    rearrange,
    reductions,
    slicing,
    spatial,
    table,
    upsample,
    views,
    write_back,
)
from lazygt.passes.sharding.rules.decompose import is_composite
from lazygt.passes.sharding.rules.strategy import Collective, Metas, R, Rule, Strategy

__all__ = [
    "DERIVED",
    "RULES",
    "Collective",
    "Metas",
    "Rule",
    "Strategy",
    "has_rule",
    "rule_of",
    "strategies_of",
]


def strategies_of(node: Node, metas: Metas, axis_size: int) -> tuple[Strategy, ...]:
    """List all strategies of a node on an axis of ``axis_size`` ranks; the first is all R.

    Args:
        metas: the meta of every value of the node's graph, by number.
    """
    replicated = Strategy((R,) * len(node.refs()), (R,) * len(node.results))
    rule = None if node.op == FUSED or node.dynamic else rule_of(node.op)
    strategies = {_placement_key(replicated): replicated}
    dtypes = _tensor_dtypes(node, metas) if rule else ()
    for strategy in _rule_strategies(rule, node, metas, axis_size) if rule else ():
        if not _reducible(strategy, dtypes):
            continue
        existing = strategies.get(_placement_key(strategy))
        if (
            existing is None or existing is replicated
        ):  # a rule may define the program on full values
            strategies[_placement_key(strategy)] = strategy
    return tuple(strategies.values())


def _placement_key(strategy: Strategy) -> tuple[object, ...]:
    """Return the key that deduplicates strategies: placements, and collectives if needed.

    Strategies with an explicit ``share`` may have the same placements and other collectives.
    """
    collectives = None if strategy.share is None else strategy.comm
    return strategy.inputs, strategy.outputs, collectives


def _rule_strategies(rule: Rule, node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a rule; if there are none, those derived by decomposition."""
    strategies = rule(node, metas, axis_size)
    return strategies if strategies or rule is DERIVED else DERIVED(node, metas, axis_size)


def _tensor_dtypes(node: Node, metas: Metas) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the operands and results; None for undefined tensors."""
    tensors = [*(metas[number] for number in node.refs()), *node.results]
    return tuple([meta.dtype if meta is not None else None for meta in tensors])


def _reducible(strategy: Strategy, dtypes: tuple[torch.dtype | None, ...]) -> bool:
    """Return whether torch can reduce all partial values of a strategy.

    torch has no sum or product of bools, and no maximum or minimum of complex numbers.
    """
    for placement, dtype in zip(strategy.inputs + strategy.outputs, dtypes, strict=True):
        if isinstance(placement, Partial) and dtype is not None:
            summed = placement.op in ("sum", "prod")
            if dtype == torch.bool if summed else dtype.is_complex:
                return False
    return True


def has_rule(op: str) -> bool:
    """Return whether an op may have strategies besides the replicated one."""
    return rule_of(op) is not None


def rule_of(op: str) -> Rule | None:
    """Return the rule of an op: a written rule, the pointwise rule, or ``DERIVED``."""
    rule = RULES.get(op)
    if rule is None and pointwise.is_pointwise(op):
        return pointwise.pointwise_strategies
    return DERIVED if rule is None and is_composite(op) else rule


#: Rule of composite ops, by their decomposition.
DERIVED = derived.rule(strategies_of)

_FAMILIES = (
    embedding,
    minmax,
    indexing,
    internal,
    block_arguments,
    rearrange,
    pointwise,
    reductions,
    slicing,
    table,
    spatial,  # adds strategies to some ops of the table
    upsample,
    views,
    write_back,
)
RULES: dict[str, Rule] = {
    **{op: rule for family in _FAMILIES for op, rule in family.RULES.items()},
    **block_arguments.batch_norm_rules(DERIVED),
}
