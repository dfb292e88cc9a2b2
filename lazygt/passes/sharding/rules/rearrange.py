"""Elements moved along a dim: flip, roll, pad, diagonals, triangles, repetition.

Dims along which nothing moves pass through, as do partial sums. Along a split dim ranks are sent
the rows that they lack, or it is one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Param, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.halo import Ranges
from lazygt.passes.sharding.rules.pointwise import added_once
from lazygt.passes.sharding.rules.slicing import moved, within
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
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
    from lazygt.passes.sharding.builder import Builder


def _untouched(touched: Callable[[Call], set[int]], linear: bool = True) -> Rule:
    """Return the rule of an op that mixes elements only along some dims."""

    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        mixed = touched(call)
        strategies = [
            call.strategy(S(d), self=S(d))
            for d in shardable_dims(call.shape("self"))
            if d not in mixed
        ]
        if not linear:
            return strategies
        return [*strategies, call.strategy(P, self=P)]

    return strategies


def _dims(call: Call) -> set[int]:
    """Return the dims that are rolled: all of them, as one, where none is named."""
    rank = len(call.shape("self"))
    dims = call["dims"]
    return {d % rank for d in dims} if dims else set(range(rank))


def _flipped_dims(call: Call) -> set[int]:
    rank = len(call.shape("self"))
    return {d % rank for d in call["dims"]}


def _flip(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of flip: along the cut dim ranks exchange rows, then flip them."""
    call = Call(node, metas, axis_size)
    strategies = list(_untouched(_flipped_dims)(node, metas, axis_size))
    for dim in _flipped_dims(call).intersection(shardable_dims(call.shape("self"))):
        size = call.shape("self")[dim]
        bounds = [shard_bounds(size, axis_size, rank) for rank in range(axis_size)]
        strategies += moved(call, dim, [((size - b, size - a),) for a, b in bounds], _again)
    return strategies


def _again(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    return build.rerun(node, operands)


def _roll(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of roll: along the cut dim ranks get the rows of their new block."""
    call = Call(node, metas, axis_size)
    strategies = list(_untouched(_dims)(node, metas, axis_size))
    shape, dims, shifts = call.shape("self"), call["dims"], call["shifts"]
    if any(type(shift) is Param for shift in shifts):
        return strategies
    rank = len(shape)
    for dim in _dims(call).intersection(shardable_dims(shape)) if dims else ():
        along = [d % rank == dim for d in dims]
        shift = sum(shift for shift, is_along in zip(shifts, along, strict=True) if is_along)
        rest = [(d, s) for d, s, is_along in zip(dims, shifts, along, strict=True) if not is_along]
        want = [_rolled(shape[dim], shift, *shard_bounds(shape[dim], axis_size, r))
                for r in range(axis_size)]  # fmt: skip
        strategies += moved(call, dim, want, _rolled_along(rest))
    return strategies


def _rolled(size: int, shift: int, start: int, stop: int) -> Ranges:
    """Return the rows that come to those from ``start`` to before ``stop``."""
    first, count = (start - shift) % size, stop - start
    ranges = (first, min(first + count, size)), (0, first + count - size)
    return tuple([(a, b) for a, b in ranges if a < b])


def _rolled_along(rest: Sequence[tuple[int, int]]) -> Lowering:
    """Return a lowering that rolls along the other dims."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        if not rest:
            return operands
        dims, shifts = zip(*rest, strict=True)
        return build.rerun(node, operands, dims=dims, shifts=shifts)

    return lower


def _padded(call: Call) -> set[int]:
    rank, pad = len(call.shape("self")), call["pad"]
    return {rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}


def _pad(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    value = call["value"]
    kept = [strategy for dim in sorted(_padded(call)) for strategy in _padded_in_blocks(call, dim)]
    if value is None or (type(value) in (int, float) and value == 0):
        return [*_untouched(_padded)(node, metas, axis_size), *kept]
    strategies = _untouched(_padded, linear=False)(node, metas, axis_size)
    return [*strategies, *kept, call.strategy(P, self=P).by(added_once("value"))]


def _padded_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy from blocks to blocks of the padded value.

    Each rank pads the rows that reach over the ends.
    """
    shape, pad = call.shape("self"), call["pad"]
    at = 2 * (len(shape) - 1 - dim)
    size, wide, before = shape[dim], call.result().shape[dim], pad[at]
    if min(size, wide) < 2:
        return []
    bounds = [shard_bounds(wide, call.axis_size, rank) for rank in range(call.axis_size)]
    want = [within(start - before, stop - before, size) for start, stop in bounds]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        start, stop = (row - before for row in bounds[build.index])
        first, last = want[build.index]
        pads = list(pad)
        pads[at : at + 2] = first - start, stop - last
        return build.rerun(node, operands, pad=pads)

    return moved(call, dim, [(rows,) for rows in want], lower)


def _onto_diagonal(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of diag_embed: the last dim becomes two.

    The others stand in order in the rest.
    """
    call = Call(node, metas, axis_size)
    rank = len(call.result().shape)
    diagonal = {call.dim("dim1", rank), call.dim("dim2", rank)}
    places = [place for place in range(rank) if place not in diagonal]
    split = [d for d in shardable_dims(call.shape("self")) if d < len(places)]
    return [*(call.strategy(S(places[d]), self=S(d)) for d in split), call.strategy(P, self=P)]


def _repeat(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of repeat: dims that are there once pass through."""
    call = Call(node, metas, axis_size)
    shape, repeats = call.shape("self"), call["repeats"]
    new = len(repeats) - len(shape)
    once = [d for d in shardable_dims(shape) if repeats[d + new] == 1]
    return [*(call.strategy(S(d + new), self=S(d)) for d in once), call.strategy(P, self=P)]


def _diagonal(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of diagonal: its two dims become the last one."""
    call = Call(node, metas, axis_size)
    rank = len(call.shape("self"))
    gone = {call.dim("dim1", rank), call.dim("dim2", rank)}
    split = [d for d in shardable_dims(call.shape("self")) if d not in gone]
    strategies = [call.strategy(S(d - sum(other < d for other in gone)), self=S(d)) for d in split]
    strategies += [
        strategy for d in sorted(gone) for strategy in partial_by_padding(call, {"self": d})
    ]
    return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]


def _triangle(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of tril and triu.

    The diagonal is counted from the start of the block.
    """
    call = Call(node, metas, axis_size)
    shape = call.shape("self")
    strategies = []
    for dim in shardable_dims(shape):
        towards = {len(shape) - 2: 1, len(shape) - 1: -1}.get(dim, 0)
        lower = _shifted(shape[dim], towards) if towards else None
        strategies.append(call.strategy(S(dim), self=S(dim)).by(lower))
    return [*strategies, call.strategy(P, self=P)]


def _shifted(size: int, towards: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        diagonal = build.bind(node, operands)["diagonal"]
        return build.rerun(node, operands, diagonal=diagonal + towards * build.rank_offset(size))

    return lower


RULES: dict[str, Rule] = {
    **table("repeat.default", _repeat),
    **table("diagonal.default diagonal_copy.default", _diagonal),
    **table("diag_embed.default", _onto_diagonal),
    **table("flip.default", _flip),
    **table("rot90.default", _untouched(_dims)),
    **table("roll.default", _roll),
    **table("constant_pad_nd.default", _pad),
    **table("tril.default triu.default tril_.default triu_.default", _triangle),
}
