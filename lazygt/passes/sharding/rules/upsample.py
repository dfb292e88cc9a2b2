"""Transposed convolutions, and resizing by a power of two, along a cut dim of space.

Each rank makes its rows of the enlarged picture of its own rows and a few of its neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.halo import RowExchange, Rows, blocks
from lazygt.passes.sharding.rules import spatial
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

_TEXTS = pictures.RULES


def _move(
    dim: int, have: int, rows: int, axis_size: int, want: Sequence[Rows]
) -> RowExchange | None:
    """Return the exchange of rows of a dim of ``have`` for ranks' blocks of ``rows``.

    None where a rank has nothing to make, or nothing to make it of.
    """
    bounds = [shard_bounds(rows, axis_size, rank) for rank in range(axis_size)]
    if any(start >= stop for start, stop in (*bounds, *want)):
        return None
    return RowExchange(dim, blocks(have, axis_size), tuple([(some,) for some in want]))


# -- transposed convolutions ----------------------------------------------------------------------


class _Spread(NamedTuple):
    """Rows of the result that a row of the picture reaches along one dim of space.

    Attributes:
        space: number of the dim of space, from 0.
        size, made: rows of the picture, and of the result.
        reach: rows that one row goes to, gaps between them counted.
    """

    space: int
    size: int
    made: int
    reach: int
    stride: int
    padding: int

    @property
    def dim(self) -> int:
        """Its dim in the picture, and in the result."""
        return self.space + 2

    def read(self, rows: Rows) -> Rows:
        """Return the rows of the picture that reach these of the result."""
        first = -((self.reach - 1 - self.padding - rows[0]) // self.stride)
        return max(first, 0), min((rows[1] - 1 + self.padding) // self.stride + 1, self.size)

    def written(self, rows: Rows) -> Rows:
        """Return the rows of the result that these reach, those that the padding takes off too."""
        first = rows[0] * self.stride - self.padding
        return first, (rows[1] - 1) * self.stride - self.padding + self.reach

    def forward(self, axis_size: int) -> RowExchange | None:
        """Return the exchange of the picture's rows that ranks make their rows of the result of."""
        bounds = [shard_bounds(self.made, axis_size, rank) for rank in range(axis_size)]
        want = [self.read(rows) for rows in bounds]
        for (start, stop), rows in zip(bounds, want, strict=True):
            first, last = self.written(rows)
            if start < first or last < stop:  # rows that none of the picture reaches
                return None
        return _move(self.dim, self.size, self.made, axis_size, want)

    def backward(self, axis_size: int) -> RowExchange | None:
        """Return the exchange of the gradient's rows that the rows of ranks reach."""
        bounds = [shard_bounds(self.size, axis_size, rank) for rank in range(axis_size)]
        want = [self.inside(self.written(rows)) for rows in bounds]
        return _move(self.dim, self.made, self.size, axis_size, want)

    def inside(self, rows: Rows) -> Rows:
        """Return those of the rows that the result has."""
        return max(rows[0], 0), min(rows[1], self.made)


def _spreads(call: Call, result: tuple[int, ...]) -> list[_Spread]:
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    if not call["transposed"]:
        return []
    count = len(kernel)
    stride, padding, dilation = (
        spatial.each(call[name], count) for name in ("stride", "padding", "dilation")
    )
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    sizes = zip(shape[2:], result[2:], reach, stride, padding, strict=True)
    return [_Spread(space, *each) for space, each in enumerate(sizes)]


def by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a transposed convolution."""
    strategies = []
    for spread in _spreads(call, call.result().shape):
        move = spread.forward(call.axis_size)
        if move is not None:
            strategy = call.strategy(S(spread.dim), input=S(spread.dim))
            comm = exchange_comm(move, call.meta("input"))
            strategies.append(strategy.by(_forward(spread, move), comm))
    return strategies


def _forward(spread: _Spread, move: RowExchange) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], move)
        (result,) = build.rerun(node, [rows, *operands[1:]], **_uncropped(build, node, spread))
        assert result is not None
        start, stop = build.bounds(spread.made)
        first, _ = spread.written(spread.read((start, stop)))
        return (build.slice(result, spread.dim, start - first, stop - start),)

    return lower


def _uncropped(build: Builder, node: Node, spread: _Spread) -> dict[str, list[int]]:
    """Return arguments that take nothing off along the cut dim, and add nothing there."""
    args = build.bind(node, [Ref(number) for number in node.refs()])
    count = max(spread.space + 1, len(args["padding"]))
    return {
        name: [0 if at == spread.space else one
               for at, one in enumerate(spatial.each(args[name], count))]
        for name in ("padding", "output_padding")
    }  # fmt: skip


def backward_by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a transposed convolution's backward."""
    strategies = []
    for spread in _spreads(call, call.shape("grad_output")):
        move = spread.backward(call.axis_size)
        if move is not None:
            dim = spread.dim
            outputs = S(dim) if call["output_mask"][0] else R, P, P
            strategy = call.strategy(outputs, grad_output=S(dim), input=S(dim))
            comm = exchange_comm(move, call.meta("grad_output"))
            strategies.append(strategy.by(_backward(spread, move), comm))
    return strategies


