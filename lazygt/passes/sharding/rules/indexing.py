"""Indexed reads and writes: index_select, gather, scatter, index_add, index, index_put.

Along a sharded indexed dim a rank reads and writes its own block only. If the indices are sharded
too, each rank sends exactly the rows that other ranks need (``take_rows``, ``put_rows``). Their
number depends on the indices; the cost model assumes uniformly distributed indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref, ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.lower.builder import Builder, numbers
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    Lowering,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    broadcast_placement,
    passing,
    shardable_dims,
    table,
    without,
)

# -- one rank's rows of a value sharded along an indexed dim ---------------------------------------


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


#: Adds a read of (value, local index); returns the elements.
Read = Callable[[Builder, Ref, Ref], Ref]


def read_owned(
    dim: int,
    size: int,
    read: Read,
    align: Callable[[Builder, Ref], Ref] = lambda build, mask: mask,
    wraps: bool = False,
) -> Lowering:
    """Return the lowering of a read along a sharded dim: zeros for elements of other ranks.

    Args:
        size: global size of ``dim``.
        align: function of a mask of the indices to one that broadcasts to the elements.
        wraps: whether negative indices count from the end.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value, index), (result,) = operands, node.results
        assert result is not None
        if not build.shape(value)[dim]:
            return (build.full(result.shape, 0, like=value),)
        index = _wrap_negative(build, index, size) if wraps else index
        local_index, outside = to_local_indices(build, index, size)
        elements = read(build, value, local_index)
        return (build.op("aten.masked_fill.Scalar", elements, align(build, outside), 0),)

    return lower


def write_owned(
    build: Builder, op: str, block: Ref, dim: int, index: tuple[Ref, Ref], source: Arg
) -> Ref:
    """Write into this rank's block of a value that is sharded along ``dim``.

    Elements of other ranks are written to an extra last row, which is dropped.

    Args:
        op: functional op of (block, dim, index, source).
        index: result of ``to_local_indices``.
    """
    (local_index, outside), shape = index, build.shape(block)
    dropped = build.op(
        "aten.logical_and.default", outside, build.op("aten.eq.Scalar", local_index, 0)
    )
    local_index = build.op("aten.masked_fill.Scalar", local_index, dropped, shape[dim])
    extra_row = build.full((*shape[:dim], 1, *shape[dim + 1 :]), 0, like=block)
    extended = build.op("aten.cat.default", (block, extra_row), dim)
    extended = build.op(op, extended, dim, local_index, source)
    return build.slice(extended, dim, 0, shape[dim])


# -- exchanges of rows by sharded indices ----------------------------------------------------------

_INDEX_BYTES = 8  #: bytes of the index of a row
#: Ops that accept negative indices.
_WITH_NEGATIVES = ("aten.index.", "aten._unsafe_index.", "aten.index_put", "aten._index_put_impl")


def take_strategies(call: Call, value: str, index: str, by_element: bool = False) -> list[Strategy]:
    """Return the strategies of an op that gathers rows of ``value`` by sharded indices.

    Args:
        value: name of the argument with the rows.
        index: name of the argument with the index of the first dim, or of the first dims.
        by_element: whether the index has the shape of the rows, with equal indices within a row.
    """
    value_meta, metas = call.meta(value), _indices(call, index)
    if not metas or value_meta.shape[0] < 2:
        return []
    index_shape = metas[0].shape[: 1 if by_element else None]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        indices = _local_indices(build, node, args[index], value_meta, by_element)
        return (_take(build, args[value], value_meta, indices),)

    return [
        with_row_exchange(
            call.strategy(S(dim), **{value: S(0), index: S(dim)}).by(lower),
            *(call, "take_rows", index, value_meta, index_shape, dim),
        )
        for dim in shardable_dims(index_shape)
    ]


def put_strategies(
    call: Call, index: str, source: str, added: bool, by_element: bool = False
) -> list[Strategy]:
    """Return the strategies of an op that scatters rows of ``source`` into ``self``.

    Args:
        index, by_element: see ``take_strategies``.
        source: name of the argument with the rows.
        added: whether the rows are added; else they replace the old ones.
    """
    value_meta, metas = call.meta("self"), _indices(call, index)
    if not metas or value_meta.shape[0] < 2 or (added and value_meta.dtype == torch.bool):
        return []
    index_shape = metas[0].shape[: 1 if by_element else None]
    shape = (*index_shape, *value_meta.shape[len(metas) :])

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        indices = _local_indices(build, node, args[index], value_meta, by_element)
        rows = args[source]
        if args.get("alpha", 1) != 1:
            rows = build.op("aten.mul.Scalar", rows, args["alpha"])
        return (put_rows(build, args["self"], value_meta, indices, rows, added),)

    return [
        with_row_exchange(
            call.strategy(
                S(0),
                self=S(0),
                **{index: S(dim), source: broadcast_placement(call.shape(source), shape, dim)},
            ).by(lower),
            *(call, "put_rows", index, value_meta, index_shape, dim),
        )
        for dim in shardable_dims(index_shape)
    ]


