"""Ops that move elements along dims: flip, roll, pad, diagonal, triangle, repeat.

The other dims can be sharded freely, and partial sums pass through. Along a sharded moved dim,
ranks exchange rows, or the result is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Param, Ref
from lazygt.passes.sharding.lower.halo import Ranges, Rows
from lazygt.passes.sharding.rules.pointwise import add_number_once
from lazygt.passes.sharding.rules.slicing import clamped_range, exchanged_strategies
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    P,
    Rule,
    S,
    Strategy,
    Values,
    partial_by_padding,
    shardable_dims,
    table,
)
from lazygt.passes.sharding.rules.views import PARTIALS

if TYPE_CHECKING:
    from lazygt.passes.sharding.lower.builder import Builder


def _other_dims_rule(moved_dims: Callable[[Call], set[int]], linear: bool = True) -> Rule:
    """Return the rule of an op that moves elements along some dims; the other dims are sharded.

    Args:
        moved_dims: function of a call to the dims along which elements move.
        linear: whether partial sums pass through.
    """

    def strategies(call: Call) -> Sequence[Strategy]:
        moved = moved_dims(call)
        strategies = [
            call.strategy(S(d), self=S(d))
            for d in shardable_dims(call.shape("self"))
            if d not in moved
        ]
        if not linear:
            return strategies
        return [*strategies, call.strategy(P, self=P)]

    return strategies


def _rolled_dims(call: Call) -> set[int]:
    """Return the dims that are rolled; no ``dims`` argument means all dims, flattened."""
    rank = len(call.shape("self"))
    dims = call["dims"]
    return {d % rank for d in dims} if dims else set(range(rank))


def _flipped_dims(call: Call) -> set[int]:
    """Return the dims that are flipped."""
    rank = len(call.shape("self"))
    return {d % rank for d in call["dims"]}


def _flip(call: Call) -> Sequence[Strategy]:
    """Return the strategies of flip: ranks exchange rows of the sharded dim, then flip them."""
    strategies = list(_other_dims_rule(_flipped_dims)(call))
    for dim in _flipped_dims(call).intersection(shardable_dims(call.shape("self"))):
        size = call.shape("self")[dim]
        bounds = call.bounds(size)
        strategies += exchanged_strategies(
            call, dim, [((size - b, size - a),) for a, b in bounds], _lower_rerun
        )
    return strategies


def _lower_rerun(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run the same op on the exchanged rows."""
    return build.rerun(node, operands)


def _roll(call: Call) -> Sequence[Strategy]:
    """Return the strategies of roll: ranks receive the rows of their block of the result."""
    strategies = list(_other_dims_rule(_rolled_dims)(call))
    shape, dims, shifts = call.shape("self"), call["dims"], call["shifts"]
    if any(type(shift) is Param for shift in shifts):
        return strategies
    rank = len(shape)
    for dim in _rolled_dims(call).intersection(shardable_dims(shape)) if dims else ():
        is_along_dim = [d % rank == dim for d in dims]
        shift = sum(shift for shift, matches in zip(shifts, is_along_dim, strict=True) if matches)
        other_rolls = [
            (d, s) for d, s, matches in zip(dims, shifts, is_along_dim, strict=True) if not matches
        ]
        wanted_rows = [
            _roll_sources(shape[dim], shift, *bounds) for bounds in call.bounds(shape[dim])
        ]
        strategies += exchanged_strategies(call, dim, wanted_rows, _lower_other_rolls(other_rolls))
    return strategies


def _roll_sources(size: int, shift: int, start: int, stop: int) -> Ranges:
    """Return the source rows of the rows ``[start, stop)`` of a roll by ``shift``."""
    first, count = (start - shift) % size, stop - start
    ranges = (first, min(first + count, size)), (0, first + count - size)
    return tuple([(a, b) for a, b in ranges if a < b])


def _lower_other_rolls(other_rolls: Sequence[tuple[int, int]]) -> Lowering:
    """Return the lowering that rolls along the other dims, (dim, shift) each."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        if not other_rolls:
            return operands
        dims, shifts = zip(*other_rolls, strict=True)
        return build.rerun(node, operands, dims=dims, shifts=shifts)

    return lower


def _padded_dims(call: Call) -> set[int]:
    """Return the dims that are padded."""
    rank, pad = len(call.shape("self")), call["pad"]
    return {rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}


def _pad(call: Call) -> Sequence[Strategy]:
    """Return the strategies of constant_pad_nd."""
    value = call["value"]
    along_padded = [
        strategy for dim in sorted(_padded_dims(call)) for strategy in _pad_along(call, dim)
    ]
    if value is None or (type(value) in (int, float) and value == 0):
        return [*_other_dims_rule(_padded_dims)(call), *along_padded]
    strategies = _other_dims_rule(_padded_dims, linear=False)(call)
    return [*strategies, *along_padded, call.strategy(P, self=P).by(add_number_once("value"))]


def _pad_along(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a constant pad along a sharded dim.

    Each rank receives the rows of its block of the result, and pads at the ends of the dim.
    """
    shape, pad = call.shape("self"), call["pad"]
    pad_index = 2 * (len(shape) - 1 - dim)
    size, padded_size, pad_before = shape[dim], call.result().shape[dim], pad[pad_index]
    if min(size, padded_size) < 2:
        return []
    bounds = call.bounds(padded_size)
    wanted_rows = [
        clamped_range(start - pad_before, stop - pad_before, size) for start, stop in bounds
    ]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        start, stop = (row - pad_before for row in bounds[build.index])
        first, last = wanted_rows[build.index]
        pads = list(pad)
        pads[pad_index : pad_index + 2] = first - start, stop - last
        return build.rerun(node, operands, pad=pads)

    return exchanged_strategies(call, dim, [(rows,) for rows in wanted_rows], lower)


