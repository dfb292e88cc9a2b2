"""Cutting and joining: cat, stack, split, slice, select, and their gradients.

Dims that are not cut pass through, as do partial sums. A piece of a split dim may lie on several
ranks; each places its part of it among zeros, and only the piece is reduced, or its rows are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import DEVICE, Node, Param, Ref
from lazygt.graph.placement import Placement, shard_bounds
from lazygt.passes.sharding.halo import Ranges, RowExchange, blocks, blocks_of_each
from lazygt.passes.sharding.rules import packed
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    P,
    Rule,
    S,
    Strategy,
    Values,
    exchange_comm,
    local_range,
    partial_by_padding,
    shardable_dims,
    table,
)
from lazygt.passes.sharding.rules.views import PARTIALS, sized

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


#: Bytes of a slice that are as well added up by all: to cut it is not worth a second launch later.
_SMALL = 1 << 10


def _cat(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    shape = call.result().shape
    dim = call.dim("dim", len(shape))
    ranks = [len(meta.shape) for n in node.refs() if (meta := metas[n]) is not None]
    # torch lets an empty 1-d tensor stand among tensors of any rank
    split = [d for d in shardable_dims(shape) if d != dim] if set(ranks) == {len(shape)} else []
    strategies = [call.strategy(S(d), tensors=S(d)) for d in split]
    if set(ranks) == {len(shape)} and partials(call, bools=True):
        strategies += _joined_in_blocks(call, dim)
        strategies += packed.joined(call, dim)
    return strategies + [
        call.strategy(placement, tensors=placement) for placement in partials(call)
    ]


def _joined_in_blocks(call: Call, dim: int) -> list[Strategy]:
    """Return the strategy of a cat from tensors in blocks to blocks of their whole."""
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    sizes = tuple([meta.shape[dim] for meta in metas])
    have = blocks_of_each(sizes, call.axis_size)
    move = RowExchange(dim, have, blocks(sum(sizes), call.axis_size))
    if sum(sizes) < 2 or not move.is_worth_it:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (rows,) = build.rerun(node, operands)
        assert rows is not None
        return (build.rows(rows, move),)

    return [call.strategy(S(dim), tensors=S(dim)).by(lower, exchange_comm(move, call.result()))]


def _stack(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    shape = call.result().shape
    dim = call.dim("dim", len(shape))
    strategies = [
        call.strategy(S(d), tensors=S(d - (d > dim))) for d in shardable_dims(shape) if d != dim
    ]
    return strategies + [
        call.strategy(placement, tensors=placement) for placement in partials(call)
    ]


def partials(call: Call, bools: bool = False) -> list[Placement]:
    """Return the partial placements that pass through.

    Sums must not be rounded to a narrower dtype, or be of bools.
    """
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    same = {meta.dtype for meta in metas} == {call.result().dtype}
    return list(PARTIALS) if same and (bools or call.result().dtype != torch.bool) else []


def _split(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a split into pieces along ``dim``.

    Several pieces together are as large as the whole; its blocks are exchanged for those of each of
    them.
    """
    call = Call(node, metas, axis_size)
    dim = call.dim("dim", len(call.shape("self")))
    strategies = _uncut(call, dim, gone=False)
    if len(node.results) == 1:
        return [*strategies, *partial_by_padding(call, {"self": dim})]
    return [*strategies, *packed.taken_apart_in_blocks(call, dim)]


