"""Sliding windows along a sharded dim: convolutions, pools, upsampling, unfold.

A row of the result depends on an interval of image rows, its window. Each rank receives the rows
that its block of the result depends on (halo exchange), pads them at the borders of the image, runs
the op without padding along that dim, and drops the rows of the result that other ranks own. A
backward takes these steps in reverse: gradients of received rows are sent back to the owners of the
rows, and summed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.placement import Placement, shard_bounds
from lazygt.passes.sharding.lower.builder import Builder, bound
from lazygt.passes.sharding.lower.halo import RowExchange, Rows, blocks
from lazygt.passes.sharding.rules.strategy import (
    Call,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    exchange_comm,
    pad,
    table,
)


class _Window(NamedTuple):
    """Sliding window along one dim.

    Row ``i`` of the result depends on the ``kernel`` image rows ``i * stride - padding``,
    ``+ dilation``, and so on. If the op ``enlarges`` the image, row ``i`` of the image contributes
    to these rows of the result instead.
    """

    dim: int  # in the image and in the result
    size: int  # size, result_size: rows of the image, and of the result
    result_size: int
    kernel: int
    stride: int
    padding: int = 0
    dilation: int = 1
    enlarges: bool = False

    def spanned(self, rows: Rows) -> Rows:
        """Return the interval from the first to the last row in the windows of ``rows``."""
        first = rows[0] * self.stride - self.padding
        reach = (self.kernel - 1) * self.dilation + 1
        return first, (rows[1] - 1) * self.stride - self.padding + reach

    def read(self, rows: Rows) -> Rows:
        """Return the image rows that ``rows`` of the result depend on, including padding rows."""
        if not self.enlarges:
            return self.spanned(rows)
        reach = (self.kernel - 1) * self.dilation
        first = -((reach - self.padding - rows[0]) // self.stride)
        return self.inside((first, (rows[1] - 1 + self.padding) // self.stride + 1))

    def inside(self, rows: Rows) -> Rows:
        """Clamp rows to the image, without padding rows."""
        return max(rows[0], 0), min(rows[1], self.size)

    def has_rows(self, rows: Rows) -> bool:
        """Return whether each row of the result has a row of the image."""
        first, last = self.inside(self.read(rows))
        if rows[0] >= rows[1] or first >= last:
            return False
        start, stop = self.spanned((first, last))
        return not self.enlarges or (start <= rows[0] and rows[1] <= stop)

    def reverse(self) -> _Window:
        """Return the window of the gradient of an op that enlarges the image."""
        return self._replace(size=self.result_size, result_size=self.size, enlarges=False)


@lru_cache(maxsize=1024)
def _halo_exchange(window: _Window, axis_size: int) -> RowExchange | None:
    """Return the halo exchange: each rank receives the image rows that it reads.

    None if a rank has no rows of the result, or has a row without rows of the image.
    """
    bounds = [shard_bounds(window.result_size, axis_size, rank) for rank in range(axis_size)]
    if not all(map(window.has_rows, bounds)):
        return None
    wanted = [(window.inside(window.read(rows)),) for rows in bounds]
    return RowExchange(window.dim, blocks(window.size, axis_size), tuple(wanted))


#: Adds a rank's local program of an op with a window along the sharded dim.
_Program = Callable[[_Window, Builder, Node, Sequence[Ref]], Values]
#: Exchanges of a program: of the image's rows, of their gradients back to the owners, or of both.
_ROWS, _GRADIENTS, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)


def _strategies(
    call: Call,
    windows: Sequence[_Window],
    program: _Program,
    image: TensorMeta,
    names: Sequence[str],
    exchanges: slice = _ROWS,
    results: Callable[[Placement], Sequence[Placement]] | None = None,
) -> list[Strategy]:
    """Return the strategy along the dim of each window.

    Args:
        image: global meta of the value whose rows, or their gradients, are exchanged.
        names: arguments that are sharded along the dim.
        exchanges: the exchanges of the program.
        results: placements of the results, from the one along the dim; None: all are along it.
    """
    strategies = []
    for window in windows:
        exchange, placement = _halo_exchange(window, call.axis_size), S(window.dim)
        if exchange is not None:
            outputs = placement if results is None else results(placement)
            strategy = call.strategy(outputs, **dict.fromkeys(names, placement))
            comm = exchange_comm(exchange, image, reverse_too=True)[exchanges]
            strategies.append(strategy.by(partial(program, window), comm))
    return strategies


def _lower_forward(window: _Window, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Exchange halos, run the op, and drop the rows of the result that other ranks own."""
    rows = _with_halo(build, operands[0], window)
    changes = _changes(node, window, build.shape(rows))
    (result,) = build.rerun(node, [rows, *operands[1:]], **changes)
    assert result is not None
    count = build.block(window.result_size)
    return (build.slice(result, window.dim, _dropped(build, node, window)[0], count),)