def _reflection_or_replication_pad(call: Call) -> Sequence[Strategy]:
    """Return the strategies of reflection and replication pads along a sharded dim.

    Each rank receives the source rows of its block of the result.
    """
    shape, result_shape, pads = call.shape("self"), call.result().shape, call["padding"]
    strategies = []
    for number in range(len(pads) // 2):
        dim = len(result_shape) - 1 - number
        sources = [
            _source_row(row - pads[2 * number], shape[dim], "reflection" in call.node.op)
            for row in range(result_shape[dim])
        ]
        bounds = call.bounds(len(sources))
        wanted_rows = [_to_ranges(sources[start:stop]) for start, stop in bounds]
        other_pads = [0 if index // 2 == number else pad for index, pad in enumerate(pads)]
        rejects_empty = any(other_pads) and not all(wanted_rows)  # the kernel rejects empty blocks
        if shape[dim] > 1 and not rejects_empty:
            strategies += exchanged_strategies(call, dim, wanted_rows, _lower_pads(other_pads))
    return strategies


def _source_row(row: int, size: int, mirrored: bool) -> int:
    """Return the source row in [0, size) of a row of the padded image.

    Args:
        row: row relative to the unpadded image; may be negative or beyond ``size``.
        mirrored: reflection pad; else replication pad.
    """
    if mirrored:
        row = abs(row)
        return row if row < size else 2 * (size - 1) - row
    return min(max(row, 0), size - 1)


def _to_ranges(rows: Sequence[int]) -> Ranges:
    """Merge consecutive rows into ranges, in order."""
    ranges: list[Rows] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _lower_pads(pads: Sequence[int]) -> Lowering:
    """Return the lowering that pads the other dims of the exchanged rows."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, padding=pads) if any(pads) else operands

    return lower


def _diag_embed(call: Call) -> Sequence[Strategy]:
    """Return the strategies of diag_embed, which turns the last dim into ``dim1`` and ``dim2``.

    The operand's other dims are the other dims of the result in order.
    """
    rank = len(call.result().shape)
    diagonal = {call.dim("dim1", rank), call.dim("dim2", rank)}
    other_dims = [dim for dim in range(rank) if dim not in diagonal]
    sharded_dims = [d for d in shardable_dims(call.shape("self")) if d < len(other_dims)]
    return [
        *(call.strategy(S(other_dims[d]), self=S(d)) for d in sharded_dims),
        call.strategy(P, self=P),
    ]


def _repeat(call: Call) -> Sequence[Strategy]:
    """Return the strategies of repeat: dims that are repeated once are sharded."""
    shape, repeats = call.shape("self"), call["repeats"]
    new_dims = len(repeats) - len(shape)
    once = [d for d in shardable_dims(shape) if repeats[d + new_dims] == 1]
    return [*(call.strategy(S(d + new_dims), self=S(d)) for d in once), call.strategy(P, self=P)]


def _diagonal(call: Call) -> Sequence[Strategy]:
    """Return the strategies of diagonal, which turns ``dim1`` and ``dim2`` into the last dim."""
    rank = len(call.shape("self"))
    removed = {call.dim("dim1", rank), call.dim("dim2", rank)}
    other_dims = [d for d in shardable_dims(call.shape("self")) if d not in removed]
    strategies = [
        call.strategy(S(d - sum(other < d for other in removed)), self=S(d)) for d in other_dims
    ]
    strategies += [
        strategy for d in sorted(removed) for strategy in partial_by_padding(call, {"self": d})
    ]
    return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]


def _triangle(call: Call) -> Sequence[Strategy]:
    """Return the strategies of tril and triu; the diagonal is shifted by a block's offset."""
    shape = call.shape("self")
    strategies = []
    for dim in shardable_dims(shape):
        sign = {len(shape) - 2: 1, len(shape) - 1: -1}.get(dim, 0)
        lower = _lower_shifted_diagonal(shape[dim], sign) if sign else None
        strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
    return [*strategies, call.strategy(P, self=P)]


def _lower_shifted_diagonal(size: int, sign: int) -> Lowering:
    """Return the lowering of a triangle with the diagonal shifted by the block's offset."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        diagonal = build.bind(node, operands)["diagonal"]
        return build.rerun(node, operands, diagonal=diagonal + sign * build.rank_offset(size))

    return lower


RULES: dict[str, Rule] = {
    **table("repeat.default", _repeat),
    **table("diagonal.default diagonal_copy.default", _diagonal),
    **table("diag_embed.default", _diag_embed),
    **table("flip.default", _flip),
    **table("rot90.default", _other_dims_rule(_rolled_dims)),
    **table("roll.default", _roll),
    **table("constant_pad_nd.default", _pad),
    **table(
        "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default",
        _reflection_or_replication_pad,
    ),
    **table("tril.default triu.default tril_.default triu_.default", _triangle),
}