def _unbind(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    dim = call.dim("dim", len(call.shape("self")))
    strategies = _uncut(call, dim, gone=True)
    if len(node.results) > 1:
        return strategies
    return [*strategies, *partial_by_padding(call, {"self": dim})]


def _uncut(call: Call, dim: int, gone: bool) -> list[Strategy]:
    """Return the strategies that split another dim than the one that is cut, or none."""
    split = [d for d in shardable_dims(call.shape("self")) if d != dim]
    strategies = [call.strategy(S(d - (gone and d > dim)), self=S(d)) for d in split]
    return strategies + [call.strategy(placement, self=placement) for placement in PARTIALS]


def _slice(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a slice; along its dim each rank's part of it is among zeros."""
    call = Call(node, metas, axis_size)
    shape, dim = call.shape("self"), call.dim("dim", len(call.shape("self")))
    strategies = _uncut(call, dim, gone=False)
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
    return [*strategies, strategy.by(_own_part(dim, shape[dim], first, last))]


def _sliced_in_blocks(call: Call, dim: int, where: tuple[int, int, int]) -> list[Strategy]:
    """Return the strategy of a slice in blocks, from the parts of it in each rank's block."""
    first, last, step = where
    size, count, ranks = call.shape("self")[dim], len(range(first, last, step)), call.axis_size
    if count < 2:
        return []
    have = tuple([
        tuple([(-(-(max(row, first) - first) // step)) for row in shard_bounds(size, ranks, rank)])
        for rank in range(ranks)
    ])  # fmt: skip
    held = tuple([((min(a, count), min(b, count)),) for a, b in have])
    move = RowExchange(dim, held, blocks(count, ranks))
    if move.sent and call.result().nbytes <= _SMALL:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,), offset = operands, build.rank_offset(size)
        ((start, stop),) = held[build.index]
        begin = first + start * step - offset
        end = begin + (stop - start - 1) * step + 1 if stop > start else begin
        rows = build.op("aten.slice.Tensor", value, dim, begin, end, step)
        return (build.rows(rows, move),)

    return [call.strategy(S(dim), self=S(dim)).by(lower, exchange_comm(move, call.result()))]


def _own_part(dim: int, size: int, first: int, last: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        (a, b), start = local_range(build, size, first, last), build.rank_offset(size)
        part = build.op("aten.slice.Tensor", value, dim, max(a - start, 0), max(b - start, 0))
        after = [0, 0] * (len(build.shape(value)) - 1 - dim)
        padding = (*after, a - first, last - b)
        return (build.op("aten.constant_pad_nd.default", part, padding, 0),)

    return lower


def _select(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    shape, dim = call.shape("self"), call.dim("dim", len(call.shape("self")))
    strategies = _uncut(call, dim, gone=True)
    index = call["index"]
    if type(index) is Param:
        return strategies + _anywhere(call, dim, "index")
    lower = _owned(dim, shape[dim], index % shape[dim])
    return strategies + [strategy.by(lower) for strategy in partial_by_padding(call, {"self": dim})]


def _narrow(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    dim = call.dim("dim", len(call.shape("self")))
    return [*_uncut(call, dim, gone=False), *_anywhere(call, dim, "start")]


def _anywhere(call: Call, dim: int, name: str) -> list[Strategy]:
    """Return the strategy of a piece along ``dim`` with a run-time start.

    The argument ``name`` says the start. Each rank picks its part of the piece, among zeros.
    """
    result, size = call.result(), call.shape("self")[dim]
    gone = len(result.shape) < len(call.shape("self"))
    length = 1 if gone else result.shape[dim]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        shape = build.shape(value)
        piece = (*shape[:dim], length, *shape[dim + 1 :])
        if not shape[dim]:
            picked = build.full(piece, 0, like=value)
        else:
            first = build.bind(node, operands)[name]
            at = build.op("aten.arange.default", length, dtype=torch.int64, device=DEVICE)
            at = build.op("aten.add.Tensor", at, first)
            at = build.op("aten.sub.Tensor", at, build.rank_offset(size))
            near = build.op("aten.clamp.default", at, 0, shape[dim] - 1)
            rows = build.op("aten.index_select.default", value, dim, near)
            ours = build.op("aten.eq.Tensor", at, near)
            along = tuple([length if d == dim else 1 for d in range(len(shape))])
            picked = build.op(
                "aten.where.self",
                build.op("aten.view.default", ours, along),
                rows,
                build.full(piece, 0, like=value),
            )
        return (build.op("aten.squeeze.dim", picked, dim) if gone else picked,)

    return [strategy.by(lower) for strategy in partial_by_padding(call, {"self": dim})]


def _owned(dim: int, size: int, at: int) -> Lowering:
    """Return a lowering to the element on the rank that has it; zeros on the others."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        start, stop = build.bounds(size)
        if start <= at < stop:
            return (build.op("aten.select.int", value, dim, at - start),)
        shape = build.shape(value)
        return (build.full((*shape[:dim], *shape[dim + 1 :]), 0, like=value),)

    return lower


def _placed(gone: bool) -> Rule:
    """Return the rule of select_backward and slice_backward.

    They put a gradient among zeros of ``input_sizes``.
    """

    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        shape = tuple(call["input_sizes"])
        dim = call.dim("dim", len(shape))
        strategies = [
            call.strategy(S(d), grad_output=S(d - (gone and d > dim))).by(
                sized(shape, "input_sizes")
            )
            for d in shardable_dims(shape)
            if d != dim
        ]
        if shape[dim] > 1:
            strategies.append(call.strategy(S(dim)).by(_placed_and_cut(dim)))
        if not gone and call["step"] == 1 and type(call["start"]) is int:
            strategies += _placed_in_blocks(call, dim, shape[dim])
        return [*strategies, call.strategy(P, grad_output=P)]

    return strategies


def _placed_and_cut(dim: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (whole,) = build.rerun(node, operands)
        assert whole is not None
        return (build.shard(whole, dim),)

    return lower


def _placed_in_blocks(call: Call, dim: int, size: int) -> list[Strategy]:
    """Return the strategy that sends rows of a gradient to their places, among zeros.

    The gradient and the result are in blocks.
    """
    shape = call.shape("grad_output")
    if min(size, shape[dim]) < 2:
        return []
    first_place, _, _ = slice(call["start"], None).indices(size)
    bounds = [shard_bounds(size, call.axis_size, rank) for rank in range(call.axis_size)]
    bounds = [(start - first_place, stop - first_place) for start, stop in bounds]
    want = [within(start, stop, shape[dim]) for start, stop in bounds]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (start, stop), (first, last) = bounds[build.index], want[build.index]
        padding = (*[0, 0] * (len(shape) - 1 - dim), first - start, stop - last)
        return (build.op("aten.constant_pad_nd.default", operands[0], padding, 0),)

    return moved(call, dim, [(rows,) for rows in want], lower, "grad_output")


def moved(
    call: Call, dim: int, want: Sequence[Ranges], locally: Lowering, name: str = "self"
) -> list[Strategy]:
    """Return the strategy of an op along a dim in blocks, with rows exchanged before it.

    Args:
        want: the rows of the operand that each rank makes its block of the result of.
        locally: the program on those rows.
    """
    meta = call.meta(name)
    move = RowExchange(dim, blocks(meta.shape[dim], call.axis_size), tuple(want))
    if not move.is_worth_it:
        return []

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return locally(build, node, [build.rows(operands[0], move)])

    return [call.strategy(S(dim), **{name: S(dim)}).by(lower, exchange_comm(move, meta))]


def within(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the rows from ``start`` to before ``stop`` of a dim of ``size``, or none at all."""
    first, last = max(start, 0), min(stop, size)
    return (first, last) if first < last else (stop, stop)


_SPLITS = (
    "split.Tensor split_with_sizes.default unsafe_split.Tensor unsafe_split_with_sizes.default "
    "split_copy.Tensor split_with_sizes_copy.default"
)

RULES: dict[str, Rule] = {
    **table("cat.default", _cat),
    **table("stack.default", _stack),
    **table(_SPLITS, _split),
    **table("unbind.int unbind_copy.int", _unbind),
    **table("slice.Tensor slice_copy.Tensor", _slice),
    **table("select.int select_copy.int", _select),
    **table("narrow.default", _narrow),
    **table("select_backward.default", _placed(gone=True)),
    **table("slice_backward.default", _placed(gone=False)),
}
