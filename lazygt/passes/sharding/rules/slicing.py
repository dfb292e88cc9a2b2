"""Joining and slicing: cat, stack, split, slice, select, narrow, and their gradients.

Other dims than the sliced one are sharded freely, and partial values pass through. A slice of a
sharded dim may span several ranks. Either each rank pads its share of the slice with zeros, and the
result is partial, or ranks exchange rows, and the result is sharded. Packed tensors, such as a
projection of queries, keys and values, have strided placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from lazygt.graph.node import DEVICE, Node, Param, Ref
from lazygt.graph.placement import (
    Placement,
    Shard,
    StridedShard,
    group_sizes,
    side_by_side,
)
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.lower.halo import Ranges, RowExchange, blocks, blocks_of_each
from lazygt.passes.sharding.rules.strategy import (
    PARTIALS,
    Call,
    Lowering,
    P,
    Rule,
    S,
    Strategy,
    Values,
    exchange_comm,
    local_range,
    pad,
    partial_by_padding,
    passing,
    shardable_dims,
    sized,
    table,
    without,
)

#: Slices of at most this many bytes are not sharded by an exchange: an all-reduce is as cheap.
_SMALL = 1 << 10


def _cat(call: Call) -> Sequence[Strategy]:
    """Return the strategies of cat."""
    shape = call.result().shape
    dim = call.dim("dim", len(shape))
    ranks = [len(meta.shape) for meta in call.operands]
    strategies: list[Strategy] = []
    if set(ranks) == {len(shape)}:  # torch lets an empty 1-d tensor stand among others
        other_dims = [d for d in shardable_dims(shape) if d != dim]
        strategies += [call.strategy(S(d), tensors=S(d)) for d in other_dims]
        if partials(call, bools=True):
            strategies += [*_cat_in_blocks(call, dim), *cat_strategies(call, dim)]
    return strategies + [call.strategy(partial, tensors=partial) for partial in partials(call)]


def _cat_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a cat of sharded tensors to a sharded result, by a row exchange."""
    sizes = tuple([meta.shape[dim] for meta in call.operands])
    old_blocks = blocks_of_each(sizes, call.axis_size)
    exchange = RowExchange(dim, old_blocks, blocks(sum(sizes), call.axis_size))
    if sum(sizes) < 2 or not exchange.has_few_pieces:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (rows,) = build.rerun(node, operands)
        assert rows is not None
        return (build.rows(rows, exchange),)

    return [call.strategy(S(dim), tensors=S(dim)).by(lower, exchange_comm(exchange, call.result()))]


def _stack(call: Call) -> Sequence[Strategy]:
    """Return the strategies of stack."""
    shape = call.result().shape
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), tensors=S(d - (d > dim))) for d in shardable_dims(shape) if d != dim
    ]
    return strategies + [call.strategy(partial, tensors=partial) for partial in partials(call)]


def partials(call: Call, bools: bool = False) -> list[Placement]:
    """Return the partial placements that pass through an op that moves elements.

    Empty if operands and result differ in dtype, or are bools.

    Args:
        bools: whether bools are allowed.
    """
    same_dtype = {meta.dtype for meta in call.operands} == {call.result().dtype}
    return list(PARTIALS) if same_dtype and (bools or call.result().dtype != torch.bool) else []


