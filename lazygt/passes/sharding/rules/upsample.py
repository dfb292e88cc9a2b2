"""Spatial parallelism of transposed convolutions, and of upsampling by a power of two.

Each rank computes its rows of the larger image from its own rows and a halo of its neighbours'
rows (halo exchange).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.lower.halo import RowExchange, Rows, blocks
from lazygt.passes.sharding.rules import spatial
from lazygt.passes.sharding.rules import table as rule_table
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
    from lazygt.passes.sharding.lower.builder import Builder

_TABLE_RULES = rule_table.RULES


def _halo_exchange(
    dim: int, size: int, result_size: int, axis_size: int, wanted_rows: Sequence[Rows]
) -> RowExchange | None:
    """Return the halo exchange that gives each rank its ``wanted_rows``.

    None if a rank has no rows of the result, or reads none.

    Args:
        size: rows of the sharded operand.
        result_size: rows of the result.
        wanted_rows: rows of the operand that each rank reads.
    """
    bounds = [shard_bounds(result_size, axis_size, rank) for rank in range(axis_size)]
    if any(start >= stop for start, stop in (*bounds, *wanted_rows)):
        return None
    return RowExchange(dim, blocks(size, axis_size), tuple([(rows,) for rows in wanted_rows]))


# -- transposed convolutions ----------------------------------------------------------------------


class _Spread(NamedTuple):
    """Window of a transposed convolution along one spatial dim."""

    space: int  # number of the spatial dim, from 0
    size: int  # size, result_size: rows of the image, and of the result
    result_size: int
    reach: int  # rows of the result from the first to the last one that an image row contributes to
    stride: int
    padding: int

    @property
    def dim(self) -> int:
        """Dim in the image and in the result."""
        return self.space + 2

    def read(self, rows: Rows) -> Rows:
        """Return the image rows that contribute to ``rows`` of the result."""
        first = -((self.reach - 1 - self.padding - rows[0]) // self.stride)
        return max(first, 0), min((rows[1] - 1 + self.padding) // self.stride + 1, self.size)

    def contributed_rows(self, rows: Rows) -> Rows:
        """Return the result rows that image ``rows`` contribute to, including cropped ones."""
        first = rows[0] * self.stride - self.padding
        return first, (rows[1] - 1) * self.stride - self.padding + self.reach

    def forward(self, axis_size: int) -> RowExchange | None:
        """Return the halo exchange of image rows; None if some rows of the result read none."""
        bounds = [shard_bounds(self.result_size, axis_size, rank) for rank in range(axis_size)]
        wanted_rows = [self.read(rows) for rows in bounds]
        for (start, stop), rows in zip(bounds, wanted_rows, strict=True):
            first, last = self.contributed_rows(rows)
            if start < first or last < stop:  # rows without a contribution
                return None
        return _halo_exchange(self.dim, self.size, self.result_size, axis_size, wanted_rows)

    def backward(self, axis_size: int) -> RowExchange | None:
        """Return the halo exchange of the gradient's rows for the backward."""
        bounds = [shard_bounds(self.size, axis_size, rank) for rank in range(axis_size)]
        wanted_rows = [self.inside(self.contributed_rows(rows)) for rows in bounds]
        return _halo_exchange(self.dim, self.result_size, self.size, axis_size, wanted_rows)

    def inside(self, rows: Rows) -> Rows:
        """Clamp rows to the result."""
        return max(rows[0], 0), min(rows[1], self.result_size)


def _spreads(call: Call, result: tuple[int, ...]) -> list[_Spread]:
    """Return the windows of a transposed convolution per spatial dim."""
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    if not call["transposed"]:
        return []
    count = len(kernel)
    stride, padding, dilation = (
        spatial.per_dim(call[name], count) for name in ("stride", "padding", "dilation")
    )
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    sizes = zip(shape[2:], result[2:], reach, stride, padding, strict=True)
    return [_Spread(space, *sizes_of_dim) for space, sizes_of_dim in enumerate(sizes)]


