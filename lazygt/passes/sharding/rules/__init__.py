"""Sharding rules: strategies of ops on the ranks of one mesh axis. One file an op family."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazygt.graph.node import FUSED, Node
from lazygt.graph.placement import Partial
from lazygt.passes.sharding.rules import (
    block_arguments,
    creation,
    derived,
    embedding,
    grouped,
    horizontal,
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


def strategies_of(node: Node, metas: Metas, parts: int) -> tuple[Strategy, ...]:
    """List every way to run a node on ``parts`` ranks of one axis; the first has R everywhere.

    Args:
        metas: the meta of every value of the node's graph, by number.
    """
    whole = Strategy((R,) * len(node.refs()), (R,) * len(node.results))
    rule = None if node.op == FUSED or node.dynamic else rule_of(node.op)
    strategies = {_kind(whole): whole}
    dtypes = _dtypes(node, metas) if rule else ()
    for strategy in _listed(rule, node, metas, parts) if rule else ():
        if not _reducible(strategy, dtypes):
            continue
        known = strategies.get(_kind(strategy))
        if known is None or known is whole:  # a rule may say how the op runs on whole values
            strategies[_kind(strategy)] = strategy
    return tuple(strategies.values())


def _kind(strategy: Strategy) -> tuple[object, ...]:
    """Return the placements of a strategy, as a key.

    Of strategies with a share of work of their own there may be several with the same placements,
    by their collectives.
    """
    ways = None if strategy.share is None else strategy.comm
    return strategy.inputs, strategy.outputs, ways


def _listed(rule: Rule, node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of a rule; where it has none, those derived by decomposition."""
    strategies = rule(node, metas, parts)
    return strategies if strategies or rule is DERIVED else DERIVED(node, metas, parts)


def _dtypes(node: Node, metas: Metas) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the operands and results; None for undefined tensors."""
    tensors = [*(metas[number] for number in node.refs()), *node.results]
    return tuple([meta.dtype if meta is not None else None for meta in tensors])


def _reducible(strategy: Strategy, dtypes: tuple[torch.dtype | None, ...]) -> bool:
    """Return whether torch can reduce the partial values of a strategy.

    It has no sum of bools, and no complex maximum.
    """
    for placement, dtype in zip(strategy.inputs + strategy.outputs, dtypes, strict=True):
        if isinstance(placement, Partial) and dtype is not None:
            summed = placement.op in ("sum", "prod")
            if dtype == torch.bool if summed else dtype.is_complex:
                return False
    return True


def has_rule(op: str) -> bool:
    """Return whether an op may have any strategy but R everywhere."""
    return rule_of(op) is not None


def rule_of(op: str) -> Rule | None:
    """Return the rule of an op: by hand, that of pointwise ops, or ``DERIVED``."""
    rule = RULES.get(op)
    if rule is None and pointwise.is_pointwise(op):
        return pointwise.strategies
    return DERIVED if rule is None and is_composite(op) else rule


#: Of ops that torch takes apart into others.
DERIVED = derived.rule(strategies_of)

_FAMILIES = (
    creation,
    embedding,
    minmax,
    horizontal,
    grouped,
    indexing,
    internal,
    block_arguments,
    rearrange,
    pointwise,
    reductions,
    slicing,
    table,
    spatial,  # has more strategies for some of the table's ops
    upsample,
    views,
    write_back,
)
RULES: dict[str, Rule] = {
    **{op: rule for family in _FAMILIES for op, rule in family.RULES.items()},
    **block_arguments.batch_norm_rules(DERIVED),
}
