"""Convolutions and pools whose picture is cut along a dim of space: each rank makes its rows of the
result, of its own rows and a few of its neighbours'. Padding is put at the borders of the picture
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.rules import table as pictures
from lazygt.passes.sharding.rules.base import (
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    table,
)
from lazygt.passes.sharding.rules.halo import Halo, Rows, added_back, halo_of, widened

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


class _Window(NamedTuple):
    """What a row of the result reads along one dim of space.

    Attributes:
        space: which dim of space, from 0.
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
        """Of the picture, and of the result."""
        return self.space + 2

    def read(self, rows: Rows) -> Rows:
        """The rows that these of the result read, those of the padding too."""
        first = rows[0] * self.stride - self.padding
        reach = (self.kernel - 1) * self.dilation + 1
        return first, (rows[1] - 1) * self.stride - self.padding + reach

    def halo(self, parts: int) -> Halo | None:
        """None where a rank has nothing to make, or needs more than its neighbours have."""
        bounds = [shard_bounds(self.made, parts, rank) for rank in range(parts)]
        if any(start >= stop for start, stop in bounds):
            return None
        wanted = [self.inside(self.read(rows)) for rows in bounds]
        if any(first >= last for first, last in wanted):
            return None
        return halo_of(self.size, self.dim, wanted)

    def is_apart(self, parts: int) -> bool:
        """Whether ranks make of their own rows, and of nothing else, what they are to make."""
        return all(
            a < b and self.rows_made(stop - start) == b - a and a * self.stride == start
            for rank in range(parts)
            for start, stop in (shard_bounds(self.size, parts, rank),)
            for a, b in (shard_bounds(self.made, parts, rank),)
        )

    def rows_made(self, rows: int) -> int:
        """How many rows of the result so many of the picture give, unpadded."""
        return max((rows - (self.kernel - 1) * self.dilation - 1) // self.stride + 1, 0)

    def inside(self, rows: Rows) -> Rows:
        """Those of them that the picture has."""
        return max(rows[0], 0), min(rows[1], self.size)


def _windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    if call["transposed"] or call["groups"] < 1:
        return []
    steps = [_each(call[name], len(kernel)) for name in ("stride", "padding", "dilation")]
    sizes = zip(shape[2:], result[2:], kernel, *steps, strict=True)
    return [_Window(space, *each) for space, each in enumerate(sizes)]


def _each(given: Sequence[int], count: int) -> Sequence[int]:
    return given if len(given) == count else [given[0]] * count


def by_rows(call: Call) -> list[Strategy]:
    """The strategies of a convolution."""
    strategies = []
    for window in _windows(call, call.result().shape):
        halo = window.halo(call.parts)
        if halo is not None:
            comm = halo.comm(call.meta("input"), call.parts)
            strategy = call.strategy(S(window.dim), input=S(window.dim))
            strategies.append(strategy.by(_forward(window, halo), comm))
    return strategies


def _forward(window: _Window, halo: Halo) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        seen, _ = _seen(build, operands[0], window, halo)
        padding = build.bind(node, operands)["padding"]
        return build.rerun(node, [seen.rows, *operands[1:]], padding=_unpadded(padding, window))

    return lower


class _Seen(NamedTuple):
    """The rows that a rank reads, with padding; where they lie among those that it was given."""

    rows: Ref
    start: int
    stop: int
    padded: Rows


def _seen(build: Builder, value: Ref, window: _Window, halo: Halo) -> tuple[_Seen, int]:
    """What a rank reads of the picture; and how many rows it was given before its own."""
    wide, before = widened(build, value, halo)
    read = window.read(build.bounds(window.made))
    first, last = window.inside(read)
    offset = build.rank_offset(window.size) - before
    rows = build.op("aten.slice.Tensor", wide, window.dim, first - offset, last - offset)
    padded = first - read[0], read[1] - last
    if any(padded):
        rest = [0, 0] * (len(build.shape(value)) - 1 - window.dim)
        rows = build.op("aten.constant_pad_nd.default", rows, (*rest, *padded), 0)
    return _Seen(rows, first - offset, last - offset, padded), before


def _unpadded(padding: Sequence[int], window: _Window) -> list[int]:
    spaces = max(len(padding), window.space + 1)
    return [0 if at == window.space else each for at, each in enumerate(_each(padding, spaces))]


def backward_by_rows(call: Call) -> list[Strategy]:
    """The strategies of a convolution's backward."""
    strategies = []
    wanted = tuple(call["output_mask"])
    for window in _windows(call, call.shape("grad_output")):
        halo = window.halo(call.parts)
        if halo is None:
            continue
        dim = window.dim
        comm = halo.comm(call.meta("input"), call.parts) * (1 + wanted[0])
        outputs = S(dim) if wanted[0] else R, P, P
        strategy = call.strategy(outputs, grad_output=S(dim), input=S(dim))
        strategies.append(strategy.by(_backward(window, halo, wanted[0]), comm))
    return strategies


def _backward(window: _Window, halo: Halo, of_input: bool) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, weight = operands
        seen, before = _seen(build, value, window, halo)
        padding = build.bind(node, operands)["padding"]
        results = list(
            build.rerun(node, [gradient, seen.rows, weight], padding=_unpadded(padding, window))
        )
        of_seen = results[0]
        if of_input and of_seen is not None:
            results[0] = _back(build, of_seen, value, seen, before, window, halo)
        return results

    return lower


def _back(
    build: Builder, gradient: Ref, value: Ref, seen: _Seen, before: int, window: _Window, halo: Halo
) -> Ref:
    """The gradient of a rank's own rows, of what every rank has for the rows that it read."""
    dim, size = window.dim, build.shape(value)[window.dim]
    start = seen.padded[0]
    rows = build.op("aten.slice.Tensor", gradient, dim, start, start + seen.stop - seen.start)
    after = halo.after if build.index < build.parts - 1 else 0
    wide = before + size + after
    rest = [0, 0] * (len(build.shape(value)) - 1 - dim)
    pads = (*rest, seen.start, wide - seen.stop)
    spread = build.op("aten.constant_pad_nd.default", rows, pads, 0)
    return added_back(build, spread, halo, before, size)


# -- pools -----------------------------------------------------------------------------------------


def _pool_windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    """Of a pool over rows and columns, without rows that only the padding has."""
    shape = call.shape("self")
    if len(shape) != 4 or call["ceil_mode"]:
        return []
    kernel = _each(call["kernel_size"], 2)
    steps = [_each(call[name] or (), 2) if call[name] else None for name in ("stride", "padding")]
    stride, padding = steps[0] or kernel, steps[1] or [0, 0]
    dilation = _each(call.args.get("dilation") or [1, 1], 2)
    sizes = zip(shape[2:], result[2:], kernel, stride, padding, dilation, strict=True)
    return [_Window(space, *each) for space, each in enumerate(sizes)]


def _averages(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    strategies = [*_TEXTS[node.op](node, metas, parts)]
    for window in _pool_windows(call, call.result().shape):
        halo = window.halo(parts)
        counts = not window.padding or (call["count_include_pad"] and not call["divisor_override"])
        if halo is not None and counts:
            comm = halo.comm(call.meta("self"), parts)
            strategy = call.strategy(S(window.dim), self=S(window.dim))
            strategies.append(strategy.by(_forward(window, halo), comm))
    return strategies


def _maxima(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """By rows: places are counted row by row."""
    call = Call(node, metas, parts)
    strategies = [*_TEXTS[node.op](node, metas, parts)]
    for window in _pool_windows(call, call.result().shape)[:1]:
        halo = window.halo(parts)
        if halo is not None and not window.padding:
            comm = halo.comm(call.meta("self"), parts)
            strategy = call.strategy(S(2), self=S(2))
            strategies.append(strategy.by(_placed(window, halo, call.shape("self")[3]), comm))
    return strategies


def _placed(window: _Window, halo: Halo, columns: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        seen, _ = _seen(build, operands[0], window, halo)
        best, places = build.rerun(node, [seen.rows])
        first = window.read(build.bounds(window.made))[0]
        return best, build.op("aten.add.Scalar", places, first * columns)

    return lower


def _backward_of_pool(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """By rows where no rank needs a neighbour's."""
    call = Call(node, metas, parts)
    strategies = [*_TEXTS[node.op](node, metas, parts)]
    with_places = call.has("indices")
    windows = _pool_windows(call, call.shape("grad_output"))
    for window in windows[:1] if with_places else windows:
        if window.padding or not window.is_apart(parts):
            continue
        dim = window.dim
        placements = {name: S(dim) for name in ("grad_output", "self", "indices") if call.has(name)}
        lower = _of_own_places(window, call.shape("self")[3]) if with_places else None
        strategies.append(call.strategy(S(dim), **placements).by(lower))
    return strategies


def _of_own_places(window: _Window, columns: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, places = operands
        start = build.rank_offset(window.size)
        places = build.op("aten.sub.Scalar", places, start * columns)
        return build.rerun(node, [gradient, value, places])

    return lower


_TEXTS = pictures.RULES
RULES: dict[str, Rule] = {
    **table("avg_pool2d.default", _averages),
    **table("max_pool2d_with_indices.default", _maxima),
    **table(
        "avg_pool2d_backward.default max_pool2d_with_indices_backward.default", _backward_of_pool
    ),
}
