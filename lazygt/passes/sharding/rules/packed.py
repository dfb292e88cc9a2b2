"""Tensors side by side along a dim that is in blocks: joined, and taken apart again.

Of equal tensors in blocks each rank has a block of every one of them: their cat is interleaved, and
nobody sends anything. The blocks of a whole, such as the product with a weight of queries, keys and
values, are exchanged for those of each of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import StridedShard
from lazygt.passes.sharding.rows import RowExchange, blocks, blocks_of_each
from lazygt.passes.sharding.rules.base import Call, Metas, S, Strategy, Values, row_comm

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_SLICES = frozenset({"aten.slice.Tensor", "aten.slice_copy.Tensor"})
#: Ops that may take apart what is side by side.
TAKES_APART = _SLICES | {
    f"aten.{name}"
    for name in ("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor",
                 "unsafe_split_with_sizes.default", "split_copy.Tensor",
                 "split_with_sizes_copy.default")
}  # fmt: skip


def side_by_side(call: Call, dim: int) -> list[Strategy]:
    """Tensors of one size in blocks: each rank has its block of each of them."""
    sizes = [meta.shape[dim] for n in call.node.refs() if (meta := call.metas[n]) is not None]
    if len(sizes) < 2 or len(set(sizes)) > 1 or sizes[0] < 2:
        return []
    return [call.strategy(StridedShard(dim, len(sizes)), tensors=S(dim))]


def taken_apart_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Blocks of the whole to blocks of each of its pieces."""
    meta = call.meta("self")
    sizes = tuple([each.shape[dim] for each in call.node.results if each is not None])
    have = blocks(meta.shape[dim], call.parts)
    move = RowExchange(dim, have, blocks_of_each(sizes, call.parts))
    if min(sizes, default=0) < 2 or not move.is_worth_it:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        rows, at, pieces = build.rows(operands[0], move), 0, []
        for size in sizes:
            block = build.block(size)
            pieces.append(build.op("aten.slice.Tensor", rows, dim, at, at + block))
            at += block
        return pieces

    return [call.strategy(S(dim), self=S(dim)).by(lower, row_comm(move, meta))]


def cut_dim(node: Node, metas: Metas, parts: int) -> int:
    """The dim along which an op cuts."""
    call = Call(node, metas, parts)
    return call.dim("dim", len(call.shape("self")))


def taken_apart(call: Call, placement: StridedShard) -> Strategy | None:
    """The strategy of a cut along the dim that is interleaved: at the borders of its groups.

    Of three tensors side by side, each in blocks, a piece is as it was.
    """
    dim = call.dim("dim", len(call.shape("self")))
    if placement.dim != dim or placement.inner != 1:
        return None
    group = call.shape("self")[dim] // placement.outer
    pieces = [_groups_of(call, which, dim, group) for which in range(len(call.node.results))]
    outputs = [S(dim) if stop - start == 1 else StridedShard(dim, stop - start)
               for start, stop in pieces]  # fmt: skip
    if any(start >= stop for start, stop in pieces):
        return None

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        block = build.block(group)
        return [
            build.op("aten.slice.Tensor", operands[0], dim, start * block, stop * block)
            for start, stop in pieces
        ]

    return call.strategy(outputs, self=placement).by(lower)


def _groups_of(call: Call, which: int, dim: int, group: int) -> tuple[int, int]:
    """The groups that a piece is, from the first to before the last; empty: it is no such piece."""
    metas = [call.result(number) for number in range(which + 1)]
    start = sum(meta.shape[dim] for meta in metas[:-1])
    if call.node.op in _SLICES:
        size = call.shape("self")[dim]
        start, _, step = slice(call["start"], call["end"], call["step"]).indices(size)
        if step != 1:
            return 0, 0
    stop = start + metas[-1].shape[dim]
    return (0, 0) if start % group or stop % group else (start // group, stop // group)