def by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a transposed convolution sharded along a spatial dim."""
    strategies = []
    for spread in _spreads(call, call.result().shape):
        exchange = spread.forward(call.axis_size)
        if exchange is not None:
            strategy = call.strategy(S(spread.dim), input=S(spread.dim))
            comm = exchange_comm(exchange, call.meta("input"))
            strategies.append(strategy.by(_lower_forward(spread, exchange), comm))
    return strategies


def _lower_forward(spread: _Spread, exchange: RowExchange) -> Lowering:
    """Return the lowering of a transposed convolution: halo exchange, op, crop."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], exchange)
        (result,) = build.rerun(
            node, [rows, *operands[1:]], **_without_padding(build, node, spread)
        )
        assert result is not None
        start, stop = build.bounds(spread.result_size)
        first, _ = spread.contributed_rows(spread.read((start, stop)))
        return (build.slice(result, spread.dim, start - first, stop - start),)

    return lower


def _without_padding(build: Builder, node: Node, spread: _Spread) -> dict[str, list[int]]:
    """Return padding and output_padding with 0 for the sharded dim."""
    args = build.bind(node, [Ref(number) for number in node.refs()])
    count = max(spread.space + 1, len(args["padding"]))
    return {
        name: [0 if space == spread.space else pad
               for space, pad in enumerate(spatial.per_dim(args[name], count))]
        for name in ("padding", "output_padding")
    }  # fmt: skip


def backward_by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a transposed convolution's backward along a spatial dim."""
    strategies = []
    for spread in _spreads(call, call.shape("grad_output")):
        exchange = spread.backward(call.axis_size)
        if exchange is not None:
            dim = spread.dim
            outputs = S(dim) if call["output_mask"][0] else R, P, P
            strategy = call.strategy(outputs, grad_output=S(dim), input=S(dim))
            comm = exchange_comm(exchange, call.meta("grad_output"))
            strategies.append(strategy.by(_lower_backward(spread, exchange), comm))
    return strategies


def _lower_backward(spread: _Spread, exchange: RowExchange) -> Lowering:
    """Return the lowering of the backward of a transposed convolution.

    The gradient of the bias is summed separately, since several ranks read a halo row.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, dim = operands[0], spread.dim
        contributed = spread.contributed_rows(build.bounds(spread.size))
        first, last = spread.inside(contributed)
        pads = (*[0, 0] * (len(build.shape(gradient)) - 1 - dim), first - contributed[0],
                contributed[1] - last)  # fmt: skip
        read_rows = build.rows(gradient, exchange)
        if any(pads):
            read_rows = build.op("aten.constant_pad_nd.default", read_rows, pads, 0)
        needs_input, needs_weight, needs_bias = build.bind(node, operands)["output_mask"]
        results = list(
            build.rerun(node, [read_rows, *operands[1:]],
                        output_mask=(needs_input, needs_weight, False),
                        **_without_padding(build, node, spread))
        )  # fmt: skip
        if needs_bias:
            summed_dims = tuple(d for d in range(len(build.shape(gradient))) if d != 1)
            results[2] = build.op("aten.sum.dim_IntList", gradient, summed_dims)
        return results

    return lower


# -- upsampling -----------------------------------------------------------------------------------


class _Resized(NamedTuple):
    """Spatial dim that is upsampled by the integer factor ``scale``."""

    dim: int
    size: int  # rows of the image
    scale: int
    halo: int  # number of neighbour rows on both sides that a row of the result depends on

    @property
    def result_size(self) -> int:
        """Number of rows of the result."""
        return self.size * self.scale

    def read(self, rows: Rows) -> Rows:
        """Return the image rows that ``rows`` of the result depend on."""
        first, last = rows[0] // self.scale, (rows[1] - 1) // self.scale + 1
        return max(first - self.halo, 0), min(last + self.halo, self.size)

    def halo_exchange(self, axis_size: int) -> RowExchange | None:
        """Return the halo exchange: each rank receives the image rows that it reads."""
        bounds = [shard_bounds(self.result_size, axis_size, rank) for rank in range(axis_size)]
        wanted_rows = [self.read(rows) for rows in bounds]
        return _halo_exchange(self.dim, self.size, self.result_size, axis_size, wanted_rows)


def _resized_dims(call: Call, shape: tuple[int, ...], result: tuple[int, ...]) -> list[_Resized]:
    """Return the spatial dims that are upsampled by a power of two.

    For these factors source coordinates are exact, so a block gives the same numbers as the full
    image.
    """
    linear = "linear" in call.node.op
    if linear and call["align_corners"]:
        return []
    scales = [call.args.get(name) for name in ("scales_d", "scales_h", "scales_w", "scales")]
    given_scales = {scale for scale in scales if scale is not None}
    dims = []
    for dim in range(2, len(shape)):
        scale, remainder = divmod(result[dim], max(shape[dim], 1))
        is_power_of_two = not remainder and scale > 0 and scale & (scale - 1) == 0
        if is_power_of_two and shape[dim] > 1 and given_scales <= {scale}:
            dims.append(_Resized(dim, shape[dim], scale, int(linear)))
    return dims


def _upsample(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of an upsampling sharded along a spatial dim."""
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    for resized in _resized_dims(call, call.shape("self"), call.result().shape):
        exchange = resized.halo_exchange(axis_size)
        if exchange is not None:
            strategy = call.strategy(S(resized.dim), self=S(resized.dim))
            comm = exchange_comm(exchange, call.meta("self"))
            strategies.append(strategy.by(_lower_upsample(resized, exchange), comm))
    return strategies


