"""Ops that read and write where indices say, embedding tables among them.

A rank reads and writes in its own block, or, where indices are in blocks as well, sends rows to
those who have their places (``rows``). Tables are split by tokens, by features, or by rows, each
rank looking up its own; bags of embeddings by features only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules import rows
from lazygt.passes.sharding.rules.base import (
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


def _summable(call: Call) -> bool:
    return call.meta("self").dtype != torch.bool


def _index_select(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    strategies = [call.strategy(S(d), self=S(d)) for d in shardable_dims(shape) if d != dim]
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(S(dim), index=S(0)))
    if shape[dim] > 1 and _summable(call):
        strategies.append(call.strategy(P, self=S(dim)).by(_selected(dim, shape[dim])))
    strategies += [] if dim else rows.taking(call, "self", "index")
    return [*strategies, call.strategy(P, self=P)]


def _selected(dim: int, size: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        shape = build.shape(value)
        if not shape[dim]:
            picked = build.meta(index).numel
            return (build.full((*shape[:dim], picked, *shape[dim + 1 :]), 0, like=value),)
        local, outside = own_indices(build, index, size)
        rows = build.op("aten.index_select.default", value, dim, local)
        outside = build.reshape(outside, (-1, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


def _gather(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """The index may be smaller than the operand, so dims pass only in equal sizes."""
    call = Call(node, metas, parts)
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        return ()
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), self=S(d), index=S(d))
        for d in shardable_dims(index)
        if d != dim and shape[d] == index[d]
    ]
    if index[dim] > 1:
        strategies.append(call.strategy(S(dim), index=S(dim)))
    if shape[dim] > 1 and _summable(call):
        strategies.append(call.strategy(P, self=S(dim)).by(_gathered(dim, shape[dim])))
    if dim == 0 and rows.of_each_element(call, "index"):
        strategies += rows.taking(call, "self", "index", by_element=True)
    return [*strategies, call.strategy(P, self=P)]


def _gathered(dim: int, size: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        if not build.shape(value)[dim]:
            return (build.full(build.shape(index), 0, like=value),)
        local, outside = own_indices(build, index, size)
        rows = build.op("aten.gather.default", value, dim, local)
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


#: Scatters that put what is given as it is.
_PUTS = ("aten.scatter.src", "aten.scatter_.src")


def _scatter(added: bool) -> Rule:
    """scatter, scatter_add: dims other than the one that is indexed, where all have them whole."""

    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        shape, index = call.shape("self"), call.shape("index")
        if not shape or not index:
            return ()
        dim = call.dim("dim", len(shape))
        names = ["self", "index", *(["src"] if call.has("src") else [])]
        strategies = [
            call.strategy(S(d), **dict.fromkeys(names, S(d)))
            for d in shardable_dims(shape)
            if d != dim and all(call.shape(name)[d] == shape[d] for name in names)
        ]
        if added:
            strategies.append(call.strategy(P, self=P, src=P))
            if index[dim] > 1 and call.shape("src")[dim] == index[dim]:
                strategies.append(call.strategy(P, self=P, index=S(dim), src=S(dim)))
        puts = added or node.op in _PUTS
        if dim == 0 and puts and rows.of_each_element(call, "index") and call.shape("src") == index:
            strategies += rows.putting(call, "index", "src", added, by_element=True)
        return strategies

    return strategies


def _index_add(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), self=S(d), source=S(d)) for d in shardable_dims(shape) if d != dim
    ]
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(P, self=P, index=S(0), source=S(dim)))
    strategies += [] if dim else rows.putting(call, "index", "source", added=True)
    return [*strategies, call.strategy(P, self=P, source=P)]


def _index(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Dims of the operand that no index takes, and, with one index, its own dims and its dim."""
    call = Call(node, metas, parts)
    shape, indices = call.shape("self"), call["indices"]
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [metas[indices[dim].index] for dim in taken]
    known = [meta for meta in tensors if meta is not None and meta.dtype != torch.bool]
    if not taken or len(known) != len(tensors) or taken != list(range(taken[0], taken[-1] + 1)):
        return ()
    rank = max(len(meta.shape) for meta in known)
    grown = rank - len(taken)
    free = [d for d in shardable_dims(shape) if d not in taken]
    strategies = [call.strategy(S(d + (grown if d > taken[0] else 0)), self=S(d)) for d in free]
    if len(taken) == 1:
        dims = shardable_dims(known[0].shape)
        strategies += [call.strategy(S(taken[0] + d), indices=S(d)) for d in dims]
        if shape[taken[0]] > 1 and _summable(call):
            strategies.append(
                call.strategy(P, self=S(taken[0])).by(_indexed(taken[0], shape[taken[0]]))
            )
    strategies += [] if taken[0] else rows.taking(call, "self", "indices")
    return [*strategies, call.strategy(P, self=P)]


