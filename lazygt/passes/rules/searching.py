"""Where values stand among others: each rank looks up its own in the whole of the others."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.node import Node
from lazygt.passes.rules.base import PMAX, PMIN, Call, Metas, P, Row, Rule, S, splittable, table


def _bucketize(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    return [call.row(S(dim), self=S(dim)) for dim in splittable(call.shape("self"))]


def _searchsorted(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """One sequence for all values, or one for those of each row."""
    call = Call(node, metas, parts)
    shape = call.shape("self")
    one = len(call.shape("sorted_sequence")) == 1
    names = ("sorted_sequence", "sorter") if call.has("sorter") else ("sorted_sequence",)
    found = []
    for dim in splittable(shape):
        whole = one or dim == len(shape) - 1
        rest = {} if whole else dict.fromkeys(names, S(dim))
        found.append(call.row(S(dim), self=S(dim), **rest))
    return found


def _isin(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """In some part of the others, or with ``invert`` in none of them."""
    call = Call(node, metas, parts)
    partial = PMIN if call["invert"] else PMAX
    found = [call.row(S(dim), elements=S(dim)) for dim in splittable(call.shape("elements"))]
    others = splittable(call.shape("test_elements"))
    return found + [call.row(partial, test_elements=S(dim)) for dim in others]


def _take(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    found = [call.row(S(dim), index=S(dim)) for dim in splittable(call.shape("index"))]
    return [*found, call.row(P, self=P)]


RULES: dict[str, Rule] = {
    **table("bucketize.Tensor", _bucketize),
    **table("searchsorted.Tensor", _searchsorted),
    **table("isin.Tensor_Tensor", _isin),
    **table("take.default", _take),
}