def is_row_index(call: Call, index: str) -> bool:
    """Return whether an index of element shape is one index per row, expanded over the row."""
    meta, shape = call.meta(index), call.shape("self")
    rows = zip(meta.shape[1:], meta.stride[1:], strict=True)
    is_expanded = len(shape) > 1 and all(stride == 0 or size == 1 for size, stride in rows)
    return is_expanded and meta.shape[1:] == shape[1:]


def _indices(call: Call, name: str) -> list[TensorMeta]:
    """Return the metas of the index tensors; empty unless all are integers of one shape."""
    metas = [meta for n in numbers(call[name]) if (meta := call.metas[n]) is not None]
    same_shape = len({meta.shape for meta in metas}) == 1
    are_integers = all(meta.dtype in (torch.int64, torch.int32) for meta in metas)
    return metas if same_shape and are_integers else []


def _local_indices(
    build: Builder, node: Node, arg: Arg, value: TensorMeta, by_element: bool
) -> list[Ref]:
    """Return this rank's non-negative indices of the first dims of ``value``."""
    indices = [ref(number) for number in numbers(arg)]
    if by_element:
        (index,) = indices
        for _ in value.shape[1:]:
            index = build.op("aten.select.int", index, 1, 0)
        return [index]
    if not node.op.startswith(_WITH_NEGATIVES):
        return indices
    return [
        _wrap_negative(build, index, size)
        for index, size in zip(indices, value.shape, strict=False)
    ]


def with_row_exchange(
    strategy: Strategy,
    call: Call,
    kind: str,
    index: str,
    value: TensorMeta,
    shape: tuple[int, ...],
    dim: int,
) -> Strategy:
    """Add the cost of an exchange of rows of ``value``; the indices must already be sharded for it.

    Args:
        kind: collective, ``take_rows`` or ``put_rows``.
        index: name of the argument with the indices.
        shape: global shape of the indices, which are sharded along ``dim``.
    """
    names = [(name, number) for name, arg in call.args.items() for number in numbers(arg)]
    index_operands = tuple([number for number, (name, _) in enumerate(names) if name == index])
    count = prod(shape) // shape[dim] * block_size(shape[dim], call.axis_size, 0)
    row_bytes = prod(value.shape[len(index_operands) :]) * value.dtype.itemsize
    collective = Collective(kind, count * (row_bytes + _INDEX_BYTES))
    return replace(strategy, comm=(collective,), preplaced=index_operands)


def _take(build: Builder, block: Ref, value: TensorMeta, indices: Sequence[Ref]) -> Ref:
    """Gather rows of a sharded value by one index tensor for each of its first dims.

    Args:
        block: this rank's block of the value, along dim 0.
        value: global meta of the value.

    Returns:
        Rows in the shape (*indices, *remaining dims of the value).
    """
    num_indexed, shape, index_shape = len(indices), build.shape(block), build.shape(indices[0])
    if num_indexed > 1:
        block = build.reshape(block, (prod(shape[:num_indexed]), *shape[num_indexed:]))
    rows = build.take_rows(
        block, _flat_index(build, indices, value), *_row_counts(build, value, num_indexed)
    )
    return build.reshape(rows, (*index_shape, *value.shape[num_indexed:]))


def put_rows(
    build: Builder,
    block: Ref,
    value: TensorMeta,
    indices: Sequence[Ref],
    rows: Ref,
    added: bool,
) -> Ref:
    """Scatter all ranks' rows into a sharded value; return this rank's block.

    Args:
        block: this rank's block of the value, along dim 0.
        value: global meta of the value.
        rows: broadcastable to (*indices, *remaining dims of the value).
        added: whether the rows are added; else they replace the old ones.
    """
    num_indexed, shape = len(indices), build.shape(block)
    index_shape, rest = build.shape(indices[0]), value.shape[num_indexed:]
    if build.shape(rows) != (*index_shape, *rest):
        rows = build.op("aten.expand.default", rows, (*index_shape, *rest))
    rows = build.reshape(rows, (prod(index_shape), *rest))
    if num_indexed > 1:
        block = build.reshape(block, (prod(shape[:num_indexed]), *rest))
    index = _flat_index(build, indices, value)
    block = build.put_rows(block, index, rows, *_row_counts(build, value, num_indexed), added)
    return build.reshape(block, shape)


