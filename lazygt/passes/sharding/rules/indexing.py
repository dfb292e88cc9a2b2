"""Indexed reads and writes: index_select, gather, scatter, index_add, index, index_put.

Along a sharded indexed dim a rank reads and writes its own block only. If the indices are sharded
too, ranks exchange rows (``index_exchange``). Embeddings are in ``embedding``.
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
    from lazygt.passes.sharding.lower.builder import Builder


def _is_summable(call: Call) -> bool:
    """Return whether partial sums of the operand exist: torch has no sum of bools."""
    return call.meta("self").dtype != torch.bool


def _index_select(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index_select."""
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    strategies = [call.strategy(S(d), self=S(d)) for d in shardable_dims(shape) if d != dim]
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(S(dim), index=S(0)))
    if shape[dim] > 1 and _is_summable(call):
        strategies.append(call.strategy(P, self=S(dim)).by(_lower_index_select(dim, shape[dim])))
    strategies += [] if dim else index_exchange.take_strategies(call, "self", "index")
    return [*strategies, call.strategy(P, self=P)]


def _lower_index_select(dim: int, size: int) -> Lowering:
    """Return the lowering of index_select along a sharded dim: zeros for rows of other ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        shape = build.shape(value)
        if not shape[dim]:
            num_indices = build.meta(index).numel
            return (build.full((*shape[:dim], num_indices, *shape[dim + 1 :]), 0, like=value),)
        local_index, outside = to_local_indices(build, index, size)
        rows = build.op("aten.index_select.default", value, dim, local_index)
        outside = build.reshape(outside, (-1, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


def _gather(call: Call) -> Sequence[Strategy]:
    """Return the strategies of gather.

    The index may be smaller than the operand, so a dim is sharded in both only if sizes are equal.
    """
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
    if shape[dim] > 1 and _is_summable(call):
        strategies.append(call.strategy(P, self=S(dim)).by(_lower_gather(dim, shape[dim])))
    if dim == 0 and index_exchange.is_row_index(call, "index"):
        strategies += index_exchange.take_strategies(call, "self", "index", by_element=True)
    return [*strategies, call.strategy(P, self=P)]


def _lower_gather(dim: int, size: int) -> Lowering:
    """Return the lowering of gather along a sharded dim: zeros for elements of other ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        if not build.shape(value)[dim]:
            return (build.full(build.shape(index), 0, like=value),)
        local_index, outside = to_local_indices(build, index, size)
        rows = build.op("aten.gather.default", value, dim, local_index)
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


#: Scatters that replace elements -> their functional overloads.
_REPLACING = {
    "aten.scatter.src": "aten.scatter.src",
    "aten.scatter_.src": "aten.scatter.src",
    "aten.scatter.value": "aten.scatter.value",
    "aten.scatter_.value": "aten.scatter.value",
}


def _scatter(added: bool) -> Rule:
    """Return the rule of scatter, or of scatter_add if ``added``.

    The indexed dim is sharded with replicated indices: a rank writes the elements of its block. A
    dim other than the indexed one is sharded if all operands have the same size along the dim.
    """

    def strategies(call: Call) -> Sequence[Strategy]:
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
        same_shape = call.has("src") and call.shape("src") == index
        replaces = added or call.node.op in _REPLACING
        if dim == 0 and replaces and index_exchange.is_row_index(call, "index") and same_shape:
            strategies += index_exchange.put_strategies(
                call, "index", "src", added, by_element=True
            )
        if shape[dim] > 1 and (same_shape if added else replaces):
            lower = _lower_scatter_add(dim) if added else _lower_scatter(dim)
            strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
        return strategies

    return strategies


def _lower_scatter_add(dim: int) -> Lowering:
    """Return the lowering of scatter_add into a block: elements of other ranks add zeros."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, (result,) = build.bind(node, operands), node.results
        assert result is not None
        if not build.shape(args["self"])[dim]:
            return (args["self"],)
        local_index, outside = to_local_indices(build, args["index"], result.shape[dim])
        source = build.op("aten.masked_fill.Scalar", args["src"], outside, 0)
        return build.rerun(node, operands, index=local_index, src=source)

    return lower


def _lower_scatter(dim: int) -> Lowering:
    """Return the lowering of scatter into a block.

    Elements of other ranks are written to an extra last row, which is dropped.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, (result,) = build.bind(node, operands), node.results
        assert result is not None
        value, source = args["self"], args.get("src", args.get("value"))
        shape = build.shape(value)
        local_index, outside = to_local_indices(build, args["index"], result.shape[dim])
        dropped = build.op(
            "aten.logical_and.default", outside, build.op("aten.eq.Scalar", local_index, 0)
        )
        local_index = build.op("aten.masked_fill.Scalar", local_index, dropped, shape[dim])
        extra_row = build.full((*shape[:dim], 1, *shape[dim + 1 :]), 0, like=value)
        extended = build.op("aten.cat.default", (value, extra_row), dim)
        extended = build.op(_REPLACING[node.op], extended, dim, local_index, source)
        new_block = build.slice(extended, dim, 0, shape[dim])
        return (build.op("aten.copy_.default", value, new_block) if node.writes else new_block,)

    return lower


