"""Activations that are not quite pointwise: halves of a dim, and a buffer beside the result."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.node import Node
from lazygt.passes.sharding.rules.base import (
    Call,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    shardable_dims,
    table,
)


def _gated(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """glu: the first half of a dim times the sigmoid of the second; other dims pass."""
    call = Call(node, metas, parts)
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    names = [name for name in ("grad_output", "self") if call.has(name)]
    found = [
        call.strategy(S(d), **dict.fromkeys(names, S(d))) for d in shardable_dims(shape) if d != dim
    ]
    return [*found, call.strategy(P, grad_output=P)] if "grad_output" in names else found


def _log_sigmoid(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """On a GPU the buffer is empty."""
    call = Call(node, metas, parts)
    shape = call.shape("self")
    names = [name for name in ("grad_output", "self", "buffer") if call.has(name)]
    found = []
    for dim in shardable_dims(shape):
        placements = {name: S(dim) for name in names if call.shape(name) == shape}
        made = [S(dim) if meta and meta.shape == shape else R for meta in node.results]
        found.append(call.strategy(made, **placements))
    return [*found, call.strategy(P, grad_output=P)] if "grad_output" in names else found


RULES: dict[str, Rule] = {
    **table("glu.default glu_backward.default", _gated),
    **table("log_sigmoid_forward.default log_sigmoid_backward.default", _log_sigmoid),
}