def _backward(spread: _Spread, move: RowExchange) -> Lowering:
    """Return a lowering with the bias apart: a gradient's rows are read by several ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, dim = operands[0], spread.dim
        written = spread.written(build.bounds(spread.size))
        first, last = spread.inside(written)
        pads = (*[0, 0] * (len(build.shape(gradient)) - 1 - dim), first - written[0],
                written[1] - last)  # fmt: skip
        seen = build.rows(gradient, move)
        if any(pads):
            seen = build.op("aten.constant_pad_nd.default", seen, pads, 0)
        of_input, of_weight, of_bias = build.bind(node, operands)["output_mask"]
        results = list(
            build.rerun(node, [seen, *operands[1:]], output_mask=(of_input, of_weight, False),
                        **_uncropped(build, node, spread))
        )  # fmt: skip
        if of_bias:
            others = tuple(d for d in range(len(build.shape(gradient))) if d != 1)
            results[2] = build.op("aten.sum.dim_IntList", gradient, others)
        return results

    return lower


# -- resizing -------------------------------------------------------------------------------------


class _Resized(NamedTuple):
    """Dim of space with rows that become ``times`` as many.

    Attributes:
        near: number of rows on both sides, besides its own, that a row of the result is made of.
    """

    dim: int
    size: int
    times: int
    near: int

    @property
    def made(self) -> int:
        """Number of rows of the result."""
        return self.size * self.times

    def read(self, rows: Rows) -> Rows:
        """Return the rows of the picture that these of the result are made of."""
        first, last = rows[0] // self.times, (rows[1] - 1) // self.times + 1
        return max(first - self.near, 0), min(last + self.near, self.size)

    def move(self, axis_size: int) -> RowExchange | None:
        """Return the exchange that brings each rank the rows that it reads."""
        bounds = [shard_bounds(self.made, axis_size, rank) for rank in range(axis_size)]
        want = [self.read(rows) for rows in bounds]
        return _move(self.dim, self.size, self.made, axis_size, want)


def _resized_dims(call: Call, shape: tuple[int, ...], result: tuple[int, ...]) -> list[_Resized]:
    """Return the dims that are resized by a power of two.

    There all numbers are exact, with any row as the first.
    """
    linear = "linear" in call.node.op
    if linear and call["align_corners"]:
        return []
    scales = [call.args.get(name) for name in ("scales_d", "scales_h", "scales_w", "scales")]
    given = {scale for scale in scales if scale is not None}
    dims = []
    for dim in range(2, len(shape)):
        times, rest = divmod(result[dim], max(shape[dim], 1))
        exact = not rest and times > 0 and times & (times - 1) == 0
        if exact and shape[dim] > 1 and given <= {times}:
            dims.append(_Resized(dim, shape[dim], times, int(linear)))
    return dims


def _enlarged(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    for resized in _resized_dims(call, call.shape("self"), call.result().shape):
        move = resized.move(axis_size)
        if move is not None:
            strategy = call.strategy(S(resized.dim), self=S(resized.dim))
            comm = exchange_comm(move, call.meta("self"))
            strategies.append(strategy.by(_enlarge(resized, move), comm))
    return strategies


def _enlarge(resized: _Resized, move: RowExchange) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], move)
        sizes = list(build.bind(node, operands)["output_size"])
        sizes[resized.dim - 2] = build.shape(rows)[resized.dim] * resized.times
        (result,) = build.rerun(node, [rows], output_size=sizes)
        assert result is not None
        start, stop = build.bounds(resized.made)
        first = resized.read((start, stop))[0] * resized.times
        return (build.slice(result, resized.dim, start - first, stop - start),)

    return lower


def _enlarged_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of the backward of a resize.

    A rank's gradient of the rows that it read goes back to their owners.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TEXTS[node.op](node, metas, axis_size)]
    for resized in _resized_dims(call, tuple(call["input_size"]), call.shape("grad_output")):
        move = resized.move(axis_size)
        if move is not None:
            strategy = call.strategy(S(resized.dim), grad_output=S(resized.dim))
            comm = exchange_comm(move, call.result(), reverse_too=True)[1:]
            strategies.append(strategy.by(_reduce(resized, move), comm))
    return strategies


def _reduce(resized: _Resized, move: RowExchange) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, dim = build.bind(node, operands), resized.dim
        start, stop = build.bounds(resized.made)
        first, last = resized.read((start, stop))
        before, after = start - first * resized.times, last * resized.times - stop
        gradient = operands[0]
        if before or after:
            pads = (*[0, 0] * (len(build.shape(gradient)) - 1 - dim), before, after)
            gradient = build.op("aten.constant_pad_nd.default", gradient, pads, 0)
        read, sizes = list(args["input_size"]), list(args["output_size"])
        read[dim], sizes[dim - 2] = last - first, (last - first) * resized.times
        (of_read,) = build.rerun(node, [gradient], input_size=read, output_size=sizes)
        assert of_read is not None
        return (spatial.given_back(build, of_read, move),)

    return lower


_RESIZES = "upsample_nearest{0}d upsample_{1}{0}d"
_NAMES = [
    name.format(space, kind)
    for space, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))
    for name in _RESIZES.split()
]
RULES: dict[str, Rule] = {
    **table(" ".join(f"{name}.default" for name in _NAMES), _enlarged),
    **table(" ".join(f"{name}_backward.default" for name in _NAMES), _enlarged_backward),
}