def _indexed(dim: int, size: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value, index = operands
        shape = build.shape(value)
        picked = build.shape(index)
        if not shape[dim]:
            return (build.full((*shape[:dim], *picked, *shape[dim + 1 :]), 0, like=value),)
        below = build.op("aten.lt.Scalar", index, 0)  # torch counts those from the end
        index = build.op("aten.where.self", below, build.op("aten.add.Scalar", index, size), index)
        local, outside = own_indices(build, index, size)
        rows = build.op("aten.index.Tensor", value, (*[None] * dim, local))
        outside = build.reshape(outside, (*picked, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


def _index_put(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Dims that no index takes; partial sums when the values are added."""
    call = Call(node, metas, parts)
    shape, indices, values = call.shape("self"), call["indices"], call.shape("values")
    strategies = [call.strategy(P, self=P, values=P)] if call["accumulate"] else []
    known = [m for index in indices if index is not None and (m := metas[index.index]) is not None]
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    masked = any(meta.dtype in (torch.bool, torch.uint8) for meta in known)
    if masked and taken == [0] and call.meta("values").numel == 1:
        return strategies + _masked_put(call, len(known[0].shape))
    if masked or not taken or taken != list(range(taken[0], taken[-1] + 1)):
        return strategies  # the values' dims are then in other places
    rank = max(len(meta.shape) for meta in known)
    picked = torch.broadcast_shapes(*(meta.shape for meta in known))
    full = (*shape[: taken[0]], *picked, *shape[taken[-1] + 1 :])
    for dim in shardable_dims(shape):
        if dim not in taken:
            at = dim if dim < taken[0] else dim - len(taken) + rank
            strategies.append(
                call.strategy(S(dim), self=S(dim), values=rows.spread(values, full, at))
            )
    return [*strategies, *([] if taken[0] else _put_by_blocks(call, known))]


def _put_by_blocks(call: Call, indices: Sequence[TensorMeta]) -> list[Strategy]:
    """Of indices in blocks: into partial sums, or into the blocks of others."""
    added = bool(call["accumulate"])
    strategies = rows.putting(call, "indices", "values", added)
    if not added or not _summable(call) or len({meta.shape for meta in indices}) != 1:
        return strategies
    picked = indices[0].shape
    shape = (*picked, *call.shape("self")[len(indices) :])
    values = call.shape("values")
    return strategies + [
        call.strategy(P, self=P, indices=S(dim), values=rows.spread(values, shape, dim))
        for dim in shardable_dims(picked)
    ]


def _masked_put(call: Call, rank: int) -> list[Strategy]:
    """One number where a mask of the first ``rank`` dims is: as pointwise."""
    return [
        call.strategy(S(dim), self=S(dim), indices=S(dim) if dim < rank else R)
        for dim in shardable_dims(call.shape("self"))
    ]


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
    strategies += rows.taking(call, "weight", "indices")
    return [*strategies, call.strategy(P, weight=P)]


def _look_up(count: int) -> Lowering:
    """Rows of this rank's block; zeros for those of others."""

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


def own_indices(build: Builder, indices: Ref, count: int) -> tuple[Ref, Ref]:
    """Indices counted from this rank's block, 0 where they lie outside; and which those are.

    What lies outside of all blocks stays so: torch's kernel has to refuse it.
    """
    start, stop = build.bounds(count)
    outside = _out_of(build, indices, start, stop)
    local = build.op("aten.sub.Scalar", indices, start)
    local = build.op("aten.masked_fill.Scalar", local, outside, 0)
    nowhere = _out_of(build, indices, 0, count)
    return build.op("aten.masked_fill.Scalar", local, nowhere, count), outside


def _out_of(build: Builder, indices: Ref, start: int, stop: int) -> Ref:
    """Which indices are not in ``[start, stop)``."""
    below = build.op("aten.lt.Scalar", indices, start)
    either: Ref = build.op(
        "aten.logical_or.default", below, build.op("aten.ge.Scalar", indices, stop)
    )
    return either


def _embedding_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Scaling by how often a token stands in the batch needs the whole batch."""
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
    """The gradient of this rank's rows; tokens of others go to a row that is cut off."""

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
    """The gradient of each token to the rank that has its row."""
    table = call.result()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, indices = args["grad_output"], args["indices"]
        padded = build.op("aten.eq.Scalar", indices, args["padding_idx"])
        padded = build.op("aten.unsqueeze.default", padded, -1)
        gradient = build.op("aten.masked_fill.Scalar", gradient, padded, 0)
        zeros = build.full((build.block(table.shape[0]), table.shape[1]), 0, like=gradient)
        return (rows.put(build, zeros, table, [indices], gradient, added=True),)

    strategy = call.strategy(S(0), grad_output=S(dim), indices=S(dim)).by(lower)
    picked = call.shape("indices")
    return rows.exchanging(strategy, rows.Rows(call, "put_rows", "indices", table, picked, dim))


_MAX = 2  #: the mode of a bag whose result is its largest row


def _bag(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """By features, all bags on every rank; what else comes out tells of indices alone."""
    call = Call(node, metas, parts)
    rest: list[Placement] = [R] * (len(node.results) - 1)
    if call["mode"] == _MAX:
        return ()
    strategies = [call.strategy([P, *rest], weight=P)]
    if call.shape("weight")[1] > 1:
        strategies.append(call.strategy([S(1), *rest], weight=S(1)))
    return strategies


def _bag_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if call["mode"] == _MAX or call.args.get("sparse"):
        return ()
    strategies = [call.strategy(P, grad=P)]
    if call.shape("grad")[1] > 1:
        strategies.append(call.strategy(S(1), grad=S(1)))
    return strategies


RULES: dict[str, Rule] = {
    **table("index_select.default", _index_select),
    **table("gather.default", _gather),
    **table("scatter_add.default scatter_add_.default", _scatter(added=True)),
    **table(
        "scatter.src scatter_.src scatter.value scatter_.value scatter_reduce.two "
        "scatter.reduce scatter_.reduce scatter.value_reduce scatter_.value_reduce",
        _scatter(added=False),
    ),
    **table("index_add.default index_add_.default", _index_add),
    **table("index_put.default index_put_.default _index_put_impl_.default", _index_put),
    **table("index.Tensor _unsafe_index.Tensor", _index),
    **table("_embedding_bag.default _embedding_bag_forward_only.default", _bag),
    **table("_embedding_bag_backward.default _embedding_bag_dense_backward.default", _bag_backward),
    **table("embedding.default", _embedding),
    **table("embedding_dense_backward.default", _embedding_backward),
}