def _split(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a split or unbind into pieces along ``dim``.

    Along a sharded ``dim``, blocks of the operand are exchanged for blocks of each piece.
    """
    dim, removed = call.dim(), call.node.op.startswith("aten.unbind")
    strategies = _unaffected(call, dim, removed)
    if len(call.node.results) == 1:
        return [*strategies, *partial_by_padding(call, {"self": dim})]
    return strategies if removed else [*strategies, *split_in_blocks(call, dim)]


def _unaffected(call: Call, dim: int, removed: bool) -> list[Strategy]:
    """Return the strategies of placements that the op does not affect: other dims, and partials.

    Args:
        dim: the dim of the op.
        removed: whether the result lacks ``dim``.
    """
    return passing(call, without(call.rank, {dim}, removed), PARTIALS)


def _slice(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a slice, also with a sharded ``dim``."""
    shape, dim = call.shape("self"), call.dim()
    strategies = _unaffected(call, dim, removed=False)
    first, last, step = slice(call["start"], call["end"], call["step"]).indices(shape[dim])
    if shape[dim] < 2:
        return strategies
    if (first, last, step) == (0, shape[dim], 1):
        return [*strategies, call.strategy(S(dim), self=S(dim))]
    if last <= first:
        return strategies
    (strategy,) = partial_by_padding(call, {"self": dim})
    strategies += _sliced_in_blocks(call, dim, (first, last, step))
    if step != 1:
        return [*strategies, strategy]
    return [*strategies, strategy.by(partial(_lower_partial_slice, dim, shape[dim], first, last))]


def _sliced_in_blocks(call: Call, dim: int, bounds: tuple[int, int, int]) -> list[Strategy]:
    """Return the strategy of a slice along a sharded dim to a sharded result.

    Each rank slices its own block, then ranks exchange rows.

    Args:
        bounds: (first, last, step) of the slice.
    """
    first, last, step = bounds
    size, count, ranks = call.shape("self")[dim], len(range(first, last, step)), call.axis_size
    if count < 2:
        return []
    slice_ranges = [
        [-(-(max(at, first) - first) // step) for at in block] for block in call.bounds(size)
    ]
    owned_rows = tuple([((min(low, count), min(high, count)),) for low, high in slice_ranges])
    exchange = RowExchange(dim, owned_rows, blocks(count, ranks))
    if exchange.sent and call.result().nbytes <= _SMALL:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,), offset = operands, build.rank_offset(size)
        ((start, stop),) = owned_rows[build.index]
        local_first = first + start * step - offset
        local_last = local_first + (stop - start - 1) * step + 1 if stop > start else local_first
        rows = build.op("aten.slice.Tensor", value, dim, local_first, local_last, step)
        return (build.rows(rows, exchange),)

    return [call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(exchange, call.result()))]


def _lower_partial_slice(
    dim: int, size: int, first: int, last: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Slice to a partial result: the local share, padded with zeros."""
    (value,) = operands
    first_owned, last_owned = local_range(build, size, first, last)
    ends = [max(row - build.rank_offset(size), 0) for row in (first_owned, last_owned)]
    local_slice = build.op("aten.slice.Tensor", value, dim, *ends)
    return (pad(build, local_slice, dim, first_owned - first, last - last_owned),)


def _select(call: Call) -> Sequence[Strategy]:
    """Return the strategies of select, also with a run-time index."""
    shape, dim = call.shape("self"), call.dim()
    strategies = _unaffected(call, dim, removed=True)
    index = call["index"]
    if type(index) is Param:
        return strategies + _run_time_start(call, dim, "index")
    lower = partial(_lower_select, dim, shape[dim], index % shape[dim])
    return strategies + [strategy.by(lower) for strategy in partial_by_padding(call, {"self": dim})]


def _narrow(call: Call) -> Sequence[Strategy]:
    """Return the strategies of narrow with a run-time start."""
    dim = call.dim()
    return [*_unaffected(call, dim, removed=False), *_run_time_start(call, dim, "start")]


def _run_time_start(call: Call, dim: int, name: str) -> list[Strategy]:
    """Return the strategy of a piece along a sharded ``dim`` with a run-time start.

    Each rank selects the rows of the piece in its block, with zeros for the other rows. The result
    is partial.

    Args:
        name: name of the argument with the start.
    """
    result, size = call.result(), call.shape("self")[dim]
    removed = len(result.shape) < call.rank
    length = 1 if removed else result.shape[dim]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        shape = build.shape(value)
        piece_shape = (*shape[:dim], length, *shape[dim + 1 :])
        if not shape[dim]:
            selected = build.full(piece_shape, 0, like=value)
        else:
            first = build.bind(node, operands)[name]
            local_rows = build.op("aten.arange.default", length, dtype=torch.int64, device=DEVICE)
            local_rows = build.op("aten.add.Tensor", local_rows, first)
            local_rows = build.op("aten.sub.Tensor", local_rows, build.rank_offset(size))
            clamped = build.op("aten.clamp.default", local_rows, 0, shape[dim] - 1)
            rows = build.op("aten.index_select.default", value, dim, clamped)
            is_owned = build.op("aten.eq.Tensor", local_rows, clamped)
            mask_shape = tuple([length if d == dim else 1 for d in range(len(shape))])
            selected = build.op(
                "aten.where.self",
                build.op("aten.view.default", is_owned, mask_shape),
                rows,
                build.full(piece_shape, 0, like=value),
            )
        return (build.op("aten.squeeze.dim", selected, dim) if removed else selected,)

    return [strategy.by(lower) for strategy in partial_by_padding(call, {"self": dim})]


def _lower_select(
    dim: int, size: int, index: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Select at ``index``: zeros on all ranks but the owner's."""
    (value,) = operands
    start, stop = build.bounds(size)
    if start <= index < stop:
        return (build.op("aten.select.int", value, dim, index - start),)
    shape = build.shape(value)
    return (build.full((*shape[:dim], *shape[dim + 1 :]), 0, like=value),)


def _padding_backward(call: Call, removed: bool) -> Sequence[Strategy]:
    """Return the strategies of select_backward or slice_backward, which pad a gradient with zeros.

    Args:
        removed: whether the gradient lacks the dim (select_backward).
    """
    shape = tuple(call["input_sizes"])
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), grad_output=S(d - (removed and d > dim))).by(
            sized(shape, "input_sizes")
        )
        for d in shardable_dims(shape)
        if d != dim
    ]
    if shape[dim] > 1:
        strategies.append(call.strategy(S(dim)).by(partial(_lower_sharded_result, dim)))
    if not removed and call["step"] == 1 and type(call["start"]) is int:
        strategies += _slice_backward_in_blocks(call, dim, shape[dim])
    return [*strategies, call.strategy(P, grad_output=P)]