def _with_halo(build: Builder, value: Ref, window: _Window, fill_value: Arg = 0) -> Ref:
    """Exchange halos; return the rows that this rank reads, padded at the borders of the image."""
    exchange = _halo_exchange(window, build.parts)
    assert exchange is not None
    rows = build.rows(value, exchange)
    return _padded(build, rows, window.dim, _padding_rows(build, window), fill_value)


def _padded(build: Builder, value: Ref, dim: int, pads: Rows, fill_value: Arg = 0) -> Ref:
    """Pad a value along ``dim``, if needed, by numbers of rows before and after it."""
    return pad(build, value, dim, *pads, fill_value) if any(pads) else value


def _read_rows(build: Builder, window: _Window) -> Rows:
    """Return the image rows that this rank reads, including padding rows."""
    return window.read(build.bounds(window.result_size))


def _padding_rows(build: Builder, window: _Window) -> Rows:
    """Return the numbers of padding rows that this rank reads before and after the image."""
    read = _read_rows(build, window)
    first, last = window.inside(read)
    return first - read[0], read[1] - last


def _dropped(build: Builder, node: Node, window: _Window) -> Rows:
    """Return the numbers of result rows that the op makes before and after those of this rank."""
    if not window.enlarges:
        return 0, 0
    start, stop = build.bounds(window.result_size)
    first, last = read = _read_rows(build, window)
    if node.op == "aten.convolution.default":
        first, last = window.spanned(read)
    else:  # an upsampling makes the rows of the image rows that it gets, not of their neighbours
        first, last = first * window.stride, last * window.stride
    return start - first, last - stop


def _changes(node: Node, window: _Window, shape: Sequence[int]) -> dict[str, Any]:
    """Return the changed arguments of the op on image rows of ``shape``: sizes, no padding."""
    args, space, changes = bound(node), window.dim - 2, dict[str, Any]()
    for name in ("padding", "output_padding") if args.get("transposed") else ("padding",):
        if name in args:
            changes[name] = [*_per_dim(args[name] or (0,), len(shape) - 2)]
            changes[name][space] = 0
    rows = shape[window.dim]
    sizes = ("input_size", window.dim, rows), ("output_size", space, rows * window.stride)
    for name, index, size in sizes:
        if name in args:
            changes[name] = [*args[name]]
            changes[name][index] = size
    return changes


def _per_dim(values: Sequence[int], count: int) -> Sequence[int]:
    """Expand an argument to one number per spatial dim."""
    return values if len(values) == count else [values[0]] * count


def _to_owners(build: Builder, gradient: Ref, window: _Window) -> Ref:
    """Return the gradient of this rank's image rows: the sum over all ranks that read these rows.

    Args:
        gradient: gradient of the rows that this rank read, including padding rows.
    """
    exchange = _halo_exchange(window, build.parts)
    assert exchange is not None
    before, after = _padding_rows(build, window)
    if before or after:
        stop = build.shape(gradient)[window.dim] - after
        gradient = build.op("aten.slice.Tensor", gradient, window.dim, before, stop)
    return _reversed(build, gradient, exchange)


def _reversed(build: Builder, value: Ref, exchange: RowExchange) -> Ref:
    """Reverse a row exchange: send values of received rows to the owners, and sum them there.

    Args:
        value: values for the rows that this rank wanted in ``exchange``.

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
    padded = [
        _padded(build, rows, dim, (first_row, size - first_row - build.shape(rows)[dim]))
        for rows, first_row in placed_rows
    ]
    return reduce(lambda a, b: build.op("aten.add.Tensor", a, b), padded)


# -- convolutions, transposed or not ---------------------------------------------------------------


def _convolution_windows(call: Call, result_shape: tuple[int, ...]) -> list[_Window]:
    """Return the window of a convolution per spatial dim."""
    shape, kernel = call.shape("input"), call.shape("weight")[2:]
    arguments = [_per_dim(call[name], len(kernel)) for name in ("stride", "padding", "dilation")]
    enlarges = [call["transposed"]] * len(kernel)
    sizes = zip(shape[2:], result_shape[2:], kernel, *arguments, enlarges, strict=True)
    return [_Window(dim, *of_dim) for dim, of_dim in enumerate(sizes, 2)]


def convolution(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution sharded along a spatial dim."""
    windows = _convolution_windows(call, call.result().shape) if call["groups"] > 0 else []
    return _strategies(call, windows, _lower_forward, call.meta("input"), ["input"])


