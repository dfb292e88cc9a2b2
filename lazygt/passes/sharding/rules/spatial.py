"""Spatial parallelism: convolutions, pools, unfold and pads of images sharded along a spatial dim.

Each rank computes its rows of the result from its own rows and a halo of its neighbours' rows
(halo exchange). Padding is added at the borders of the image only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.placement import shard_bounds
from lazygt.passes.sharding.lower.builder import bound
from lazygt.passes.sharding.lower.halo import Ranges, RowExchange, Rows, blocks
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

# -- unfold, and reflection and replication pads ---------------------------------------------------

_TABLE_RULES = rule_table.RULES


def _unfold(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of unfold along a sharded dim: ranks exchange the rows of windows."""
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    value, dim = call.meta("self"), call.dim("dimension", len(call.shape("self")))
    size, step = call["size"], call["step"]
    bounds = [shard_bounds(call.result().shape[dim], axis_size, rank) for rank in range(axis_size)]
    if any(start >= stop for start, stop in bounds):
        return strategies
    wanted_rows = tuple([((a * step, (b - 1) * step + size),) for a, b in bounds])
    exchange = RowExchange(dim, blocks(value.shape[dim], axis_size), wanted_rows)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, [build.rows(operands[0], exchange)])

    return [
        *strategies,
        call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(exchange, value)),
    ]


