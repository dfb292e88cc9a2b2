"""A row's local program, and what several families lower in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lazygt.graph.label import Label, Sharded
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.passes.rules.base import PMAX, Blockwise, Call, Collective, P, Row, S, Values

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def lower_row(build: Builder, row: Row, node: Node, operands: Sequence[Ref]) -> Values:
    """Add the local program of ``node`` by ``row``; its results.

    Args:
        node: of the global graph.
        operands: local values with the row's input labels, in order of ``node.refs()``.
    """
    if isinstance(row.lower, Blockwise):
        return row.lower.program(build, row, node, operands)
    if row.lower is not None:
        return row.lower(build, node, operands)
    return build.rerun(node, operands)


def zeros_when_empty(call: Call, row: Row) -> Row:
    """The row, for a kernel that takes no empty blocks: a rank with one gives zeros.

    For rows whose results are S where the block is also empty, or P(sum).
    """
    results, inner = call.node.results, row.lower
    split = [place for place, label in enumerate(row.inputs) if isinstance(label, Sharded)]

    def program(build: Builder, row: Row, node: Node, operands: Sequence[Ref]) -> Values:
        if all(build.meta(operands[place]).numel for place in split):
            return lower_row(build, row.by(inner), node, operands)
        return [
            None if meta is None else zeros(build, meta, label)
            for meta, label in zip(results, row.outputs, strict=True)
        ]

    if inner is None or isinstance(inner, Blockwise):
        return replace(row, lower=Blockwise(program))
    return replace(row, lower=lambda build, node, operands: program(build, row, node, operands))


def scattered(call: Call, dims: Mapping[str, int], kept: int | None = None) -> list[Row]:
    """The row of an op that only moves elements, for operands that are split where it moves them.

    Each rank does the op with its blocks among zeros; the result is the sum of those (of bools,
    the maximum).

    Args:
        dims: the dim that is split, of each tensor argument that is.
        kept: the dim that the result is reduced into blocks of, inside the row; None: it is left
            partial, for a result that is smaller than its operand.
    """
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    result = call.result()
    if all(meta.shape[dim] < 2 for dim in dims.values() for meta in metas):
        return []
    if kept is not None and result.shape[kept] < 2:
        return []
    partial = PMAX if result.dtype == torch.bool else P
    labels = {name: S(dim) for name, dim in dims.items()}
    row = call.row(partial if kept is None else S(kept), **labels)
    comm = [] if kept is None else [Collective("reduce_scatter", result.nbytes, partial.op)]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        wide = [
            among_zeros(build, value, given.dim, meta.shape[given.dim])
            if isinstance(given, Sharded)
            else value
            for value, given, meta in zip(operands, row.inputs, metas, strict=True)
        ]
        made = build.rerun(node, wide)
        if kept is None or made[0] is None:
            return made
        return (build.reduce_scatter(made[0], kept, partial.op),)

    return [row.by(lower, comm)]


def among_zeros(build: Builder, value: Ref, dim: int, size: int) -> Ref:
    """This rank's block along ``dim``, where it is among zeros for those of the others."""
    start, stop = build.bounds(size)
    after = [0, 0] * (len(build.shape(value)) - 1 - dim)
    made: Ref = build.op("aten.constant_pad_nd.default", value, (*after, start, size - stop), 0)
    return made


def own_part(build: Builder, size: int, first: int, last: int) -> tuple[int, int]:
    """The part of ``first`` to ``last`` that lies in this rank's block of a dim of ``size``.

    It starts and stops at the same place, in ``first`` to ``last``, where there is none.
    """
    start, stop = build.bounds(size)
    a = min(max(first, start), max(first, last))
    return a, max(a, min(last, stop))


def zeros(build: Builder, meta: TensorMeta, label: Label) -> Ref:
    """This rank's part of a value of zeros."""
    shape = build.local(meta.shape, label)
    made: Ref = build.op("aten.zeros.default", shape, dtype=meta.dtype, device=DEVICE)
    return made