def _lower_sharded_result(dim: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Compute the full result, and return this rank's block."""
    (full_result,) = build.rerun(node, operands)
    assert full_result is not None
    return (build.shard(full_result, dim),)


def _slice_backward_in_blocks(call: Call, dim: int, size: int) -> list[Strategy]:
    """Return the strategy of slice_backward with sharded gradient and result, by a row exchange.

    Args:
        size: size of ``dim`` in the result.
    """
    shape = call.shape("grad_output")
    if min(size, shape[dim]) < 2:
        return []
    slice_start, _, _ = slice(call["start"], None).indices(size)
    bounds = call.bounds(size)
    bounds = [(start - slice_start, stop - slice_start) for start, stop in bounds]
    wanted_rows = [clamped_range(start, stop, shape[dim]) for start, stop in bounds]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (start, stop), (first, last) = bounds[build.index], wanted_rows[build.index]
        return (pad(build, operands[0], dim, first - start, stop - last),)

    return exchanged_strategies(call, dim, [(rows,) for rows in wanted_rows], lower, "grad_output")


def exchanged_strategies(
    call: Call, dim: int, wanted_rows: Sequence[Ranges], local_program: Lowering, name: str = "self"
) -> list[Strategy]:
    """Return the strategy of an op along a sharded dim that exchanges rows first.

    Args:
        wanted_rows: rows of the operand that each rank needs for its block of the result.
        local_program: program on those rows.
        name: name of the operand.
    """
    meta = call.meta(name)
    exchange = RowExchange(dim, blocks(meta.shape[dim], call.axis_size), tuple(wanted_rows))
    if not exchange.has_few_pieces:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return local_program(build, node, [build.rows(operands[0], exchange)])

    return [call.strategy(S(dim), **{name: S(dim)}).by(lower, exchange_comm(exchange, meta))]


def clamped_range(start: int, stop: int, size: int) -> tuple[int, int]:
    """Intersect ``[start, stop)`` with a dim of ``size``; (stop, stop) if they are disjoint."""
    first, last = max(start, 0), min(stop, size)
    return (first, last) if first < last else (stop, stop)


# -- packed tensors: strided (interleaved) placements ----------------------------------------------
# If each rank concatenates its blocks of several sharded tensors, the result has a ``StridedShard``
# placement, and nothing is sent. Splitting such a result at the borders of its groups returns the
# sharded tensors, again without communication. Splitting a plainly sharded tensor, such as a packed
# projection of queries, keys and values, exchanges blocks of the tensor for blocks of each piece.

#: Limit on the groups of a strided placement.
_MAX_GROUPS = 1024
CAT = "aten.cat.default"
_SLICES = frozenset({"aten.slice.Tensor", "aten.slice_copy.Tensor"})
#: Ops that combine the two halves of a dim.
HALVES = frozenset({"aten.glu.default", "aten.glu_backward.default"})
#: Ops that pad the gradient of a slice to the full size.
PUTS_AMONG = frozenset({"aten.slice_backward.default"})
#: Ops that split packed tensors.
TAKES_APART = _SLICES | {
    f"aten.{name}"
    for name in ("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor",
                 "unsafe_split_with_sizes.default", "split_copy.Tensor",
                 "split_with_sizes_copy.default")
}  # fmt: skip


def cat_strategies(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a cat of sharded tensors: the result is a StridedShard."""
    sizes = [meta.shape[dim] for meta in call.operands]
    if len(sizes) < 2 or min(sizes) < 2:
        return []
    return [call.strategy(side_by_side(dim, sizes), tensors=S(dim))]


def joined_as(call: Call, reached: Sequence[Sequence[StridedShard]]) -> Strategy | None:
    """Return the strategy of a cat of tensors with strided placements along its dim.

    The groups of the result are the groups of all tensors in order.

    Args:
        reached: the strided placements that each tensor can have.
    """
    result, dim = call.result(), call.dim("dim", len(call.result().shape))
    tensor_placements: list[Placement] = []
    sizes: list[int] = []
    for value, placements in zip(call.node.refs(), reached, strict=True):
        meta = call.metas[value]
        if meta is None or len(meta.shape) != len(result.shape) or meta.dtype != result.dtype:
            return None
        along_dim = (strided for strided in placements if strided.dim == dim and strided.inner == 1)
        placement = next(along_dim, S(dim))
        tensor_placements.append(placement)
        sizes += group_sizes(placement, meta.shape[dim])
    are_plain = all(isinstance(placement, Shard) for placement in tensor_placements)
    if are_plain or len(sizes) > _MAX_GROUPS:
        return None
    return call.strategy(side_by_side(dim, sizes), tensors=tensor_placements)


def split_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a split that exchanges blocks of the tensor for blocks of pieces."""
    meta = call.meta("self")
    sizes = tuple([piece.shape[dim] for piece in call.node.results if piece is not None])
    old_blocks = blocks(meta.shape[dim], call.axis_size)
    exchange = RowExchange(dim, old_blocks, blocks_of_each(sizes, call.axis_size))
    if min(sizes, default=0) < 2 or not exchange.has_few_pieces:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows, start, pieces = build.rows(operands[0], exchange), 0, []
        for size in sizes:
            block = build.block(size)
            pieces.append(build.op("aten.slice.Tensor", rows, dim, start, start + block))
            start += block
        return pieces

    return [call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(exchange, meta))]


def cut_dim(call: Call) -> int:
    """Return the dim along which an op splits or slices."""
    return call.dim()


def taken_apart(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of a split or slice of a strided dim at the borders of its groups.

    None if a border of a piece is not a border of a group. Pieces need no communication.
    """
    dim = call.dim()
    if placement.dim != dim or placement.inner != 1:
        return None
    sizes = group_sizes(placement, call.shape("self")[dim])
    pieces = [_group_range(sizes, *piece) for piece in pairwise(borders(call, dim))]
    if not pieces or any(start >= stop for start, stop in pieces):
        return None
    outputs = [side_by_side(dim, sizes[start:stop]) for start, stop in pieces]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        local_starts = _starts(map(build.block, sizes))
        return [
            build.op("aten.slice.Tensor", operands[0], dim, local_starts[start], local_starts[stop])
            for start, stop in pieces
        ]

    return call.strategy(outputs, self=placement).by(lower)


def halves(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of an op of ``HALVES`` with both halves sharded (StridedShard, 2)."""
    dim = call.dim()
    if placement != StridedShard(dim, 2):
        return None
    if call.has("grad_output"):
        return call.strategy(placement, grad_output=S(dim), self=placement)
    return call.strategy(S(dim), self=placement)


def put_among(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of slice_backward into a strided placement of the result.

    None if the slice does not begin and end at borders of groups.
    """
    shape = tuple(call["input_sizes"])
    dim = call.dim("dim", len(shape))
    if placement.dim != dim or placement.inner != 1 or call["step"] != 1:
        return None
    if not type(call["start"]) is type(call["end"]) is int:
        return None
    sizes = group_sizes(placement, shape[dim])
    start, stop = _group_range(sizes, *slice(call["start"], call["end"]).indices(shape[dim])[:2])
    if start >= stop:
        return None

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        local_starts = _starts(map(build.block, sizes))
        before, after = local_starts[start], local_starts[-1] - local_starts[stop]
        return (pad(build, operands[0], dim, before, after),)

    gradient_placement = side_by_side(dim, sizes[start:stop])
    return call.strategy(placement, grad_output=gradient_placement).by(lower)


def borders(call: Call, dim: int) -> list[int]:
    """Return the starts of the pieces of a split or slice, and the end of the last piece.

    Empty for a slice with steps, which has no contiguous piece.
    """
    if call.node.op in HALVES:
        size = call.shape("self")[dim]
        return [0, size // 2, size]
    if call.node.op not in _SLICES:
        return _starts([meta.shape[dim] for meta in call.node.results if meta is not None])
    size = call.shape("self")[dim]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    return [start, max(start, stop)] if step == 1 else []


def _group_range(sizes: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the range of the groups that cover elements ``start`` to ``stop``.

    (0, 0) if ``start`` or ``stop`` is not a border of a group.
    """
    starts = _starts(sizes)
    are_borders = start in starts and stop in starts
    return (starts.index(start), starts.index(stop)) if are_borders else (0, 0)


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return the starts of consecutive groups, and the end of the last (exclusive prefix sums)."""
    return [*accumulate(sizes, initial=0)]


_SPLITS = (
    "split.Tensor split_with_sizes.default unsafe_split.Tensor unsafe_split_with_sizes.default "
    "split_copy.Tensor split_with_sizes_copy.default"
)

RULES: dict[str, Rule] = {
    **table("cat.default", _cat),
    **table("stack.default", _stack),
    **table(f"{_SPLITS} unbind.int unbind_copy.int", _split),
    **table("slice.Tensor slice_copy.Tensor", _slice),
    **table("select.int select_copy.int", _select),
    **table("narrow.default", _narrow),
    **table("select_backward.default", partial(_padding_backward, removed=True)),
    **table("slice_backward.default", partial(_padding_backward, removed=False)),
}