def _reflection_or_replication_pad(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of reflection and replication pads along a sharded dim.

    Each rank receives the source rows of its block of the result.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    value, result_shape, pads = call.meta("self"), call.result().shape, call["padding"]
    for number in range(len(pads) // 2):
        dim = len(result_shape) - 1 - number
        bounds = [shard_bounds(result_shape[dim], axis_size, rank) for rank in range(axis_size)]
        mirrored = "reflection" in node.op
        source_rows = [
            _to_ranges(
                [
                    _source_row(i - pads[2 * number], value.shape[dim], mirrored)
                    for i in range(*rows)
                ]
            )
            for rows in bounds
        ]
        exchange = RowExchange(dim, blocks(value.shape[dim], axis_size), tuple(source_rows))
        other_pads = [0 if index // 2 == number else pad for index, pad in enumerate(pads)]
        rejects_empty = any(other_pads) and not all(source_rows)  # the kernel rejects empty blocks
        if value.shape[dim] > 1 and exchange.has_few_pieces and not rejects_empty:
            strategy = call.strategy(S(dim), self=S(dim))
            strategies.append(
                strategy.by(_lower_pad(exchange, other_pads), exchange_comm(exchange, value))
            )
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


def _lower_pad(exchange: RowExchange, other_pads: Sequence[int]) -> Lowering:
    """Return the lowering that exchanges the rows of one dim and pads the other dims."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows = build.rows(operands[0], exchange)
        return build.rerun(node, [rows], padding=other_pads) if any(other_pads) else (rows,)

    return lower


# -- convolutions ----------------------------------------------------------------------------------


class _Window(NamedTuple):
    """Sliding window of a convolution or pool along one spatial dim."""

    space: int  # number of the spatial dim, from 0
    size: int  # size, result_size: rows of the image, and of the result
    result_size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def dim(self) -> int:
        """Dim in the image and in the result."""
        return self.space + 2

    def read(self, rows: Rows) -> Rows:
        """Return the image rows that ``rows`` of the result read, including padding rows."""
        first = rows[0] * self.stride - self.padding
        reach = (self.kernel - 1) * self.dilation + 1
        return first, (rows[1] - 1) * self.stride - self.padding + reach

    def halo_exchange(self, axis_size: int) -> RowExchange | None:
        """Return the halo exchange: each rank receives the image rows that it reads.

        None if a rank has no rows of the result, or reads padding only.
        """
        bounds = [shard_bounds(self.result_size, axis_size, rank) for rank in range(axis_size)]
        if any(start >= stop for start, stop in bounds):
            return None
        wanted = [self.inside(self.read(rows)) for rows in bounds]
        if any(first >= last for first, last in wanted):
            return None
        owned_rows = blocks(self.size, axis_size)
        return RowExchange(self.dim, owned_rows, tuple([(rows,) for rows in wanted]))

    def inside(self, rows: Rows) -> Rows:
        """Clamp rows to the image, without padding rows."""
        return max(rows[0], 0), min(rows[1], self.size)


def _convolution_windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    """Return the windows of a convolution per spatial dim; empty if transposed."""
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    if call["transposed"] or call["groups"] < 1:
        return []
    per_dim_arguments = [
        per_dim(call[name], len(kernel)) for name in ("stride", "padding", "dilation")
    ]
    sizes = zip(shape[2:], result[2:], kernel, *per_dim_arguments, strict=True)
    return [_Window(space, *sizes_of_dim) for space, sizes_of_dim in enumerate(sizes)]


def per_dim(values: Sequence[int], count: int) -> Sequence[int]:
    """Expand an argument to one number per spatial dim."""
    return values if len(values) == count else [values[0]] * count


def by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution sharded along a spatial dim."""
    strategies = []
    for window in _convolution_windows(call, call.result().shape):
        exchange = window.halo_exchange(call.axis_size)
        if exchange is not None:
            comm = exchange_comm(exchange, call.meta("input"))
            strategy = call.strategy(S(window.dim), input=S(window.dim))
            strategies.append(strategy.by(_lower_forward(window, exchange), comm))
    return strategies


def _lower_forward(window: _Window, exchange: RowExchange) -> Lowering:
    """Return the lowering of a convolution or average pool: halo exchange, then the op."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        read_rows = _with_halo(build, operands[0], window, exchange)
        padding = _without_padding(build, node, operands[0], window)
        return build.rerun(node, [read_rows, *operands[1:]], padding=padding)

    return lower


def _with_halo(
    build: Builder, value: Ref, window: _Window, exchange: RowExchange, fill_value: Arg = 0
) -> Ref:
    """Exchange halos; return the rows that this rank reads, padded at the borders of the image."""
    rows = build.rows(value, exchange)
    before, after = _padding_rows(build, window)
    if not (before or after):
        return rows
    trailing_pads = [0, 0] * (len(build.shape(value)) - 1 - window.dim)
    padded: Ref = build.op(
        "aten.constant_pad_nd.default", rows, (*trailing_pads, before, after), fill_value
    )
    return padded


def _padding_rows(build: Builder, window: _Window) -> Rows:
    """Return the numbers of padding rows that this rank reads before and after the image."""
    read = window.read(build.bounds(window.result_size))
    first, last = window.inside(read)
    return first - read[0], read[1] - last


def _without_padding(build: Builder, node: Node, image: Ref, window: _Window) -> list[int]:
    """Return a node's padding argument, one number a spatial dim, with 0 for the sharded one."""
    num_spaces = len(build.shape(image)) - (window.dim - window.space)
    padding = per_dim(bound(node)["padding"] or (0,), num_spaces)
    return [0 if space == window.space else pad for space, pad in enumerate(padding)]


def backward_by_rows(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution's backward sharded along a spatial dim."""
    strategies = []
    output_mask = tuple(call["output_mask"])
    for window in _convolution_windows(call, call.shape("grad_output")):
        exchange = window.halo_exchange(call.axis_size)
        if exchange is None:
            continue
        dim = window.dim
        comm = exchange_comm(exchange, call.meta("input"), reverse_too=output_mask[0])
        outputs = S(dim) if output_mask[0] else R, P, P
        strategy = call.strategy(outputs, grad_output=S(dim), input=S(dim))
        strategies.append(strategy.by(_lower_backward(window, exchange, output_mask[0]), comm))
    return strategies


def _lower_backward(window: _Window, exchange: RowExchange, needs_input_gradient: bool) -> Lowering:
    """Return the lowering of a convolution backward: halo exchange, op, halo reduction."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, weight = operands
        read_rows = _with_halo(build, value, window, exchange)
        padding = _without_padding(build, node, value, window)
        results = list(build.rerun(node, [gradient, read_rows, weight], padding=padding))
        input_gradient = results[0]
        if needs_input_gradient and input_gradient is not None:
            results[0] = _reduce_halo_gradient(build, input_gradient, window, exchange)
        return results

    return lower


def _reduce_halo_gradient(
    build: Builder, gradient: Ref, window: _Window, exchange: RowExchange
) -> Ref:
    """Return the gradient of this rank's rows: the sum over all ranks that read these rows.

    Args:
        gradient: gradient of the rows that this rank read, including padding rows.
    """
    (before, after), dim = _padding_rows(build, window), window.dim
    if before or after:
        stop = build.shape(gradient)[dim] - after
        gradient = build.op("aten.slice.Tensor", gradient, dim, before, stop)
    return reduce_to_owners(build, gradient, exchange)


def reduce_to_owners(build: Builder, value: Ref, exchange: RowExchange) -> Ref:
    """Reverse a row exchange: send values of received rows to the owners, and sum them there.

    Args:
        value: values for the rows that this rank wanted in ``exchange``, such as gradients.

    Returns:
        The sums for the rows that this rank owns.
    """
    dim, rank = exchange.dim, build.index
    size = sum(last - first for first, last in exchange.have[rank])
    placed_rows, to_send, start = [], [], 0
    for piece in exchange.pieces[rank]:
        rows = build.slice(value, dim, start, piece.rows)
        if piece.source == rank:
            placed_rows.append((rows, piece.start))
        else:
            to_send.append((piece.source, start, rows))
        start += piece.rows
    if exchange.sent:
        reverse_sends = tuple(
            sorted([(target, source, count) for source, target, count in exchange.sent])
        )
        sent_rows = [rows for _, _, rows in sorted(to_send, key=lambda send: send[:2])]
        empty = build.slice(value, dim, 0, 0)
        received = build.send_recv(build.joined(sent_rows or [empty], dim), dim, reverse_sends)
        start = 0
        for first_row, count in exchange.outgoing(rank):
            placed_rows.append((build.slice(received, dim, start, count), first_row))
            start += count
    placed_rows = placed_rows or [(build.slice(value, dim, 0, 0), 0)]
    padded = [_zero_padded(build, rows, dim, first_row, size) for rows, first_row in placed_rows]
    return reduce(lambda a, b: build.op("aten.add.Tensor", a, b), padded)


def _zero_padded(build: Builder, value: Ref, dim: int, start: int, size: int) -> Ref:
    """Zero-pad rows along ``dim`` to ``size`` rows, starting at row ``start``."""
    shape = build.shape(value)
    if shape[dim] == size:
        return value
    trailing_pads = [0, 0] * (len(shape) - 1 - dim)
    pads = (*trailing_pads, start, size - start - shape[dim])
    padded: Ref = build.op("aten.constant_pad_nd.default", value, pads, 0)
    return padded


# -- pools -----------------------------------------------------------------------------------------


def _pool_windows(call: Call, result: tuple[int, ...]) -> list[_Window]:
    """Return the windows of a 2-d pool per spatial dim; empty for other pools or ``ceil_mode``."""
    shape = call.shape("self")
    if len(shape) != 4 or call["ceil_mode"]:
        return []
    kernel = per_dim(call["kernel_size"], 2)
    arguments = [
        per_dim(call[name] or (), 2) if call[name] else None for name in ("stride", "padding")
    ]
    stride, padding = arguments[0] or kernel, arguments[1] or [0, 0]
    dilation = per_dim(call.args.get("dilation") or [1, 1], 2)
    sizes = zip(shape[2:], result[2:], kernel, stride, padding, dilation, strict=True)
    return [_Window(space, *sizes_of_dim) for space, sizes_of_dim in enumerate(sizes)]


def _avg_pool(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of an average pool."""
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    for window in _pool_windows(call, call.result().shape):
        exchange = window.halo_exchange(axis_size)
        if exchange is not None and _has_constant_divisor(call, window):
            comm = exchange_comm(exchange, call.meta("self"))
            strategy = call.strategy(S(window.dim), self=S(window.dim))
            strategies.append(strategy.by(_lower_forward(window, exchange), comm))
    return strategies


def _has_constant_divisor(call: Call, window: _Window) -> bool:
    """Return whether the divisor of an average is independent of padding."""
    return not window.padding or bool(call["count_include_pad"] or call["divisor_override"])


def _max_pool(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a max pool; its indices count in the full image."""
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    value = call.meta("self")
    for window in _pool_windows(call, call.result().shape):
        exchange = window.halo_exchange(axis_size)
        if exchange is not None and (value.dtype.is_floating_point or not window.padding):
            comm = exchange_comm(exchange, value)
            strategy = call.strategy(S(window.dim), self=S(window.dim))
            strategies.append(strategy.by(_lower_max_pool(window, exchange, value.shape[3]), comm))
    return strategies


def _lower_max_pool(window: _Window, exchange: RowExchange, columns: int) -> Lowering:
    """Return the lowering of a max pool; ``columns`` is the width of the full image."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        read_rows = _with_halo(build, operands[0], window, exchange, float("-inf"))
        padding = _without_padding(build, node, operands[0], window)
        best, indices = build.rerun(node, [read_rows], padding=padding)
        assert indices is not None
        row_and_column = _to_row_and_column(build, indices, window, build.shape(read_rows)[3], 1)
        if window.read(build.bounds(window.result_size))[0] < 0:
            # for a window of -inf only, take the first index inside the image, not in the padding
            sharded_index = row_and_column[window.space]
            wrapped = build.op("aten.remainder.Scalar", sharded_index, window.dilation)
            is_before = build.op("aten.lt.Scalar", sharded_index, 0)
            row_and_column[window.space] = build.op(
                "aten.where.self", is_before, wrapped, sharded_index
            )
        return best, _to_flat_index(build, row_and_column, columns)

    return lower


def _to_row_and_column(
    build: Builder, indices: Ref, window: _Window, columns: int, sign: int
) -> list[Ref]:
    """Split flat indices into row and column, and shift the sharded one by the first row read.

    Args:
        columns: number of columns of the image that the indices count in.
        sign: 1 converts local to global indices; -1 converts global to local ones.
    """
    row = build.op("aten.div.Scalar_mode", indices, columns, rounding_mode="floor")
    row_and_column = [row, build.op("aten.remainder.Scalar", indices, columns)]
    first = window.read(build.bounds(window.result_size))[0]
    row_and_column[window.space] = build.op(
        "aten.add.Scalar", row_and_column[window.space], sign * first
    )
    return row_and_column


def _to_flat_index(build: Builder, row_and_column: Sequence[Ref], columns: int) -> Ref:
    """Join row and column to flat indices in an image of ``columns`` columns."""
    flat: Ref = build.op(
        "aten.add.Tensor",
        build.op("aten.mul.Scalar", row_and_column[0], columns),
        row_and_column[1],
    )
    return flat


def _pool_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a pool's backward sharded along a spatial dim.

    Gradients of halo rows are sent back to the owners of the rows and summed there.
    """
    call = Call(node, metas, axis_size)
    strategies = [*_TABLE_RULES[node.op](node, metas, axis_size)]
    has_indices = call.has("indices")
    for window in _pool_windows(call, call.shape("grad_output")):
        exchange = window.halo_exchange(axis_size)
        if exchange is None or not (has_indices or _has_constant_divisor(call, window)):
            continue
        dim = window.dim
        placements = {name: S(dim) for name in ("grad_output", "self", "indices") if call.has(name)}
        lower = _lower_pool_backward(window, exchange, call.shape("self")[3])
        strategy = call.strategy(S(dim), **placements)
        comm = exchange_comm(exchange, call.meta("self"), reverse_too=True)[1:]
        strategies.append(strategy.by(lower, comm))
    return strategies


def _lower_pool_backward(window: _Window, exchange: RowExchange, columns: int) -> Lowering:
    """Return the lowering of a pool backward: the op on the rows read, then halo reduction."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, value, *indices = operands
        read_like = _zeros_like_read_rows(build, value, window)
        if indices:
            row_and_column = _to_row_and_column(build, indices[0], window, columns, -1)
            indices = [_to_flat_index(build, row_and_column, build.shape(read_like)[3])]
        padding = _without_padding(build, node, value, window)
        (read_gradient,) = build.rerun(node, [gradient, read_like, *indices], padding=padding)
        assert read_gradient is not None
        return (_reduce_halo_gradient(build, read_gradient, window, exchange),)

    return lower


def _zeros_like_read_rows(build: Builder, value: Ref, window: _Window) -> Ref:
    """Return zeros in the shape of the rows that this rank reads; the op uses the shape only."""
    first, last = window.read(build.bounds(window.result_size))
    shape = list(build.shape(value))
    shape[window.dim] = last - first
    return build.full(shape, 0, like=value)


RULES: dict[str, Rule] = {
    **table("avg_pool2d.default", _avg_pool),
    **table("max_pool2d_with_indices.default", _max_pool),
    **table("avg_pool2d_backward.default max_pool2d_with_indices_backward.default", _pool_backward),
    **table("unfold.default unfold_copy.default", _unfold),
    **table(
        "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
        "replication_pad1d.default replication_pad2d.default replication_pad3d.default",
        _reflection_or_replication_pad,
    ),
}
