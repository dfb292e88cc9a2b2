"""Embedding tables: split by tokens, by features, or by rows, each rank looking up its own.

Bags of embeddings: by features only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.label import Label
from lazygt.graph.node import Node, Ref
from lazygt.passes.rules.base import (
    Call,
    Lower,
    Metas,
    P,
    R,
    Row,
    Rule,
    S,
    Values,
    splittable,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    count, features = call.shape("weight")
    found = [call.row(S(dim), indices=S(dim)) for dim in splittable(call.shape("indices"))]
    if features > 1:
        found.append(call.row(S(len(call.shape("indices"))), weight=S(1)))
    if count > 1:
        found.append(call.row(P, weight=S(0)).by(_look_up(count)))
    return [*found, call.row(P, weight=P)]


def _look_up(count: int) -> Lower:
    """Rows of this rank's block; zeros for those of others."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        weight, indices = args["weight"], args["indices"]
        if not build.block(count):
            shape = (*build.shape(indices), build.shape(weight)[1])
            return (build.full(shape, 0, like=weight),)
        own, outside = own_indices(build, indices, count)
        made = build.op("aten.embedding.default", weight, own)
        outside = build.op("aten.unsqueeze.default", outside, -1)
        return (build.op("aten.masked_fill.Scalar", made, outside, 0),)

    return lower


def own_indices(build: Builder, indices: Ref, count: int) -> tuple[Ref, Ref]:
    """Indices counted from this rank's block, 0 where they lie outside; and which those are."""
    start, stop = build.bounds(count)
    outside = build.op("aten.logical_or.default", build.op("aten.lt.Scalar", indices, start),
                       build.op("aten.ge.Scalar", indices, stop))  # fmt: skip
    shifted = build.op("aten.sub.Scalar", indices, start)
    return build.op("aten.masked_fill.Scalar", shifted, outside, 0), outside


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Scaling by how often a token stands in the batch needs the whole batch."""
    call = Call(node, metas, parts)
    count, features = call["num_weights"], call.shape("grad_output")[-1]
    tokens = splittable(call.shape("indices")) if not call["scale_grad_by_freq"] else []
    found = [call.row(P, grad_output=S(dim), indices=S(dim)) for dim in tokens]
    if features > 1:
        found.append(call.row(S(1), grad_output=S(len(call.shape("indices")))))
    if count > 1 and not call["scale_grad_by_freq"]:
        found.append(call.row(S(0)).by(_own_rows(count)))
    return [*found, call.row(P, grad_output=P)]


def _own_rows(count: int) -> Lower:
    """The gradient of this rank's rows; tokens of others go to a row that is cut off."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        padding, mine = args["padding_idx"], build.block(count)
        own, outside = own_indices(build, args["indices"], count)
        padded = build.op("aten.eq.Scalar", args["indices"], padding)
        outside = build.op("aten.logical_or.default", outside, padded)
        own = build.op("aten.masked_fill.Scalar", own, outside, mine)
        changes = {"indices": own, "num_weights": mine + 1, "padding_idx": -1}
        (made,) = build.rerun(node, operands, **changes)
        return (build.op("aten.slice.Tensor", made, 0, 0, mine),)

    return lower


_MAX = 2  #: the mode of a bag whose result is its largest row


def _bag(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """By features, all bags on every rank; what else comes out tells of indices alone."""
    call = Call(node, metas, parts)
    rest: list[Label] = [R] * (len(node.results) - 1)
    if call["mode"] == _MAX:
        return ()
    found = [call.row([P, *rest], weight=P)]
    if call.shape("weight")[1] > 1:
        found.append(call.row([S(1), *rest], weight=S(1)))
    return found


def _bag_backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    if call["mode"] == _MAX or call.args.get("sparse"):
        return ()
    found = [call.row(P, grad=P)]
    if call.shape("grad")[1] > 1:
        found.append(call.row(S(1), grad=S(1)))
    return found


RULES: dict[str, Rule] = {
    **table("_embedding_bag.default _embedding_bag_forward_only.default", _bag),
    **table("_embedding_bag_backward.default _embedding_bag_dense_backward.default", _bag_backward),
    **table("embedding.default", _forward),
    **table("embedding_dense_backward.default", _backward),
}
