"""Exchange of rows by indices in blocks, with a value in blocks of rows.

Each rank sends the rows that belong elsewhere, and no more; only the indices tell how many. Costs
take them to be spread evenly.
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
from lazygt.passes.sharding.builder import numbers
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
    from lazygt.passes.sharding.builder import Builder

_PLACE = 8  #: bytes of a row's place
#: Ops with indices that may count from the end.
_FROM_END = ("aten.index.", "aten._unsafe_index.", "aten.index_put", "aten._index_put_impl")


def taking(call: Call, value: str, index: str, by_element: bool = False) -> list[Strategy]:
    """Return the strategies of an op that takes rows of ``value`` by indices in blocks.

    Args:
        index: the argument with the index of the first dim, or of the first dims.
        by_element: it has one for each element of a row; all of a row are equal.
    """
    whole, metas = call.meta(value), _indices(call, index)
    if not metas or whole.shape[0] < 2:
        return []
    picked = metas[0].shape[: 1 if by_element else None]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        indices = _local_indices(build, node, args[index], whole, by_element)
        return (take(build, args[value], whole, indices),)

    return [
        exchanging(
            call.strategy(S(dim), **{value: S(0), index: S(dim)}).by(lower),
            Rows(call, "take_rows", index, whole, picked, dim),
        )
        for dim in shardable_dims(picked)
    ]


def putting(
    call: Call, index: str, given: str, added: bool, by_element: bool = False
) -> list[Strategy]:
    """Return the strategies of an op that puts, or adds, rows of ``given`` into ``self``.

    The indices are in blocks; see ``taking``.
    """
    whole, metas = call.meta("self"), _indices(call, index)
    if not metas or whole.shape[0] < 2 or (added and whole.dtype == torch.bool):
        return []
    picked = metas[0].shape[: 1 if by_element else None]
    shape = (*picked, *whole.shape[len(metas) :])

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        indices = _local_indices(build, node, args[index], whole, by_element)
        rows = args[given]
        if args.get("alpha", 1) != 1:
            rows = build.op("aten.mul.Scalar", rows, args["alpha"])
        return (put(build, args["self"], whole, indices, rows, added),)

    return [
        exchanging(
            call.strategy(
                S(0), self=S(0), **{index: S(dim), given: spread(call.shape(given), shape, dim)}
            ).by(lower),
            Rows(call, "put_rows", index, whole, picked, dim),
        )
        for dim in shardable_dims(picked)
    ]


def spread(shape: tuple[int, ...], into: tuple[int, ...], dim: int) -> Placement:
    """Return the placement of a value that is broadcast to a shape with a cut dim."""
    at = dim - (len(into) - len(shape))
    return S(at) if at >= 0 and shape[at] == into[dim] else R


def of_each_element(call: Call, index: str) -> bool:
    """Return whether each element's index is that of its whole row, as ``expand`` gives it."""
    meta = call.meta(index)
    shape = call.shape("self")
    return (
        meta.shape[1:] == shape[1:]
        and bool(meta.shape[1:])
        and all(stride == 0 or size == 1
                for size, stride in zip(meta.shape[1:], meta.stride[1:], strict=True))
    )  # fmt: skip


def _indices(call: Call, name: str) -> list[TensorMeta]:
    """Return the metas of the indices.

    Empty where they are not all of one shape, or not whole numbers.
    """
    metas = [meta for n in numbers(call[name]) if (meta := call.metas[n]) is not None]
    alike = len({meta.shape for meta in metas}) == 1
    known = all(meta.dtype in (torch.int64, torch.int32) for meta in metas)
    return metas if alike and known else []


def _local_indices(
    build: Builder, node: Node, arg: Arg, value: TensorMeta, by_element: bool
) -> list[Ref]:
    """Return the local indices of the first dims, counted from the front."""
    indices = [ref(number) for number in numbers(arg)]
    if by_element:
        (index,) = indices
        for _ in value.shape[1:]:
            index = build.op("aten.select.int", index, 1, 0)
        return [index]
    if not node.op.startswith(_FROM_END):
        return indices
    return [
        _counted_from_front(build, index, size)
        for index, size in zip(indices, value.shape, strict=False)
    ]


class Rows(NamedTuple):
    """Rows of ``value`` that are exchanged.

    Attributes:
        names: the argument with their indices.
        picked: the shape of the indices, which are cut along ``dim``.
    """

    call: Call
    kind: str
    names: str
    value: TensorMeta
    picked: tuple[int, ...]
    dim: int


def exchanging(strategy: Strategy, rows: Rows) -> Strategy:
    """Return the strategy with its exchange. To cut indices only for it would be no use."""
    names = [(name, number) for name, arg in rows.call.args.items() for number in numbers(arg)]
    places = tuple([place for place, (name, _) in enumerate(names) if name == rows.names])
    count = prod(rows.picked) // rows.picked[rows.dim]
    count *= block_size(rows.picked[rows.dim], rows.call.parts, 0)
    row = prod(rows.value.shape[len(places) :]) * rows.value.dtype.itemsize
    inside = Collective(rows.kind, count * (row + _PLACE))
    return replace(strategy, comm=(inside,), given=places)


def take(build: Builder, block: Ref, value: TensorMeta, indices: Sequence[Ref]) -> Ref:
    """Return rows of a value, by an index for each of its first dims.

    The result has the indices' dims in the place of these.

    Args:
        block: this rank's, along dim 0.
        value: the global meta.
    """
    taken, shape, picked = len(indices), build.shape(block), build.shape(indices[0])
    if taken > 1:
        block = build.reshape(block, (prod(shape[:taken]), *shape[taken:]))
    rows = build.take_rows(block, _linear(build, indices, value), *_rows(build, value, taken))
    return build.reshape(rows, (*picked, *value.shape[taken:]))


def put(
    build: Builder,
    block: Ref,
    value: TensorMeta,
    indices: Sequence[Ref],
    given: Ref,
    added: bool,
) -> Ref:
    """Return this rank's block with all ranks' rows put, or added, by their indices.

    Args:
        given: the rows; may be broadcast to the indices' dims and the value's others.
    """
    taken, shape = len(indices), build.shape(block)
    picked, rest = build.shape(indices[0]), value.shape[taken:]
    if build.shape(given) != (*picked, *rest):
        given = build.op("aten.expand.default", given, (*picked, *rest))
    given = build.reshape(given, (prod(picked), *rest))
    if taken > 1:
        block = build.reshape(block, (prod(shape[:taken]), *rest))
    index = _linear(build, indices, value)
    block = build.put_rows(block, index, given, *_rows(build, value, taken), added)
    return build.reshape(block, shape)


def _counted_from_front(build: Builder, index: Ref, size: int) -> Ref:
    """Return an index with the negative ones, which torch counts from the end, wrapped."""
    below = build.op("aten.lt.Scalar", index, 0)
    shifted = build.op("aten.add.Scalar", index, size)
    counted: Ref = build.op("aten.where.self", below, shifted, index)
    return counted


def _rows(build: Builder, value: TensorMeta, taken: int) -> tuple[int, int]:
    """Return rows of the first block, and of the whole, with the first ``taken`` dims as one."""
    inner = prod(value.shape[1:taken])
    return block_size(value.shape[0], build.parts, 0) * inner, value.shape[0] * inner


def _linear(build: Builder, indices: Sequence[Ref], value: TensorMeta) -> Ref:
    """Return one flat index of the first dims; it is out of range where any of theirs is."""
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