def _wrap_negative(build: Builder, index: Ref, size: int) -> Ref:
    """Wrap negative indices of a dim of ``size``."""
    negative = build.op("aten.lt.Scalar", index, 0)
    shifted = build.op("aten.add.Scalar", index, size)
    wrapped: Ref = build.op("aten.where.self", negative, shifted, index)
    return wrapped


def _row_counts(build: Builder, value: TensorMeta, num_indexed: int) -> tuple[int, int]:
    """Return the numbers of rows of rank 0's block and of the value, first dims flattened."""
    count, rows_per_index = value.shape[0], prod(value.shape[1:num_indexed])
    return block_size(count, build.parts, 0) * rows_per_index, count * rows_per_index


def _flat_index(build: Builder, indices: Sequence[Ref], value: TensorMeta) -> Ref:
    """Flatten the indices of the first dims to one row index.

    The row index is out of range if one of the indices is.
    """
    linear, *others = indices
    for index, size in zip(others, value.shape[1:], strict=False):
        outside = _is_outside(build, index, 0, size)
        scaled = build.op("aten.mul.Scalar", linear, size)
        linear = build.op("aten.add.Tensor", scaled, index)
        linear = build.op("aten.masked_fill.Scalar", linear, outside, -(1 << 62))
    flat = build.reshape(linear, (build.meta(linear).numel,))
    if build.meta(flat).dtype != torch.int64:
        flat = build.op("aten._to_copy.default", flat, dtype=torch.int64)
    return flat


# -- rules -----------------------------------------------------------------------------------------


def _is_summable(call: Call) -> bool:
    """Return whether partial sums of the operand exist: torch has no sum of bools."""
    return call.meta("self").dtype != torch.bool


