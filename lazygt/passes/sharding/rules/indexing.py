"""Ops that read and write where indices say; tables of embeddings are in ``embedding``.

A rank reads and writes in its own block, or, where indices are in blocks as well, sends rows to the
ranks that have their places (``rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.rules import index_exchange
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
    strategies += [] if dim else index_exchange.taking(call, "self", "index")
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
    """Return the strategies of gather.

    The index may be smaller than the operand, so dims pass only in equal sizes.
    """
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
    if dim == 0 and index_exchange.of_each_element(call, "index"):
        strategies += index_exchange.taking(call, "self", "index", by_element=True)
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


#: Scatters that put the given elements as they are -> their functional overloads.
_PUTS = {
    "aten.scatter.src": "aten.scatter.src",
    "aten.scatter_.src": "aten.scatter.src",
    "aten.scatter.value": "aten.scatter.value",
    "aten.scatter_.value": "aten.scatter.value",
}


def _scatter(added: bool) -> Rule:
    """Return the rule of scatter, or of scatter_add if ``added``.

    Dims other than the indexed one are cut where all have them whole; and that one, where a rank
    puts the rows of its block.
    """

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
        of_each = call.has("src") and call.shape("src") == index
        puts = added or node.op in _PUTS
        if dim == 0 and puts and index_exchange.of_each_element(call, "index") and of_each:
            strategies += index_exchange.putting(call, "index", "src", added, by_element=True)
        if shape[dim] > 1 and (of_each if added else puts):
            lower = _added_in_block(dim) if added else _put_in_block(dim)
            strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
        return strategies

    return strategies


def _added_in_block(dim: int) -> Lowering:
    """Return a lowering that adds zeros in the place of rows that others are to have."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, (whole,) = build.bind(node, operands), node.results
        assert whole is not None
        if not build.shape(args["self"])[dim]:
            return (args["self"],)
        local, outside = own_indices(build, args["index"], whole.shape[dim])
        given = build.op("aten.masked_fill.Scalar", args["src"], outside, 0)
        return build.rerun(node, operands, index=local, src=given)

    return lower


def _put_in_block(dim: int) -> Lowering:
    """Return a lowering that puts rows of others in one more row, which is dropped."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, (whole,) = build.bind(node, operands), node.results
        assert whole is not None
        value, given = args["self"], args.get("src", args.get("value"))
        shape = build.shape(value)
        local, outside = own_indices(build, args["index"], whole.shape[dim])
        dropped = build.op(
            "aten.logical_and.default", outside, build.op("aten.eq.Scalar", local, 0)
        )
        local = build.op("aten.masked_fill.Scalar", local, dropped, shape[dim])
        spare = build.full((*shape[:dim], 1, *shape[dim + 1 :]), 0, like=value)
        wide = build.op("aten.cat.default", (value, spare), dim)
        wide = build.op(_PUTS[node.op], wide, dim, local, given)
        kept = build.slice(wide, dim, 0, shape[dim])
        return (build.op("aten.copy_.default", value, kept) if node.writes else kept,)

    return lower


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
    strategies += [] if dim else index_exchange.putting(call, "index", "source", added=True)
    return [*strategies, call.strategy(P, self=P, source=P)]


def _index(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of index: dims of the operand that no index takes.

    With one index, also its own dims and its dim.
    """
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
    strategies += [] if taken[0] else index_exchange.taking(call, "self", "indices")
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
    """Return the strategies of index_put: dims that no index takes.

    And partial sums when the values are added.
    """
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
                call.strategy(S(dim), self=S(dim), values=index_exchange.spread(values, full, at))
            )
    return [*strategies, *([] if taken[0] else _put_by_blocks(call, known))]


def _put_by_blocks(call: Call, indices: Sequence[TensorMeta]) -> list[Strategy]:
    """Return the strategies of indices in blocks: into partial sums, or blocks of others."""
    added = bool(call["accumulate"])
    strategies = index_exchange.putting(call, "indices", "values", added)
    if not added or not _summable(call) or len({meta.shape for meta in indices}) != 1:
        return strategies
    picked = indices[0].shape
    shape = (*picked, *call.shape("self")[len(indices) :])
    values = call.shape("values")
    return strategies + [
        call.strategy(P, self=P, indices=S(dim), values=index_exchange.spread(values, shape, dim))
        for dim in shardable_dims(picked)
    ]


def _masked_put(call: Call, rank: int) -> list[Strategy]:
    """Return the strategies of one number put by a mask of the first ``rank`` dims: pointwise."""
    return [
        call.strategy(S(dim), self=S(dim), indices=S(dim) if dim < rank else R)
        for dim in shardable_dims(call.shape("self"))
    ]


def own_indices(build: Builder, indices: Ref, count: int) -> tuple[Ref, Ref]:
    """Return indices counted from this rank's block, 0 if outside; and a mask of those.

    Indices outside of all blocks stay so: torch's kernel has to refuse them.
    """
    start, stop = build.bounds(count)
    outside = _out_of(build, indices, start, stop)
    local = build.op("aten.sub.Scalar", indices, start)
    local = build.op("aten.masked_fill.Scalar", local, outside, 0)
    nowhere = _out_of(build, indices, 0, count)
    return build.op("aten.masked_fill.Scalar", local, nowhere, count), outside


def _out_of(build: Builder, indices: Ref, start: int, stop: int) -> Ref:
    """Return a mask of the indices that are not in ``[start, stop)``."""
    below = build.op("aten.lt.Scalar", indices, start)
    either: Ref = build.op(
        "aten.logical_or.default", below, build.op("aten.ge.Scalar", indices, stop)
    )
    return either


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
}
