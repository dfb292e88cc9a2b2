"""Windows along a cut dim, and pads by rows at the ends: each rank is sent its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.rows import Ranges, RowExchange, Rows, blocks
from lazygt.passes.sharding.rules import table as pictures
from lazygt.passes.sharding.rules.base import (
    Call,
    Lowering,
    Metas,
    Rule,
    S,
    Strategy,
    Values,
    row_comm,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_TEXTS = pictures.RULES


def _unfolded(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of windows along a cut dim: each rank makes those of its block."""
    call = Call(node, metas, parts)
    strategies = [*_TEXTS[node.op](node, metas, parts)]
    value, dim = call.meta("self"), call.dim("dimension", len(call.shape("self")))
    size, step = call["size"], call["step"]
    bounds = [shard_bounds(call.result().shape[dim], parts, rank) for rank in range(parts)]
    if any(start >= stop for start, stop in bounds):
        return strategies
    want = tuple([((a * step, (b - 1) * step + size),) for a, b in bounds])
    move = RowExchange(dim, blocks(value.shape[dim], parts), want)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, [build.rows(operands[0], move)])

    return [*strategies, call.strategy(S(dim), self=S(dim)).by(lower, row_comm(move, value))]


def _repeating(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of pads by the picture's own rows, mirrored or the last one again.

    Each rank is sent those rows.
    """
    call = Call(node, metas, parts)
    strategies = [*_TEXTS[node.op](node, metas, parts)]
    value, wide, pads = call.meta("self"), call.result().shape, call["padding"]
    for at in range(len(pads) // 2):
        dim = len(wide) - 1 - at
        bounds = [shard_bounds(wide[dim], parts, rank) for rank in range(parts)]
        mirrored = "reflection" in node.op
        want = [
            _joined([_inside(i - pads[2 * at], value.shape[dim], mirrored) for i in range(*rows)])
            for rows in bounds
        ]
        move = RowExchange(dim, blocks(value.shape[dim], parts), tuple(want))
        rest = [0 if which // 2 == at else pad for which, pad in enumerate(pads)]
        refused = any(rest) and not all(want)  # the kernel takes no empty block
        if value.shape[dim] > 1 and move.is_worth_it and not refused:
            strategy = call.strategy(S(dim), self=S(dim))
            strategies.append(strategy.by(_padded_along(move, rest), row_comm(move, value)))
    return strategies


def _inside(row: int, size: int, mirrored: bool) -> int:
    """Return the row that stands for one before the first or behind the last."""
    if mirrored:
        row = abs(row)
        return row if row < size else 2 * (size - 1) - row
    return min(max(row, 0), size - 1)


def _joined(rows: Sequence[int]) -> Ranges:
    """Return rows one by one as ranges of those that follow each other."""
    ranges: list[Rows] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _padded_along(move: RowExchange, rest: Sequence[int]) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], move)
        return build.rerun(node, [rows], padding=rest) if any(rest) else (rows,)

    return lower


RULES: dict[str, Rule] = {
    **table("unfold.default unfold_copy.default", _unfolded),
    **table(
        "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default",
        _repeating,
    ),
}