def _index_select(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index_select."""
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim()
    strategies = passing(call, without(call.rank, {dim}))
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(S(dim), index=S(0)))
    if shape[dim] > 1 and _is_summable(call):
        lower = read_owned(
            *(dim, shape[dim]),
            lambda build, value, index: build.op("aten.index_select.default", value, dim, index),
            lambda build, mask: build.reshape(mask, (-1, *[1] * (len(shape) - 1 - dim))),
        )
        strategies.append(call.strategy(P, self=S(dim)).by(lower))
    strategies += [] if dim else take_strategies(call, "self", "index")
    return [*strategies, call.strategy(P, self=P)]


def _gather(call: Call) -> Sequence[Strategy]:
    """Return the strategies of gather.

    The index may be smaller than the operand, so a dim is sharded in both only if sizes are equal.
    """
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        return ()
    dim = call.dim()
    equal = [d if d != dim and size == index[d] else None for d, size in enumerate(shape)]
    strategies = passing(call, equal, names=("self", "index"))
    if index[dim] > 1:
        strategies.append(call.strategy(S(dim), index=S(dim)))
    if shape[dim] > 1 and _is_summable(call):
        lower = read_owned(
            *(dim, shape[dim]),
            lambda build, value, index: build.op("aten.gather.default", value, dim, index),
        )
        strategies.append(call.strategy(P, self=S(dim)).by(lower))
    if dim == 0 and is_row_index(call, "index"):
        strategies += take_strategies(call, "self", "index", by_element=True)
    return [*strategies, call.strategy(P, self=P)]


#: Scatters that replace elements -> their functional overloads.
_REPLACING = {
    "aten.scatter.src": "aten.scatter.src",
    "aten.scatter_.src": "aten.scatter.src",
    "aten.scatter.value": "aten.scatter.value",
    "aten.scatter_.value": "aten.scatter.value",
}


def _scatter(call: Call, added: bool) -> Sequence[Strategy]:
    """Return the strategies of scatter, or of scatter_add if ``added``.

    The indexed dim is sharded with replicated indices: a rank writes the elements of its block. A
    dim other than the indexed one is sharded if all operands have the same size along the dim.
    """
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        return ()
    dim = call.dim()
    names = ["self", "index", *(["src"] if call.has("src") else [])]
    equal = [
        d if d != dim and all(call.shape(name)[d] == size for name in names) else None
        for d, size in enumerate(shape)
    ]
    strategies = passing(call, equal, names=names)
    if added:
        strategies.append(call.strategy(P, self=P, src=P))
        if index[dim] > 1 and call.shape("src")[dim] == index[dim]:
            strategies.append(call.strategy(P, self=P, index=S(dim), src=S(dim)))
    same_shape = call.has("src") and call.shape("src") == index
    replaces = added or call.node.op in _REPLACING
    if dim == 0 and replaces and is_row_index(call, "index") and same_shape:
        strategies += put_strategies(call, "index", "src", added, by_element=True)
    if shape[dim] > 1 and (same_shape if added else replaces):
        lower = partial(_lower_scatter_add, dim) if added else partial(_lower_scatter, dim)
        strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
    return strategies


def _lower_scatter_add(dim: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Scatter-add into a block: elements of other ranks add zeros."""
    args, (result,) = build.bind(node, operands), node.results
    assert result is not None
    if not build.shape(args["self"])[dim]:
        return (args["self"],)
    local_index, outside = to_local_indices(build, args["index"], result.shape[dim])
    source = build.op("aten.masked_fill.Scalar", args["src"], outside, 0)
    return build.rerun(node, operands, index=local_index, src=source)


def _lower_scatter(dim: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Scatter into a block."""
    args, (result,) = build.bind(node, operands), node.results
    assert result is not None
    value, source = args["self"], args.get("src", args.get("value"))
    index = to_local_indices(build, args["index"], result.shape[dim])
    new_block = write_owned(build, _REPLACING[node.op], value, dim, index, source)
    return (build.op("aten.copy_.default", value, new_block) if node.writes else new_block,)


def _index_add(call: Call) -> Sequence[Strategy]:
    """Return the strategies of index_add."""
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim()
    strategies = passing(call, without(call.rank, {dim}), names=("self", "source"))
    if shardable_dims(call.shape("index")):
        strategies.append(call.strategy(P, self=P, index=S(0), source=S(dim)))
    strategies += [] if dim else put_strategies(call, "index", "source", added=True)
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
    result_dims = [
        None if d in indexed else d + extra_dims * (d > indexed[0]) for d in range(len(shape))
    ]
    strategies = passing(call, result_dims)
    if len(indexed) == 1:
        (dim,), (meta,) = indexed, integer_metas
        strategies += [call.strategy(S(dim + d), indices=S(d)) for d in shardable_dims(meta.shape)]
        if shape[dim] > 1 and _is_summable(call):
            lower = read_owned(
                *(dim, shape[dim]),
                lambda build, value, index: build.op(
                    "aten.index.Tensor", value, (*[None] * dim, index)
                ),
                lambda build, mask: build.reshape(
                    mask, (*build.shape(mask), *[1] * (len(shape) - 1 - dim))
                ),
                wraps=True,
            )
            strategies.append(call.strategy(P, self=S(dim)).by(lower))
    strategies += [] if indexed[0] else take_strategies(call, "self", "indices")
    return [*strategies, call.strategy(P, self=P)]


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
            placement = broadcast_placement(values, value_shape, value_dim)
            strategies.append(call.strategy(S(dim), self=S(dim), values=placement))
    return [*strategies, *([] if indexed[0] else _sharded_indices(call, index_metas))]


def _sharded_indices(call: Call, indices: Sequence[TensorMeta]) -> list[Strategy]:
    """Return the strategies of sharded indices: an exchange of rows, or partial sums."""
    added = bool(call["accumulate"])
    strategies = put_strategies(call, "indices", "values", added)
    if not added or not _is_summable(call) or len({meta.shape for meta in indices}) != 1:
        return strategies
    index_shape = indices[0].shape
    shape = (*index_shape, *call.shape("self")[len(indices) :])
    values = call.shape("values")
    return strategies + [
        call.strategy(P, self=P, indices=S(dim), values=broadcast_placement(values, shape, dim))
        for dim in shardable_dims(index_shape)
    ]


def _masked_put(call: Call, rank: int) -> list[Strategy]:
    """Return the strategies of a number put by a mask over the first ``rank`` dims: pointwise."""
    return [
        call.strategy(S(dim), self=S(dim), indices=S(dim) if dim < rank else R)
        for dim in shardable_dims(call.shape("self"))
    ]


RULES: dict[str, Rule] = {
    **table("index_select.default", _index_select),
    **table("gather.default", _gather),
    **table("scatter_add.default scatter_add_.default", partial(_scatter, added=True)),
    **table(
        "scatter.src scatter_.src scatter.value scatter_.value scatter_reduce.two "
        "scatter.reduce scatter_.reduce scatter.value_reduce scatter_.value_reduce",
        partial(_scatter, added=False),
    ),
    **table("index_add.default index_add_.default", _index_add),
    **table("index_put.default index_put_.default _index_put_impl_.default", _index_put),
    **table("index.Tensor _unsafe_index.Tensor", _index),
}
