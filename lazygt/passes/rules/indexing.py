"""Ops that read and write where indices say; a rank reads and writes in its own block only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

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
from lazygt.passes.rules.embedding import own_indices

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def _summable(call: Call) -> bool:
    return call.meta("self").dtype != torch.bool


def _index_select(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    found = [call.row(S(d), self=S(d)) for d in splittable(shape) if d != dim]
    if splittable(call.shape("index")):
        found.append(call.row(S(dim), index=S(0)))
    if shape[dim] > 1 and _summable(call):
        found.append(call.row(P, self=S(dim)).by(_selected(dim, shape[dim])))
    return [*found, call.row(P, self=P)]


def _selected(dim: int, size: int) -> Lower:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        shape = build.shape(value)
        if not shape[dim]:
            picked = build.meta(index).numel
            return (build.full((*shape[:dim], picked, *shape[dim + 1 :]), 0, like=value),)
        own, outside = own_indices(build, index, size)
        made = build.op("aten.index_select.default", value, dim, own)
        outside = build.reshape(outside, (-1, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", made, outside, 0),)

    return lower


def _gather(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The index may be smaller than the operand, so dims pass only in equal sizes."""
    call = Call(node, metas, parts)
    shape, index = call.shape("self"), call.shape("index")
    if not shape or not index:
        return ()
    dim = call.dim("dim", len(shape))
    found = [
        call.row(S(d), self=S(d), index=S(d))
        for d in splittable(index)
        if d != dim and shape[d] == index[d]
    ]
    if index[dim] > 1:
        found.append(call.row(S(dim), index=S(dim)))
    if shape[dim] > 1 and _summable(call):
        found.append(call.row(P, self=S(dim)).by(_gathered(dim, shape[dim])))
    return [*found, call.row(P, self=P)]


def _gathered(dim: int, size: int) -> Lower:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, index = args["self"], args["index"]
        if not build.shape(value)[dim]:
            return (build.full(build.shape(index), 0, like=value),)
        own, outside = own_indices(build, index, size)
        made = build.op("aten.gather.default", value, dim, own)
        return (build.op("aten.masked_fill.Scalar", made, outside, 0),)

    return lower


def _scatter(added: bool) -> Rule:
    """scatter, scatter_add: dims other than the one that is indexed, where all have them whole."""

    def rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
        call = Call(node, metas, parts)
        shape, index = call.shape("self"), call.shape("index")
        if not shape or not index:
            return ()
        dim = call.dim("dim", len(shape))
        names = ["self", "index", *(["src"] if call.has("src") else [])]
        found = [
            call.row(S(d), **dict.fromkeys(names, S(d)))
            for d in splittable(shape)
            if d != dim and all(call.shape(name)[d] == shape[d] for name in names)
        ]
        if added:
            found.append(call.row(P, self=P, src=P))
            if index[dim] > 1 and call.shape("src")[dim] == index[dim]:
                found.append(call.row(P, self=P, index=S(dim), src=S(dim)))
        return found

    return rows


def _index_add(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    found = [call.row(S(d), self=S(d), source=S(d)) for d in splittable(shape) if d != dim]
    if splittable(call.shape("index")):
        found.append(call.row(P, self=P, index=S(0), source=S(dim)))
    return [*found, call.row(P, self=P, source=P)]


def _index(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
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
    free = [d for d in splittable(shape) if d not in taken]
    found = [call.row(S(d + (grown if d > taken[0] else 0)), self=S(d)) for d in free]
    if len(taken) == 1:
        dims = splittable(known[0].shape)
        found += [call.row(S(taken[0] + d), indices=S(d)) for d in dims]
        if shape[taken[0]] > 1 and _summable(call):
            found.append(call.row(P, self=S(taken[0])).by(_indexed(taken[0], shape[taken[0]])))
    return [*found, call.row(P, self=P)]


def _indexed(dim: int, size: int) -> Lower:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value, index = operands
        shape = build.shape(value)
        picked = build.shape(index)
        if not shape[dim]:
            return (build.full((*shape[:dim], *picked, *shape[dim + 1 :]), 0, like=value),)
        below = build.op("aten.lt.Scalar", index, 0)  # torch counts those from the end
        index = build.op("aten.where.self", below, build.op("aten.add.Scalar", index, size), index)
        own, outside = own_indices(build, index, size)
        made = build.op("aten.index.Tensor", value, (*[None] * dim, own))
        outside = build.reshape(outside, (*picked, *[1] * (len(shape) - 1 - dim)))
        return (build.op("aten.masked_fill.Scalar", made, outside, 0),)

    return lower


def _index_put(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Dims that no index takes; partial sums when the values are added."""
    call = Call(node, metas, parts)
    shape, indices, values = call.shape("self"), call["indices"], call.shape("values")
    found = [call.row(P, self=P, values=P)] if call["accumulate"] else []
    known = [m for index in indices if index is not None and (m := metas[index.index]) is not None]
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    masked = any(meta.dtype in (torch.bool, torch.uint8) for meta in known)
    if masked and taken == [0] and call.meta("values").numel == 1:
        return found + _masked_put(call, len(known[0].shape))
    if masked or taken != list(range(len(taken))):
        return found  # the values' dims are then in other places
    rank = max((len(meta.shape) for meta in known), default=0)
    for dim in splittable(shape):
        if dim not in taken:
            own = dim - len(taken) + rank - (rank + len(shape) - len(taken) - len(values))
            split = own >= 0 and values[own] == shape[dim]
            found.append(call.row(S(dim), self=S(dim), values=S(own) if split else R))
    return found


def _masked_put(call: Call, rank: int) -> list[Row]:
    """One number where a mask of the first ``rank`` dims is: as pointwise."""
    return [
        call.row(S(dim), self=S(dim), indices=S(dim) if dim < rank else R)
        for dim in splittable(call.shape("self"))
    ]


def _along_others(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """index_fill, index_copy, index_reduce: dims other than the one that is indexed."""
    call = Call(node, metas, parts)
    shape = call.shape("self")
    if not shape:
        return ()
    dim = call.dim("dim", len(shape))
    names = ("self", "source") if call.has("source") else ("self",)
    if any(len(call.shape(name)) != len(shape) for name in names):
        return ()
    split = [d for d in splittable(shape) if d != dim]
    return [call.row(S(d), **dict.fromkeys(names, S(d))) for d in split]


RULES: dict[str, Rule] = {
    **table("index_select.default", _index_select),
    **table("gather.default", _gather),
    **table("scatter_add.default scatter_add_.default", _scatter(added=True)),
    **table(
        "scatter.src scatter_.src scatter.value scatter_.value scatter_reduce.two ",
        _scatter(added=False),
    ),
    **table("index_add.default index_add_.default", _index_add),
    **table(
        "index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_copy.default "
        "index_copy_.default index_reduce.default",
        _along_others,
    ),
    **table("index_put.default index_put_.default", _index_put),
    **table("index.Tensor _unsafe_index.Tensor", _index),
}
