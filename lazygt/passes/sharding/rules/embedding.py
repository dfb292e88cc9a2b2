"""Embedding tables, and their gradients.

Tables are split by tokens, by features, or by rows, each rank looking up its own; bags of
embeddings by features and by rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules import index_exchange
from lazygt.passes.sharding.rules.indexing import own_indices
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def _embedding(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    count, features = call.shape("weight")
    strategies = [
        call.strategy(S(dim), indices=S(dim)) for dim in shardable_dims(call.shape("indices"))
    ]
    if features > 1:
        strategies.append(call.strategy(S(len(call.shape("indices"))), weight=S(1)))
    if count > 1:
        strategies.append(call.strategy(P, weight=S(0)).by(_look_up(count)))
    strategies += index_exchange.taking(call, "weight", "indices")
    return [*strategies, call.strategy(P, weight=P)]


def _look_up(count: int) -> Lowering:
    """Return a lowering to rows of this rank's block; zeros for those of others."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        weight, indices = args["weight"], args["indices"]
        if not build.block(count):
            shape = (*build.shape(indices), build.shape(weight)[1])
            return (build.full(shape, 0, like=weight),)
        local, outside = own_indices(build, indices, count)
        rows = build.op("aten.embedding.default", weight, local)
        outside = build.op("aten.unsqueeze.default", outside, -1)
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


def _embedding_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of an embedding's backward.

    Scaling by how often a token stands in the batch needs the whole batch.
    """
    call = Call(node, metas, parts)
    count, features = call["num_weights"], call.shape("grad_output")[-1]
    tokens = shardable_dims(call.shape("indices")) if not call["scale_grad_by_freq"] else []
    strategies = [call.strategy(P, grad_output=S(dim), indices=S(dim)) for dim in tokens]
    if features > 1:
        strategies.append(call.strategy(S(1), grad_output=S(len(call.shape("indices")))))
    if count > 1 and not call["scale_grad_by_freq"]:
        strategies.append(call.strategy(S(0)).by(_own_rows(count)))
        few = 8 * prod(call.shape("indices")) <= count  # else many rows have a gradient
        strategies += [_sent_rows(call, dim) for dim in tokens] if few else []
    return [*strategies, call.strategy(P, grad_output=P)]


def _own_rows(count: int) -> Lowering:
    """Return a lowering to the gradient of this rank's rows.

    Tokens of others go to a row that is cut off.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        padding, block = args["padding_idx"], build.block(count)
        local, outside = own_indices(build, args["indices"], count)
        padded = build.op("aten.eq.Scalar", args["indices"], padding)
        outside = build.op("aten.logical_or.default", outside, padded)
        local = build.op("aten.masked_fill.Scalar", local, outside, block)
        changes = {"indices": local, "num_weights": block + 1, "padding_idx": -1}
        (gradient,) = build.rerun(node, operands, **changes)
        return (build.op("aten.slice.Tensor", gradient, 0, 0, block),)

    return lower


def _sent_rows(call: Call, dim: int) -> Strategy:
    """Return the strategy that sends the gradient of each token to the rank of its row."""
    table = call.result()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, indices = args["grad_output"], args["indices"]
        padded = build.op("aten.eq.Scalar", indices, args["padding_idx"])
        padded = build.op("aten.unsqueeze.default", padded, -1)
        gradient = build.op("aten.masked_fill.Scalar", gradient, padded, 0)
        zeros = build.full((build.block(table.shape[0]), table.shape[1]), 0, like=gradient)
        return (index_exchange.put(build, zeros, table, [indices], gradient, added=True),)

    strategy = call.strategy(S(0), grad_output=S(dim), indices=S(dim)).by(lower)
    picked = call.shape("indices")
    return index_exchange.exchanging(
        strategy, index_exchange.Rows(call, "put_rows", "indices", table, picked, dim)
    )


#: The modes of bags: of their rows the sum, the mean or the largest.
_SUM, _MEAN, _MAX = range(3)


def _bag(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of bags: all of them on every rank, of some features or rows.

    The other results depend on indices alone.
    """
    call = Call(node, metas, parts)
    rest: list[Placement] = [R] * (len(node.results) - 1)
    if call["mode"] == _MAX:
        return ()
    strategies = [call.strategy([P, *rest], weight=P)]
    count, features = call.shape("weight")
    if features > 1:
        strategies.append(call.strategy([S(1), *rest], weight=S(1)))
    if count > 1 and call["padding_idx"] < 0:
        strategies.append(call.strategy([P, *rest], weight=S(0)).by(_own_bags(count)))
    return strategies


def _own_bags(count: int) -> Lowering:
    """Return a lowering to the sums of this rank's rows in the bags.

    Rows of others are set to zero themselves: a weight of 0 would not make 0 of an infinite number
    in the row of this rank that stands for them.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        table, indices, given = args["weight"], args["indices"], args["per_sample_weights"]
        local, outside = own_indices(build, indices, count)
        if not build.block(count):
            table = build.full((1, build.shape(table)[1]), 0, like=table)
        if given is not None:
            given = build.op("aten.masked_fill.Scalar", given, outside, 0)
        picked = build.op("aten.embedding.default", table, local)
        outside = build.op("aten.unsqueeze.default", outside, -1)
        picked = build.op("aten.masked_fill.Scalar", picked, outside, 0)
        places = build.op("aten.arange.default", build.shape(indices)[0],
                          dtype=build.meta(indices).dtype, device=DEVICE)  # fmt: skip
        of_bags = {**args, "weight": picked, "indices": places}
        sums, *others = _bags(build, node, {**of_bags, "mode": _SUM, "per_sample_weights": given})
        if args["mode"] == _MEAN:
            column = build.slice(picked, 1, 0, 1)
            _, *others = _bags(build, node, {**of_bags, "weight": column})
            sizes = build.op("aten.clamp_min.default", others[1], 1)
            sums = build.op("aten.div.Tensor", sums, build.op("aten.unsqueeze.default", sizes, -1))
        return (sums, *others)

    return lower


def _bags(build: Builder, node: Node, args: Mapping[str, Arg]) -> Sequence[Ref]:
    results: Sequence[Ref] = build.op(node.op, *args.values())
    return results


def _bag_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if call["mode"] == _MAX or call.args.get("sparse"):
        return ()
    strategies = [call.strategy(P, grad=P)]
    if call.shape("grad")[1] > 1:
        strategies.append(call.strategy(S(1), grad=S(1)))
    if call["num_weights"] > 1:
        strategies.append(call.strategy(S(0)).by(_own_rows(call["num_weights"])))
    return strategies


RULES: dict[str, Rule] = {
    **table("embedding.default", _embedding),
    **table("embedding_dense_backward.default", _embedding_backward),
    **table("_embedding_bag.default _embedding_bag_forward_only.default", _bag),
    **table("_embedding_bag_backward.default _embedding_bag_dense_backward.default", _bag_backward),
}
