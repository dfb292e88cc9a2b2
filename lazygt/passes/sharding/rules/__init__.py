"""Sharding rules: what an op can do on the ranks of one mesh axis. One file an op family."""

from __future__ import annotations

import torch

from lazygt.graph.node import FUSED, Node
from lazygt.graph.placement import Partial
from lazygt.passes.sharding.rules import (
    activations,
    batchnorm,
    creation,
    elementwise_loss,
    foreach,
    indexing,
    internal,
    kernels,
    loss,
    normalisation,
    pointwise,
    reductions,
    rmsnorm,
    slicing,
    softmax,
    statistics,
    table,
    views,
    write_back,
)
from lazygt.passes.sharding.rules.base import Collective, Metas, R, Rule, Strategy

_FAMILIES = (
    activations,
    batchnorm,
    creation,
    elementwise_loss,
    foreach,
    indexing,
    internal,
    kernels,
    loss,
    normalisation,
    pointwise,
    reductions,
    rmsnorm,
    slicing,
    softmax,
    statistics,
    table,
    views,
    write_back,
)
RULES: dict[str, Rule] = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}

__all__ = ["RULES", "Collective", "Metas", "Rule", "Strategy", "has_rule", "strategies_of"]


def strategies_of(node: Node, metas: Metas, parts: int) -> tuple[Strategy, ...]:
    """Every way to run a node on ``parts`` ranks of one axis; the first has R everywhere.

    Args:
        metas: the meta of every value of the node's graph, by number.
    """
    whole = Strategy((R,) * len(node.refs()), (R,) * len(node.results))
    rule = None if node.op == FUSED or node.dynamic else _rule(node.op)
    found = {(whole.inputs, whole.outputs): whole}
    dtypes = _dtypes(node, metas) if rule else ()
    for strategy in rule(node, metas, parts) if rule else ():
        if not _reducible(strategy, dtypes):
            continue
        known = found.get((strategy.inputs, strategy.outputs))
        if known is None or known is whole:  # a rule may say how the op runs on whole values
            found[strategy.inputs, strategy.outputs] = strategy
    return tuple(found.values())


def _dtypes(node: Node, metas: Metas) -> tuple[torch.dtype | None, ...]:
    """Of the operands and results; None for undefined tensors."""
    tensors = [*(metas[number] for number in node.refs()), *node.results]
    return tuple([meta.dtype if meta is not None else None for meta in tensors])


def _reducible(strategy: Strategy, dtypes: tuple[torch.dtype | None, ...]) -> bool:
    """Whether torch can reduce what the strategy leaves partial: no sum of bools, no complex
    maximum.
    """
    for placement, dtype in zip(strategy.inputs + strategy.outputs, dtypes, strict=True):
        if isinstance(placement, Partial) and dtype is not None:
            summed = placement.op in ("sum", "prod")
            if dtype == torch.bool if summed else dtype.is_complex:
                return False
    return True


def has_rule(op: str) -> bool:
    """Whether any strategy but R everywhere may be found for an op."""
    return _rule(op) is not None


def _rule(op: str) -> Rule | None:
    found = RULES.get(op)
    if found is None and pointwise.is_pointwise(op):
        return pointwise.strategies
    return found
