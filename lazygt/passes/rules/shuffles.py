"""Elements that change places between channels, space and windows: samples pass, as do partial
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazygt.graph.node import Node
from lazygt.passes.rules.base import (
    Call,
    Metas,
    P,
    Row,
    Rule,
    S,
    splittable,
    table,
    zeros_when_empty,
)
from lazygt.passes.rules.views import PARTIALS, sized


def _rule(kept: Callable[[int, int], bool]) -> Rule:
    """``kept``: whether a dim stays as it is, from its number and the rank."""

    def rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
        call = Call(node, metas, parts)
        shape = call.shape("self")
        found = [
            zeros_when_empty(call, call.row(S(dim), self=S(dim)))
            for dim in splittable(shape)
            if kept(dim, len(shape))
        ]
        return found + [call.row(label, self=label) for label in PARTIALS]

    return rows


def _windows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """unfold: windows of one dim become a last dim; other dims pass."""
    call = Call(node, metas, parts)
    shape = call.shape("self")
    dim = call.dim("dimension", len(shape))
    found = [call.row(S(d), self=S(d)) for d in splittable(shape) if d != dim]
    return found + [call.row(label, self=label) for label in PARTIALS]


def _windows_back(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Gradients of windows, summed where they overlap."""
    call = Call(node, metas, parts)
    made = call.result().shape
    dim = call.dim("dim", len(made))
    found = [
        call.row(S(d), grad_in=S(d)).by(sized(made, "input_sizes"))
        for d in splittable(made)
        if d != dim
    ]
    return [*found, call.row(P, grad_in=P)]


RULES: dict[str, Rule] = {
    **table(
        "pixel_shuffle.default pixel_unshuffle.default",
        _rule(lambda dim, rank: dim < rank - 3),
    ),
    **table("unfold.default", _windows),
    **table("unfold_backward.default", _windows_back),
    **table(
        "channel_shuffle.default native_channel_shuffle.default",
        _rule(lambda dim, rank: dim != 1),
    ),
}