def _lower_upsample(resized: _Resized, exchange: RowExchange) -> Lowering:
    """Return the lowering of an upsampling: halo exchange, op, crop."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], exchange)
        sizes = list(build.bind(node, operands)["output_size"])
        sizes[resized.dim - 2] = build.shape(rows)[resized.dim] * resized.scale
        (result,) = build.rerun(node, [rows], output_size=sizes)
        assert result is not None
        start, stop = build.bounds(resized.result_size)
        first = resized.read((start, stop))[0] * resized.scale
        return (build.slice(result, resized.dim, start - first, stop - start),)

    return lower


def _upsample_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of the backward of an upsampling.

    Gradients of halo rows are sent back to the owners of the rows and summed there.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    for resized in _resized_dims(call, tuple(call["input_size"]), call.shape("grad_output")):
        exchange = resized.halo_exchange(axis_size)
        if exchange is not None:
            strategy = call.strategy(S(resized.dim), grad_output=S(resized.dim))
            comm = exchange_comm(exchange, call.result(), reverse_too=True)[1:]
            strategies.append(strategy.by(_lower_upsample_backward(resized, exchange), comm))
    return strategies


def _lower_upsample_backward(resized: _Resized, exchange: RowExchange) -> Lowering:
    """Return the lowering of the backward of an upsampling: pad, op, halo reduction."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args, dim = build.bind(node, operands), resized.dim
        start, stop = build.bounds(resized.result_size)
        first, last = resized.read((start, stop))
        before, after = start - first * resized.scale, last * resized.scale - stop
        gradient = operands[0]
        if before or after:
            pads = (*[0, 0] * (len(build.shape(gradient)) - 1 - dim), before, after)
            gradient = build.op("aten.constant_pad_nd.default", gradient, pads, 0)
        input_size, output_size = list(args["input_size"]), list(args["output_size"])
        input_size[dim], output_size[dim - 2] = last - first, (last - first) * resized.scale
        (read_gradient,) = build.rerun(
            node, [gradient], input_size=input_size, output_size=output_size
        )
        assert read_gradient is not None
        return (spatial.reduce_to_owners(build, read_gradient, exchange),)

    return lower


_RESIZES = "upsample_nearest{0}d upsample_{1}{0}d"
_NAMES = [
    name.format(space, kind)
    for space, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))
    for name in _RESIZES.split()
]
RULES: dict[str, Rule] = {
    **table(" ".join(f"{name}.default" for name in _NAMES), _upsample),
    **table(" ".join(f"{name}_backward.default" for name in _NAMES), _upsample_backward),
}
