"""Convolutions and pools of pictures that are cut along a dim of space.

Each rank makes its rows of the result, of its own rows and a few of its neighbours' (halo
exchange). Padding is put at the borders of the picture alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.builder import bound
from lazygt.passes.sharding.halo import Ranges, RowExchange, Rows, blocks
from lazygt.passes.sharding.rules import table as pictures
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    exchange_comm,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

# -- windows along a cut dim, and pads by rows at the ends: each rank is sent its rows -------------

_TEXTS = pictures.RULES


def _unfolded(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of windows along a cut dim: each rank makes those of its block."""
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    value, dim = call.meta("self"), call.dim("dimension", len(call.shape("self")))
    size, step = call["size"], call["step"]
    bounds = [shard_bounds(call.result().shape[dim], axis_size, rank) for rank in range(axis_size)]
    if any(start >= stop for start, stop in bounds):
        return strategies
    want = tuple([((a * step, (b - 1) * step + size),) for a, b in bounds])
    move = RowExchange(dim, blocks(value.shape[dim], axis_size), want)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, [build.rows(operands[0], move)])

    return [*strategies, call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(move, value))]


def _repeating(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of pads by the picture's own rows, mirrored or the last one again.

    Each rank is sent those rows.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    value, wide, pads = call.meta("self"), call.result().shape, call["padding"]
    for at in range(len(pads) // 2):
        dim = len(wide) - 1 - at
        bounds = [shard_bounds(wide[dim], axis_size, rank) for rank in range(axis_size)]
        mirrored = "reflection" in node.op
        want = [
            _joined([_inside(i - pads[2 * at], value.shape[dim], mirrored) for i in range(*rows)])
            for rows in bounds
        ]
        move = RowExchange(dim, blocks(value.shape[dim], axis_size), tuple(want))
        rest = [0 if which // 2 == at else pad for which, pad in enumerate(pads)]
        refused = any(rest) and not all(want)  # the kernel takes no empty block
        if value.shape[dim] > 1 and move.is_worth_it and not refused:
            strategy = call.strategy(S(dim), self=S(dim))
            strategies.append(strategy.by(_padded_along(move, rest), exchange_comm(move, value)))
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


# -- convolutions and pools of pictures that are cut along a dim of space --------------------------


class _Window(NamedTuple):
    """Rows that a row of the result reads along one dim of space.

    Attributes:
        space: number of the dim of space, from 0.
        size, made: rows of the picture, and of the result.
    """

    space: int
    size: int
    made: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def dim(self) -> int:
        """Its dim in the picture, and in the result."""
        return self.space + 2

    def read(self, rows: Rows) -> Rows:
        """Return the rows that these of the result read, those of the padding too."""
        first = rows[0] * self.stride - self.padding
        reach = (self.kernel - 1) * self.dilation + 1
        return first, (rows[1] - 1) * self.stride - self.padding + reach

    def move(self, axis_size: int) -> RowExchange | None:
        """Return the exchange that brings each rank the rows that it reads.

        None where a rank has nothing to make, or reads nothing but padding.
        """
        bounds = [shard_bounds(self.made, axis_size, rank) for rank in range(axis_size)]
        if any(start >= stop for start, stop in bounds):
            return None
        wanted = [self.inside(self.read(rows)) for rows in bounds]
        if any(first >= last for first, last in wanted):
            return None
        have = blocks(self.size, axis_size)
        return RowExchange(self.dim, have, tuple([(rows,) for rows in wanted]))

    def inside(self, rows: Rows) -> Rows:
        """Return those of the rows that the picture has."""
        return max(rows[0], 0), min(rows[1], self.size)


def _windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    if call["transposed"] or call["groups"] < 1:
        return []
    steps = [each(call[name], len(kernel)) for name in ("stride", "padding", "dilation")]
    sizes = zip(shape[2:], result[2:], kernel, *steps, strict=True)
    return [_Window(space, *each) for space, each in enumerate(sizes)]


def each(given: Sequence[int], count: int) -> Sequence[int]:
    """Return one number a dim of space."""
    return given if len(given) == count else [given[0]] * count


def by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution."""
    strategies = []
    for window in _windows(call, call.result().shape):
        move = window.move(call.axis_size)
        if move is not None:
            comm = exchange_comm(move, call.meta("input"))
            strategy = call.strategy(S(window.dim), input=S(window.dim))
            strategies.append(strategy.by(_forward(window, move), comm))
    return strategies


def _forward(window: _Window, move: RowExchange) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        seen = _seen(build, operands[0], window, move)
        padding = bound(node)["padding"] or (0, 0)
        return build.rerun(node, [seen, *operands[1:]], padding=_unpadded(padding, window))

    return lower


def _seen(build: Builder, value: Ref, window: _Window, move: RowExchange, filled: Arg = 0) -> Ref:
    """Return the rows that a rank reads, with those of the padding."""
    rows = build.rows(value, move)
    before, after = _padded(build, window)
    if not (before or after):
        return rows
    rest = [0, 0] * (len(build.shape(value)) - 1 - window.dim)
    seen: Ref = build.op("aten.constant_pad_nd.default", rows, (*rest, before, after), filled)
    return seen


def _padded(build: Builder, window: _Window) -> Rows:
    """Return the rows of padding that a rank reads before the picture, and behind it."""
    read = window.read(build.bounds(window.made))
    first, last = window.inside(read)
    return first - read[0], read[1] - last


def _unpadded(padding: Sequence[int], window: _Window) -> list[int]:
    spaces = max(len(padding), window.space + 1)
    return [0 if at == window.space else each for at, each in enumerate(each(padding, spaces))]


def backward_by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution's backward."""
    strategies = []
    wanted = tuple(call["output_mask"])
    for window in _windows(call, call.shape("grad_output")):
        move = window.move(call.axis_size)
        if move is None:
            continue
        dim = window.dim
        comm = exchange_comm(move, call.meta("input"), reverse_too=wanted[0])
        outputs = S(dim) if wanted[0] else R, P, P
        strategy = call.strategy(outputs, grad_output=S(dim), input=S(dim))
        strategies.append(strategy.by(_backward(window, move, wanted[0]), comm))
    return strategies


def _backward(window: _Window, move: RowExchange, of_input: bool) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, weight = operands
        seen = _seen(build, value, window, move)
        padding = build.bind(node, operands)["padding"]
        results = list(
            build.rerun(node, [gradient, seen, weight], padding=_unpadded(padding, window))
        )
        of_seen = results[0]
        if of_input and of_seen is not None:
            results[0] = _back(build, of_seen, window, move)
        return results

    return lower


def _back(build: Builder, gradient: Ref, window: _Window, move: RowExchange) -> Ref:
    """Return the gradient of a rank's own rows, summed over the ranks that read them."""
    (before, after), dim = _padded(build, window), window.dim
    if before or after:
        stop = build.shape(gradient)[dim] - after
        gradient = build.op("aten.slice.Tensor", gradient, dim, before, stop)
    return given_back(build, gradient, move)


def given_back(build: Builder, value: Ref, move: RowExchange) -> Ref:
    """Reverse an exchange of rows: add up each rank's values for the rows that it read.

    The sums are with the ranks that those rows came from.
    """
    dim, rank = move.dim, build.index
    size = sum(last - first for first, last in move.have[rank])
    pieces_at, away, at = [], [], 0
    for piece in move.pieces[rank]:
        rows = build.slice(value, dim, at, piece.rows)
        if piece.source == rank:
            pieces_at.append((rows, piece.start))
        else:
            away.append((piece.source, at, rows))
        at += piece.rows
    if move.sent:
        back = tuple(sorted([(target, source, count) for source, target, count in move.sent]))
        given = [rows for _, _, rows in sorted(away, key=lambda item: item[:2])]
        nothing = build.slice(value, dim, 0, 0)
        come = build.send_recv(build.joined(given or [nothing], dim), dim, back)
        at = 0
        for start, count in move.given(rank):
            pieces_at.append((build.slice(come, dim, at, count), start))
            at += count
    pieces_at = pieces_at or [(build.slice(value, dim, 0, 0), 0)]
    spread = [_among(build, rows, dim, start, size) for rows, start in pieces_at]
    return reduce(lambda a, b: build.op("aten.add.Tensor", a, b), spread)


def _among(build: Builder, value: Ref, dim: int, start: int, size: int) -> Ref:
    """Return rows among zeros."""
    shape = build.shape(value)
    if shape[dim] == size:
        return value
    rest = [0, 0] * (len(shape) - 1 - dim)
    pads = (*rest, start, size - start - shape[dim])
    padded: Ref = build.op("aten.constant_pad_nd.default", value, pads, 0)
    return padded


# -- pools -----------------------------------------------------------------------------------------


def _pool_windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    """Return the windows of a pool over rows and columns, without rows of the padding alone."""
    shape = call.shape("self")
    if len(shape) != 4 or call["ceil_mode"]:
        return []
    kernel = each(call["kernel_size"], 2)
    steps = [each(call[name] or (), 2) if call[name] else None for name in ("stride", "padding")]
    stride, padding = steps[0] or kernel, steps[1] or [0, 0]
    dilation = each(call.args.get("dilation") or [1, 1], 2)
    sizes = zip(shape[2:], result[2:], kernel, stride, padding, dilation, strict=True)
    return [_Window(space, *each) for space, each in enumerate(sizes)]


def _averages(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    for window in _pool_windows(call, call.result().shape):
        move = window.move(axis_size)
        if move is not None and _counts_all(call, window):
            comm = exchange_comm(move, call.meta("self"))
            strategy = call.strategy(S(window.dim), self=S(window.dim))
            strategies.append(strategy.by(_forward(window, move), comm))
    return strategies


def _counts_all(call: Call, window: _Window) -> bool:
    """Return whether a mean has one divisor everywhere, however the picture is padded."""
    return not window.padding or bool(call["count_include_pad"] or call["divisor_override"])


def _maxima(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a maximum pool, with places in the whole picture."""
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    value = call.meta("self")
    for window in _pool_windows(call, call.result().shape):
        move = window.move(axis_size)
        if move is not None and (value.dtype.is_floating_point or not window.padding):
            comm = exchange_comm(move, value)
            strategy = call.strategy(S(window.dim), self=S(window.dim))
            strategies.append(strategy.by(_placed(window, move, value.shape[3]), comm))
    return strategies


def _placed(window: _Window, move: RowExchange, columns: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        seen = _seen(build, operands[0], window, move, float("-inf"))
        best, places = build.rerun(node, [seen], padding=_pool_padding(node, window))
        assert places is not None
        at = _numbered(build, places, window, build.shape(seen)[3], 1)
        if window.read(build.bounds(window.made))[0] < 0:
            # of nothing but -inf the first place within the picture counts, not one before it
            along = at[window.space]
            within = build.op("aten.remainder.Scalar", along, window.dilation)
            is_before = build.op("aten.lt.Scalar", along, 0)
            at[window.space] = build.op("aten.where.self", is_before, within, along)
        return best, _number(build, at, columns)

    return lower


def _pool_padding(node: Node, window: _Window) -> list[int]:
    padding: Sequence[int] = bound(node)["padding"] or (0, 0)
    return _unpadded(each(padding, 2), window)


def _numbered(
    build: Builder, places: Ref, window: _Window, columns: int, towards: int
) -> list[Ref]:
    """Return row and column of places in rows of so many columns.

    Args:
        towards: 1: along the cut dim they become those of the whole picture; -1: those among the
            rows that this rank reads.
    """
    row = build.op("aten.div.Scalar_mode", places, columns, rounding_mode="floor")
    at = [row, build.op("aten.remainder.Scalar", places, columns)]
    first = window.read(build.bounds(window.made))[0]
    at[window.space] = build.op("aten.add.Scalar", at[window.space], towards * first)
    return at


def _number(build: Builder, at: Sequence[Ref], columns: int) -> Ref:
    number: Ref = build.op("aten.add.Tensor", build.op("aten.mul.Scalar", at[0], columns), at[1])
    return number


def _backward_of_pool(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a pool's backward by rows.

    A rank's gradient of the rows that it read goes back to their owners.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    with_places = call.has("indices")
    for window in _pool_windows(call, call.shape("grad_output")):
        move = window.move(axis_size)
        if move is None or not (with_places or _counts_all(call, window)):
            continue
        dim = window.dim
        placements = {name: S(dim) for name in ("grad_output", "self", "indices") if call.has(name)}
        lower = _back_to_windows(window, move, call.shape("self")[3])
        strategy = call.strategy(S(dim), **placements)
        comm = exchange_comm(move, call.meta("self"), reverse_too=True)[1:]
        strategies.append(strategy.by(lower, comm))
    return strategies


def _back_to_windows(window: _Window, move: RowExchange, columns: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, *places = operands
        like = _read(build, value, window)
        if places:
            at = _numbered(build, places[0], window, columns, -1)
            places = [_number(build, at, build.shape(like)[3])]
        padding = _pool_padding(node, window)
        (of_read,) = build.rerun(node, [gradient, like, *places], padding=padding)
        assert of_read is not None
        return (_back(build, of_read, window, move),)

    return lower


def _read(build: Builder, value: Ref, window: _Window) -> Ref:
    """Return a value with as many rows as a rank reads: only its shape matters to the op."""
    first, last = window.read(build.bounds(window.made))
    shape = list(build.shape(value))
    shape[window.dim] = last - first
    return build.full(shape, 0, like=value)


RULES: dict[str, Rule] = {
    **table("avg_pool2d.default", _averages),
    **table("max_pool2d_with_indices.default", _maxima),
    **table(
        "avg_pool2d_backward.default max_pool2d_with_indices_backward.default", _backward_of_pool
    ),
    **table("unfold.default unfold_copy.default", _unfolded),
    **table(
        "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default",
        _repeating,
    ),
}