def convolution_backward(call: Call) -> list[Strategy]:
    """Return the strategies of a convolution's backward sharded along a spatial dim."""
    windows = _convolution_windows(call, call.shape("grad_output"))
    needs_input, names = call["output_mask"][0], ["grad_output", "input"]

    def results(placement: Placement) -> Sequence[Placement]:
        return placement if needs_input else R, P, P

    if call["transposed"]:
        windows = [window.reverse() for window in windows]
        image, program, exchanges = call.meta("grad_output"), _lower_transposed_backward, _ROWS
    else:
        image, program = call.meta("input"), _lower_convolution_backward
        exchanges = _BOTH if needs_input else _ROWS
    return _strategies(call, windows, program, image, names, exchanges, results)


def _lower_convolution_backward(
    window: _Window, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Exchange halos, run the op, and send the gradients of halo rows back."""
    gradient, value, weight = operands
    rows = _with_halo(build, value, window)
    changes = _changes(node, window, build.shape(rows))
    results = [*build.rerun(node, [gradient, rows, weight], **changes)]
    if bound(node)["output_mask"][0] and results[0] is not None:
        results[0] = _to_owners(build, results[0], window)
    return results


def _lower_transposed_backward(
    window: _Window, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Exchange halos of the gradient, and run the op.

    The gradient of the bias is summed separately, since several ranks read a halo row.

    Args:
        window: of the gradient.
    """
    gradient, value, _ = operands
    needs_input, needs_weight, needs_bias = bound(node)["output_mask"]
    rows = _with_halo(build, gradient, window)
    changes = _changes(node, window, build.shape(value))
    changes["output_mask"] = (needs_input, needs_weight, False)
    results = [*build.rerun(node, [rows, *operands[1:]], **changes)]
    if needs_bias:
        summed_dims = tuple(d for d in range(len(build.shape(gradient))) if d != 1)
        results[2] = build.op("aten.sum.dim_IntList", gradient, summed_dims)
    return results


# -- pools -----------------------------------------------------------------------------------------


def _pool_windows(call: Call, result_shape: tuple[int, ...]) -> list[_Window]:
    """Return the window of a 2-d pool per spatial dim; empty for other pools or ``ceil_mode``.

    The divisor of an average must be independent of padding.
    """
    shape = call.shape("self")
    if len(shape) != 4 or call["ceil_mode"]:
        return []
    kernel = call["kernel_size"]
    arguments = kernel, call["stride"] or kernel, call["padding"] or (0,), call.args.get("dilation")
    sizes = zip(
        *(shape[2:], result_shape[2:]),
        *(_per_dim(arg or (1,), 2) for arg in arguments),
        strict=True,
    )
    windows = [_Window(dim, *of_dim) for dim, of_dim in enumerate(sizes, 2)]
    if "count_include_pad" not in call.args:
        return windows
    is_constant = call["count_include_pad"] or call["divisor_override"]
    return [window for window in windows if is_constant or not window.padding]


def _average_pool(call: Call) -> list[Strategy]:
    """Return the strategies of an average pool sharded along a spatial dim."""
    windows = _pool_windows(call, call.result().shape)
    return _strategies(call, windows, _lower_forward, call.meta("self"), ["self"])


def _max_pool(call: Call) -> list[Strategy]:
    """Return the strategies of a max pool sharded along a spatial dim."""
    value = call.meta("self")
    windows = [
        window
        for window in _pool_windows(call, call.result().shape)
        if value.dtype.is_floating_point or not window.padding
    ]
    return _strategies(call, windows, _lower_max_pool, value, ["self"])


def _lower_max_pool(window: _Window, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Exchange halos, run the op, and convert its indices to those of the full image."""
    rows = _with_halo(build, operands[0], window, float("-inf"))
    shape = build.shape(rows)
    best, indices = build.rerun(node, [rows], **_changes(node, window, shape))
    assert indices is not None
    row_and_column = _to_row_and_column(build, indices, window, shape[3], 1)
    if _read_rows(build, window)[0] < 0:
        # for a window of -inf only, take the first index inside the image, not in the padding
        sharded_index = row_and_column[window.dim - 2]
        wrapped = build.op("aten.remainder.Scalar", sharded_index, window.dilation)
        is_before = build.op("aten.lt.Scalar", sharded_index, 0)
        row_and_column[window.dim - 2] = build.op(
            "aten.where.self", is_before, wrapped, sharded_index
        )
    return best, _to_flat_index(build, row_and_column, _columns(window, shape))


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
    first, space = _read_rows(build, window)[0], window.dim - 2
    row_and_column[space] = build.op("aten.add.Scalar", row_and_column[space], sign * first)
    return row_and_column


def _columns(window: _Window, shape: Sequence[int]) -> int:
    """Return the number of columns of the full image, of which a rank has rows of ``shape``."""
    return window.size if window.dim == 3 else shape[3]


def _to_flat_index(build: Builder, row_and_column: Sequence[Ref], columns: int) -> Ref:
    """Join row and column to flat indices in an image of ``columns`` columns."""
    row, column = row_and_column
    flat: Ref = build.op("aten.add.Tensor", build.op("aten.mul.Scalar", row, columns), column)
    return flat


def _pool_backward(call: Call) -> list[Strategy]:
    """Return the strategies of a pool's backward sharded along a spatial dim."""
    image, windows = call.meta("self"), _pool_windows(call, call.shape("grad_output"))
    names = [name for name in ("grad_output", "self", "indices") if call.has(name)]
    return _strategies(call, windows, _lower_pool_backward, image, names, _GRADIENTS)


def _lower_pool_backward(
    window: _Window, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run the op on zeros, whose shape alone it uses, and send the gradients of halo rows back."""
    gradient, value, *indices = operands
    first, last = _read_rows(build, window)
    shape = [*build.shape(value)]
    shape[window.dim] = last - first
    read_like = build.full(shape, 0, like=value)
    if indices:
        columns = _columns(window, shape)
        row_and_column = _to_row_and_column(build, indices[0], window, columns, -1)
        indices = [_to_flat_index(build, row_and_column, shape[3])]
    changes = _changes(node, window, shape)
    (read_gradient,) = build.rerun(node, [gradient, read_like, *indices], **changes)
    assert read_gradient is not None
    return (_to_owners(build, read_gradient, window),)


# -- upsampling, unfold ----------------------------------------------------------------------------


def _upsampling_windows(
    call: Call, shape: tuple[int, ...], result_shape: tuple[int, ...]
) -> list[_Window]:
    """Return the windows of the spatial dims that are upsampled by a power of two.

    For these factors source coordinates are exact, so a block gives the same numbers as the full
    image. In linear upsampling a row of the image contributes to its own rows of the result, and to
    those of its neighbours.
    """
    linear = "linear" in call.node.op
    if linear and call["align_corners"]:
        return []
    scales = {call.args.get(name) for name in ("scales_d", "scales_h", "scales_w", "scales")}
    windows = []
    for dim in range(2, len(shape)):
        scale, remainder = divmod(result_shape[dim], max(shape[dim], 1))
        is_power_of_two = not remainder and scale > 0 and scale & (scale - 1) == 0
        if is_power_of_two and shape[dim] > 1 and scales <= {scale, None}:
            kernel, padding = (3 * scale, scale) if linear else (scale, 0)
            windows.append(
                _Window(dim, shape[dim], result_shape[dim], kernel, scale, padding, enlarges=True)
            )
    return windows


def _upsampling(call: Call) -> list[Strategy]:
    """Return the strategies of an upsampling sharded along a spatial dim."""
    windows = _upsampling_windows(call, call.shape("self"), call.result().shape)
    return _strategies(call, windows, _lower_forward, call.meta("self"), ["self"])


def _upsampling_backward(call: Call) -> list[Strategy]:
    """Return the strategies of the backward of an upsampling sharded along a spatial dim."""
    windows = _upsampling_windows(call, tuple(call["input_size"]), call.shape("grad_output"))
    return _strategies(
        call, windows, _lower_upsampling_backward, call.result(), ["grad_output"], _GRADIENTS
    )


def _lower_upsampling_backward(
    window: _Window, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Pad the gradient by rows of other ranks, run the op, send gradients of halo rows back."""
    gradient = _padded(build, operands[0], window.dim, _dropped(build, node, window))
    shape = [*bound(node)["input_size"]]
    first, last = _read_rows(build, window)
    shape[window.dim] = last - first
    (read_gradient,) = build.rerun(node, [gradient], **_changes(node, window, shape))
    assert read_gradient is not None
    return (_to_owners(build, read_gradient, window),)


def _unfold(call: Call) -> list[Strategy]:
    """Return the strategy of unfold along its dim."""
    value, dim = call.meta("self"), call.dim("dimension", call.rank)
    if not value.shape:
        return []
    window = _Window(dim, value.shape[dim], call.result().shape[dim], call["size"], call["step"])
    return _strategies(call, [window], _lower_forward, value, ["self"])


_NAMES = [
    name
    for space, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))
    for name in (f"upsample_nearest{space}d", f"upsample_{kind}{space}d")
]
RULES: dict[str, Rule] = {
    **table("avg_pool2d.default", _average_pool),
    **table("max_pool2d_with_indices.default", _max_pool),
    **table("avg_pool2d_backward.default max_pool2d_with_indices_backward.default", _pool_backward),
    **table(" ".join(f"{name}.default" for name in _NAMES), _upsampling),
    **table(" ".join(f"{name}_backward.default" for name in _NAMES), _upsampling_backward),
    **table("unfold.default unfold_copy.default", _unfold),
}
