"""Sharding rules: strategies of ops on the ranks of one mesh axis, one file per op family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lazygt.graph.node import FUSED, Node
from lazygt.graph.placement import Partial
from lazygt.passes.sharding.rules import (
    block_arguments,
    derived,
    embedding,
    indexing,
    internal,
    pointwise,
    reductions,
    slicing,
    table,
    views,
    windows,
    write_back,
)
from lazygt.passes.sharding.rules.decompose import is_composite
from lazygt.passes.sharding.rules.strategy import Call, Collective, Metas, R, Rule, Strategy

__all__ = [
    "DERIVED",
    "RULES",
    "Collective",
    "Metas",
    "Rule",
    "Strategy",
    "has_rule",
    "rules_of",
    "strategies_of",
]


def strategies_of(node: Node, metas: Metas, axis_size: int) -> tuple[Strategy, ...]:
    """List all strategies of a node on an axis of ``axis_size`` ranks; the first is all R.

    Args:
        metas: the meta of every value of the node's graph, by number.
    """
    replicated = Strategy((R,) * len(node.refs()), (R,) * len(node.results))
    strategies = {_deduplication_key(replicated): replicated}
    rules = () if node.op == FUSED or node.dynamic else rules_of(node.op)
    call = Call(node, metas, axis_size)
    dtypes = _tensor_dtypes(call) if rules else ()
    for strategy in _rule_strategies(rules, call):
        if not _reducible(strategy, dtypes):
            continue
        existing = strategies.get(_deduplication_key(strategy))
        if (
            existing is None or existing is replicated
        ):  # a rule may define the program on full values
            strategies[_deduplication_key(strategy)] = strategy
    return tuple(strategies.values())


def _deduplication_key(strategy: Strategy) -> tuple[object, ...]:
    """Return the key that deduplicates strategies: their placements.

    Strategies that state the fraction of the arithmetic on the busiest rank (`Strategy.share`) are
    alternatives with equal placements, so their collectives are part of the key.
    """
    collectives = None if strategy.share is None else strategy.comm
    return strategy.inputs, strategy.outputs, collectives


def _rule_strategies(rules: Sequence[Rule], call: Call) -> Sequence[Strategy]:
    """Return the strategies of all rules; if there are none, those derived by decomposition."""
    strategies = [strategy for rule in rules for strategy in rule(call)]
    return strategies if strategies or not rules or DERIVED in rules else DERIVED(call)


def _tensor_dtypes(call: Call) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the operands and results; None for undefined tensors."""
    tensors = [*(call.metas[number] for number in call.node.refs()), *call.node.results]
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
    return bool(rules_of(op))


def rules_of(op: str) -> tuple[Rule, ...]:
    """Return the rules of an op: the written ones, the pointwise rule, or ``DERIVED``."""
    if op in RULES:
        return RULES[op]
    if pointwise.is_pointwise(op):
        return (pointwise.pointwise_strategies,)
    return (DERIVED,) if is_composite(op) else ()


#: Rule of composite ops, by their decomposition.
DERIVED = derived.rule(strategies_of)

_FAMILIES: tuple[Mapping[str, Rule], ...] = (
    block_arguments.RULES,
    block_arguments.batch_norm_rules(DERIVED),
    embedding.RULES,
    indexing.RULES,
    internal.RULES,
    pointwise.RULES,
    reductions.RULES,
    slicing.RULES,
    table.RULES,
    # some of these are besides those of the table
    views.RULES,
    windows.RULES,
    write_back.RULES,
)
#: Written rules of each op. An op in several families has the strategies of all of them.
RULES: dict[str, tuple[Rule, ...]] = {}
for _family in _FAMILIES:
    for _op, _rule in _family.items():
        RULES[_op] = (*RULES.get(_op, ()), _rule)
