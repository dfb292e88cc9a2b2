"""Packed tensors: cat and split along a sharded dim, with strided (interleaved) placements.

If each rank concatenates its blocks of several sharded tensors, the result has a ``StridedShard``
placement, and nothing is sent. Splitting such a result at the borders of its groups returns the
sharded tensors, again without communication. Splitting a plainly sharded tensor, such as a packed
projection of queries, keys and values, exchanges blocks of the tensor for blocks of each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement, Shard, StridedShard, group_sizes, side_by_side
from lazygt.passes.sharding.lower.halo import RowExchange, blocks, blocks_of_each
from lazygt.passes.sharding.rules.strategy import Call, S, Strategy, Values, exchange_comm

if TYPE_CHECKING:
    from lazygt.passes.sharding.lower.builder import Builder

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
        along_dim = [
            candidate for candidate in placements if candidate.dim == dim and candidate.inner == 1
        ]
        placement = along_dim[0] if along_dim else S(dim)
        tensor_placements.append(placement)
        sizes += group_sizes(placement, meta.shape[dim])
    if (
        all(isinstance(placement, Shard) for placement in tensor_placements)
        or len(sizes) > _MAX_GROUPS
    ):
        return None
    return call.strategy(side_by_side(dim, sizes), tensors=tensor_placements)


def split_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a split that exchanges blocks of the tensor for blocks of pieces."""
    meta = call.meta("self")
    sizes = tuple([piece.shape[dim] for piece in call.node.results if piece is not None])
    old_blocks = blocks(meta.shape[dim], call.axis_size)
    exchange = RowExchange(dim, old_blocks, blocks_of_each(sizes, call.axis_size))
    if min(sizes, default=0) < 2 or not exchange.is_worth_it:
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
    return call.dim("dim", len(call.shape("self")))


def taken_apart(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of a split or slice of a strided dim at the borders of its groups.

    None if a border of a piece is not a border of a group. Pieces need no communication.
    """
    dim = call.dim("dim", len(call.shape("self")))
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
    dim = call.dim("dim", len(call.shape("self")))
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
        trailing_pads = [0, 0] * (len(shape) - 1 - dim)
        padding = (*trailing_pads, local_starts[start], local_starts[-1] - local_starts[stop])
        return (build.op("aten.constant_pad_nd.default", operands[0], padding, 0),)

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
    return (
        (starts.index(start), starts.index(stop)) if start in starts and stop in starts else (0, 0)
    )


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return the starts of consecutive groups, and the end of the last (exclusive prefix sums)."""
    return [*accumulate(sizes, initial=0)]
