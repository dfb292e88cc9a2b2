"""Tensors side by side along a dim that is in blocks: joined, and taken apart again.

Of tensors in blocks each rank has a block of every one of them: their cat is interleaved, and
nothing is sent. The blocks of a whole, such as the product with a weight of queries, keys and
values, are exchanged for those of each of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement, Shard, StridedShard, group_sizes, side_by_side
from lazygt.passes.sharding.halo import RowExchange, blocks, blocks_of_each
from lazygt.passes.sharding.rules.strategy import Call, Metas, S, Strategy, Values, exchange_comm

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: More groups than these are not worth their placement.
_MOST_GROUPS = 1024
CAT = "aten.cat.default"
_SLICES = frozenset({"aten.slice.Tensor", "aten.slice_copy.Tensor"})
#: Ops of two halves of a dim.
HALVES = frozenset({"aten.glu.default", "aten.glu_backward.default"})
#: Ops that put a gradient where its piece was.
PUTS_AMONG = frozenset({"aten.slice_backward.default"})
#: Ops that may take tensors apart that are side by side.
TAKES_APART = _SLICES | {
    f"aten.{name}"
    for name in ("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor",
                 "unsafe_split_with_sizes.default", "split_copy.Tensor",
                 "split_with_sizes_copy.default")
}  # fmt: skip


def joined(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy for tensors in blocks: each rank has its block of each of them."""
    sizes = [meta.shape[dim] for n in call.node.refs() if (meta := call.metas[n]) is not None]
    if len(sizes) < 2 or min(sizes) < 2:
        return []
    return [call.strategy(side_by_side(dim, sizes), tensors=S(dim))]


def joined_as(call: Call, reached: Sequence[Sequence[StridedShard]]) -> Strategy | None:
    """Return the strategy of a cat with tensors that are interleaved along its dim.

    The result has the groups of them all.

    Args:
        reached: the interleaved placements that each tensor may have.
    """
    result, dim = call.result(), call.dim("dim", len(call.result().shape))
    cuts: list[Placement] = []
    sizes: list[int] = []
    for value, placements in zip(call.node.refs(), reached, strict=True):
        meta = call.metas[value]
        if meta is None or len(meta.shape) != len(result.shape) or meta.dtype != result.dtype:
            return None
        along = [one for one in placements if one.dim == dim and one.inner == 1]
        cut = along[0] if along else S(dim)
        cuts.append(cut)
        sizes += group_sizes(cut, meta.shape[dim])
    if all(isinstance(cut, Shard) for cut in cuts) or len(sizes) > _MOST_GROUPS:
        return None
    return call.strategy(side_by_side(dim, sizes), tensors=cuts)


def taken_apart_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy that exchanges blocks of the whole for those of each of its pieces."""
    meta = call.meta("self")
    sizes = tuple([each.shape[dim] for each in call.node.results if each is not None])
    have = blocks(meta.shape[dim], call.axis_size)
    move = RowExchange(dim, have, blocks_of_each(sizes, call.axis_size))
    if min(sizes, default=0) < 2 or not move.is_worth_it:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows, at, pieces = build.rows(operands[0], move), 0, []
        for size in sizes:
            block = build.block(size)
            pieces.append(build.op("aten.slice.Tensor", rows, dim, at, at + block))
            at += block
        return pieces

    return [call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(move, meta))]


def cut_dim(node: Node, metas: Metas, axis_size: int) -> int:
    """Return the dim along which an op cuts."""
    call = Call(node, metas, axis_size)
    return call.dim("dim", len(call.shape("self")))


def taken_apart(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of a cut along an interleaved dim, at the borders of its groups.

    Of three tensors side by side, each in blocks, a piece is as it was.
    """
    dim = call.dim("dim", len(call.shape("self")))
    if placement.dim != dim or placement.inner != 1:
        return None
    sizes = group_sizes(placement, call.shape("self")[dim])
    pieces = [_between(sizes, *piece) for piece in pairwise(borders(call, dim))]
    if not pieces or any(start >= stop for start, stop in pieces):
        return None
    outputs = [side_by_side(dim, sizes[start:stop]) for start, stop in pieces]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        at = _starts(map(build.block, sizes))
        return [
            build.op("aten.slice.Tensor", operands[0], dim, at[start], at[stop])
            for start, stop in pieces
        ]

    return call.strategy(outputs, self=placement).by(lower)


def halves(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of an op of two halves that are each in blocks."""
    dim = call.dim("dim", len(call.shape("self")))
    if placement != StridedShard(dim, 2):
        return None
    if call.has("grad_output"):
        return call.strategy(placement, grad_output=S(dim), self=placement)
    return call.strategy(S(dim), self=placement)


def put_among(call: Call, placement: StridedShard) -> Strategy | None:
    """Return the strategy of a gradient put among zeros, into groups that are each in blocks."""
    shape = tuple(call["input_sizes"])
    dim = call.dim("dim", len(shape))
    if placement.dim != dim or placement.inner != 1 or call["step"] != 1:
        return None
    if not type(call["start"]) is type(call["end"]) is int:
        return None
    sizes = group_sizes(placement, shape[dim])
    start, stop = _between(sizes, *slice(call["start"], call["end"]).indices(shape[dim])[:2])
    if start >= stop:
        return None

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        at = _starts(map(build.block, sizes))
        after = [0, 0] * (len(shape) - 1 - dim)
        padding = (*after, at[start], at[-1] - at[stop])
        return (build.op("aten.constant_pad_nd.default", operands[0], padding, 0),)

    pieces = side_by_side(dim, sizes[start:stop])
    return call.strategy(placement, grad_output=pieces).by(lower)


def borders(call: Call, dim: int) -> list[int]:
    """Return the starts of the pieces into which an op cuts, and the end of the last one.

    Empty: they are not of neighbours.
    """
    if call.node.op in HALVES:
        size = call.shape("self")[dim]
        return [0, size // 2, size]
    if call.node.op not in _SLICES:
        return _starts([meta.shape[dim] for meta in call.node.results if meta is not None])
    size = call.shape("self")[dim]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    return [start, max(start, stop)] if step == 1 else []


def _between(sizes: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the groups of these sizes from place ``start`` to ``stop``.

    Empty: no group begins there.
    """
    at = _starts(sizes)
    return (at.index(start), at.index(stop)) if start in at and stop in at else (0, 0)


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return the starts of groups of these sizes, and the end of the last one."""
    return [*accumulate(sizes, initial=0)]
