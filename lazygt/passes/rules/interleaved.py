"""Rows that take an operand interleaved: as they take it in S(dim), where that is as good.

An op that runs on blocks alone, and is right for every size of the blocks, computes each row of
the cut dim by itself, or adds up over all. So any rows of a dim will do in the place of neighbours,
if all tensors that the row cuts are cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lazygt.graph.label import Interleaved, Label, Sharded
from lazygt.graph.node import Node
from lazygt.passes.rules import views
from lazygt.passes.rules.base import Blockwise, Call, Metas, Row


def interleaved_rows(
    node: Node, metas: Metas, parts: int, rows: Sequence[Row], place: int, label: Interleaved
) -> list[Row]:
    """The rows in which the operand at ``place`` is interleaved.

    Args:
        rows: of the node, for blocks.
    """
    if node.op in views.RESHAPES:
        row = views.view_row(Call(node, metas, parts), label)
        return [] if row is None else [row]
    tensors = [metas[number] for number in node.refs()]
    wanted = (row for row in rows if row.inputs[place] == Sharded(label.dim))
    made = (_instead(row, tensors, node.results, label) for row in wanted)
    return [row for row in made if row is not None]


def _instead(row: Row, operands: Metas, results: Metas, wanted: Interleaved) -> Row | None:
    """The row with every cut dim cut so; None where the row needs neighbours, or cuts dims of
    several sizes."""
    if not (row.lower is None or isinstance(row.lower, Blockwise)):
        return None
    every = list(zip((*row.inputs, *row.outputs), (*operands, *results), strict=True))
    sizes = {
        meta.shape[label.dim]
        for label, meta in every
        if isinstance(label, Sharded) and meta is not None
    }
    if len(sizes) > 1:
        return None
    made = [_as(wanted, label) for label, _ in every]
    count = len(row.inputs)
    return replace(row, inputs=tuple(made[:count]), outputs=tuple(made[count:]))


def _as(wanted: Interleaved, label: Label) -> Label:
    return replace(wanted, dim=label.dim) if isinstance(label, Sharded) else label