def _index_add(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index_add."""
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), self=S(d), source=S(d)) for d in shardable_dims(shape) if d != dim
    ]
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(P, self=P, index=S(0), source=S(dim)))
    strategies += [] if dim else index_exchange.put_strategies(call, "index", "source", added=True)
    return [*strategies, call.strategy(P, self=P, source=P)]


def _index(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index (advanced indexing).

    The operand's dims without an index are sharded. With a single index tensor also the dims of
    that tensor and the indexed dim are sharded.
    """
    shape, indices = call.shape("self"), call["indices"]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    index_metas = [call.metas[indices[dim].index] for dim in indexed]
    integer_metas = [meta for meta in index_metas if meta is not None and meta.dtype != torch.bool]
    if (
        not indexed
        or len(integer_metas) != len(index_metas)
        or indexed != list(range(indexed[0], indexed[-1] + 1))
    ):
        return ()
    rank = max(len(meta.shape) for meta in integer_metas)
    extra_dims = rank - len(indexed)
    unindexed = [d for d in shardable_dims(shape) if d not in indexed]
    strategies = [
        call.strategy(S(d + (extra_dims if d > indexed[0] else 0)), self=S(d)) for d in unindexed
    ]
    if len(indexed) == 1:
        dims = shardable_dims(integer_metas[0].shape)
        strategies += [call.strategy(S(indexed[0] + d), indices=S(d)) for d in dims]
        if shape[indexed[0]] > 1 and _is_summable(call):
            strategies.append(
                call.strategy(P, self=S(indexed[0])).by(_lower_index(indexed[0], shape[indexed[0]]))
            )
    strategies += [] if indexed[0] else index_exchange.take_strategies(call, "self", "indices")
    return [*strategies, call.strategy(P, self=P)]


def _lower_index(dim: int, size: int) -> Lowering:
    """Return the lowering of index along a sharded dim: zeros for rows of other ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value, index = operands
        shape = build.shape(value)
        index_shape = build.shape(index)
        if not shape[dim]:
            return (build.full((*shape[:dim], *index_shape, *shape[dim + 1 :]), 0, like=value),)
        negative = build.op("aten.lt.Scalar", index, 0)  # negative indices count from the end
        index = build.op(
            "aten.where.self", negative, build.op("aten.add.Scalar", index, size), index
        )
        local_index, outside = to_local_indices(build, index, size)
        rows = build.op("aten.index.Tensor", value, (*[None] * dim, local_index))
        outside = build.reshape(outside, (*index_shape, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", rows, outside, 0),)

    return lower


def _index_put(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index_put: dims without an index are sharded.

    With ``accumulate`` there are also strategies of partial sums.
    """
    shape, indices, values = call.shape("self"), call["indices"], call.shape("values")
    strategies = [call.strategy(P, self=P, values=P)] if call["accumulate"] else []
    index_metas = [
        m for index in indices if index is not None and (m := call.metas[index.index]) is not None
    ]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    masked = any(meta.dtype in (torch.bool, torch.uint8) for meta in index_metas)
    if masked and indexed == [0] and call.meta("values").numel == 1:
        return strategies + _masked_put(call, len(index_metas[0].shape))
    if masked or not indexed or indexed != list(range(indexed[0], indexed[-1] + 1)):
        return strategies  # the values' dims are then in another order
    rank = max(len(meta.shape) for meta in index_metas)
    index_shape = torch.broadcast_shapes(*(meta.shape for meta in index_metas))
    value_shape = (*shape[: indexed[0]], *index_shape, *shape[indexed[-1] + 1 :])
    for dim in shardable_dims(shape):
        if dim not in indexed:
            value_dim = dim if dim < indexed[0] else dim - len(indexed) + rank
            strategies.append(
                call.strategy(
                    S(dim),
                    self=S(dim),
                    values=index_exchange.broadcast_placement(values, value_shape, value_dim),
                )
            )
    return [*strategies, *([] if indexed[0] else _sharded_indices(call, index_metas))]


def _sharded_indices(call: Call, indices: Sequence[TensorMeta]) -> list[Strategy]:
    """Return the strategies of sharded indices: an exchange of rows, or partial sums."""
    added = bool(call["accumulate"])
    strategies = index_exchange.put_strategies(call, "indices", "values", added)
    if not added or not _is_summable(call) or len({meta.shape for meta in indices}) != 1:
        return strategies
    index_shape = indices[0].shape
    shape = (*index_shape, *call.shape("self")[len(indices) :])
    values = call.shape("values")
    return strategies + [
        call.strategy(
            P, self=P, indices=S(dim), values=index_exchange.broadcast_placement(values, shape, dim)
        )
        for dim in shardable_dims(index_shape)
    ]


def _masked_put(call: Call, rank: int) -> list[Strategy]:
    """Return the strategies of a number put by a mask over the first ``rank`` dims: pointwise."""
    return [
        call.strategy(S(dim), self=S(dim), indices=S(dim) if dim < rank else R)
        for dim in shardable_dims(call.shape("self"))
    ]


def to_local_indices(build: Builder, indices: Ref, count: int) -> tuple[Ref, Ref]:
    """Convert global indices of a sharded dim of size ``count`` to local ones.

    Returns:
        Indices relative to the start of this rank's block, 0 for those of other ranks, and the mask
        of the latter. Globally invalid indices stay invalid, so that torch's kernel rejects them.
    """
    start, stop = build.bounds(count)
    outside = _is_outside(build, indices, start, stop)
    local = build.op("aten.sub.Scalar", indices, start)
    local = build.op("aten.masked_fill.Scalar", local, outside, 0)
    invalid = _is_outside(build, indices, 0, count)
    return build.op("aten.masked_fill.Scalar", local, invalid, count), outside


def _is_outside(build: Builder, indices: Ref, start: int, stop: int) -> Ref:
    """Return a mask of the indices that are not in ``[start, stop)``."""
    below = build.op("aten.lt.Scalar", indices, start)
    outside: Ref = build.op(
        "aten.logical_or.default", below, build.op("aten.ge.Scalar", indices, stop)
    )
    return outside


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
