"""A row's local program, and what several families lower in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lazygt.graph.label import Label, Sharded, local_shape
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.passes.rules.base import Call, Row, Values

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def lower_row(build: Builder, row: Row, node: Node, operands: Sequence[Ref]) -> Values:
    """Add the local program of ``node`` by ``row``; its results.

    Args:
        node: of the global graph.
        operands: local values with the row's input labels, in order of ``node.refs()``.
    """
    if row.lower is not None:
        return row.lower(build, node, operands)
    return build.rerun(node, operands)


def zeros_when_empty(call: Call, row: Row) -> Row:
    """The row, for a kernel that takes no empty blocks: a rank with one gives zeros.

    For rows whose results are S where the block is also empty, or P(sum).
    """
    results, outputs = call.node.results, row.outputs
    split = [place for place, label in enumerate(row.inputs) if isinstance(label, Sharded)]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        if all(build.meta(operands[place]).numel for place in split):
            return lower_row(build, row, node, operands)
        return [
            None if meta is None else zeros(build, meta, label)
            for meta, label in zip(results, outputs, strict=True)
        ]

    return replace(row, lower=lower)


def zeros(build: Builder, meta: TensorMeta, label: Label) -> Ref:
    """This rank's part of a value of zeros."""
    shape = local_shape(meta.shape, label, build.parts, build.index)
    made: Ref = build.op("aten.zeros.default", shape, dtype=meta.dtype, device=DEVICE)
    return made
