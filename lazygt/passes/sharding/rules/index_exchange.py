"""Gather and scatter of rows by sharded indices, of a value sharded along dim 0.

Each rank sends exactly the rows that other ranks need (``take_rows``, ``put_rows``). Their number
depends on the indices; the cost model assumes uniformly distributed indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref, ref
from lazygt.graph.placement import Placement, block_size
from lazygt.passes.sharding.lower.builder import numbers
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    R,
    S,
    Strategy,
    Values,
    shardable_dims,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.lower.builder import Builder

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
        return (take(build, args[value], value_meta, indices),)

    return [
        with_exchange(
            call.strategy(S(dim), **{value: S(0), index: S(dim)}).by(lower),
            Rows(call, "take_rows", index, value_meta, index_shape, dim),
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
        return (put(build, args["self"], value_meta, indices, rows, added),)

    return [
        with_exchange(
            call.strategy(
                S(0),
                self=S(0),
                **{index: S(dim), source: broadcast_placement(call.shape(source), shape, dim)},
            ).by(lower),
            Rows(call, "put_rows", index, value_meta, index_shape, dim),
        )
        for dim in shardable_dims(index_shape)
    ]


def broadcast_placement(shape: tuple[int, ...], into: tuple[int, ...], dim: int) -> Placement:
    """Return the placement of a value broadcast to shape ``into``, sharded along ``dim``."""
    own_dim = dim - (len(into) - len(shape))
    return S(own_dim) if own_dim >= 0 and shape[own_dim] == into[dim] else R


def is_row_index(call: Call, index: str) -> bool:
    """Return whether an index of element shape is one index per row, expanded over the row."""
    meta = call.meta(index)
    shape = call.shape("self")
    return (
        meta.shape[1:] == shape[1:]
        and bool(meta.shape[1:])
        and all(stride == 0 or size == 1
                for size, stride in zip(meta.shape[1:], meta.stride[1:], strict=True))
    )  # fmt: skip


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


class Rows(NamedTuple):
    """Rows of ``value`` that ranks exchange."""

    call: Call
    kind: str  # collective, ``take_rows`` or ``put_rows``
    names: str  # name of the argument with the indices
    value: TensorMeta
    picked: tuple[int, ...]  # global shape of the indices, which are sharded along ``dim``
    dim: int


def with_exchange(strategy: Strategy, rows: Rows) -> Strategy:
    """Add the exchange's cost to a strategy; the indices must already be sharded for it."""
    names = [(name, number) for name, arg in rows.call.args.items() for number in numbers(arg)]
    index_operands = tuple([number for number, (name, _) in enumerate(names) if name == rows.names])
    count = prod(rows.picked) // rows.picked[rows.dim]
    count *= block_size(rows.picked[rows.dim], rows.call.axis_size, 0)
    row_bytes = prod(rows.value.shape[len(index_operands) :]) * rows.value.dtype.itemsize
    collective = Collective(rows.kind, count * (row_bytes + _INDEX_BYTES))
    return replace(strategy, comm=(collective,), preplaced=index_operands)


def take(build: Builder, block: Ref, value: TensorMeta, indices: Sequence[Ref]) -> Ref:
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


def put(
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
    rows_per_index = prod(value.shape[1:num_indexed])
    return block_size(value.shape[0], build.parts, 0) * rows_per_index, value.shape[
        0
    ] * rows_per_index


def _flat_index(build: Builder, indices: Sequence[Ref], value: TensorMeta) -> Ref:
    """Flatten the indices of the first dims to one row index.

    The row index is out of range if one of the indices is.
    """
    linear, *others = indices
    for index, size in zip(others, value.shape[1:], strict=False):
        outside = build.op(
            "aten.logical_or.default",
            build.op("aten.lt.Scalar", index, 0),
            build.op("aten.ge.Scalar", index, size),
        )
        scaled = build.op("aten.mul.Scalar", linear, size)
        linear = build.op("aten.add.Tensor", scaled, index)
        linear = build.op("aten.masked_fill.Scalar", linear, outside, -(1 << 62))
    flat = build.reshape(linear, (build.meta(linear).numel,))
    if build.meta(flat).dtype != torch.int64:
        flat = build.op("aten._to_copy.default", flat, dtype=torch.int64)
    return flat
