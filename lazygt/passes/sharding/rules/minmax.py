"""Largest and smallest elements, their places, and samples that are drawn by them.

Along a dim in blocks ranks gather their own best, each with its place: pairs travel in one
collective, and all other elements stay in their blocks. Blocks stand in order, so the first of
equal elements stays the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.rules.reductions import identity, other_dims, passing_strategies
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    Lowering,
    Metas,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: Numbers that four bytes have, beside four for a place.
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_NARROW = _FLOATS | {torch.int32, torch.int16, torch.int8, torch.uint8}


def _gathered(build: Builder, best: Ref, places: Ref, dim: int, size: int) -> tuple[Ref, Ref]:
    """Gather equally many elements of each rank, and their places in a dim of ``size``."""
    dtype, count = build.meta(best).dtype, build.shape(best)[dim] * build.parts
    if not _is_narrow(dtype, size):
        return build.all_gather(best, dim, count), build.all_gather(places, dim, count)
    pair = (_as_bits(build, best), build.op("aten._to_copy.default", places, dtype=torch.int32))
    pairs = build.op("aten.stack.default", pair, len(build.shape(best)))
    pairs = build.all_gather(pairs, dim, count)
    best, places = (build.op("aten.select.int", pairs, -1, which) for which in range(2))
    return (
        _of_bits(build, best, dtype),
        build.op("aten._to_copy.default", places, dtype=torch.int64),
    )


def _is_narrow(dtype: torch.dtype, size: int) -> bool:
    """Return whether four bytes have each number, and each place in a dim of ``size``."""
    return dtype in _NARROW and size <= torch.iinfo(torch.int32).max


def _as_bits(build: Builder, value: Ref) -> Ref:
    """Return narrow numbers as int32: whole ones as they are, others by their float32's bits."""
    if build.meta(value).dtype not in _FLOATS:
        whole: Ref = build.op("aten._to_copy.default", value, dtype=torch.int32)
        return whole
    wide = build.op("aten._to_copy.default", value, dtype=torch.float32)
    bits: Ref = build.op("aten.view.dtype", wide, torch.int32)
    return bits


def _of_bits(build: Builder, bits: Ref, dtype: torch.dtype) -> Ref:
    """Return the numbers of ``_as_bits``."""
    if dtype in _FLOATS:
        bits = build.op("aten.view.dtype", build.contiguous(bits), torch.float32)
    value: Ref = build.op("aten._to_copy.default", bits, dtype=dtype)
    return value


def _comm(count: int, dtype: torch.dtype, parts: int, size: int) -> list[Collective]:
    """Return the collectives of `_gathered` for so many elements a rank."""
    sizes = [8] if _is_narrow(dtype, size) else [dtype.itemsize, 8]
    return [Collective("all_gather", count * size * parts) for size in sizes]


def _topk(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of topk: along its dim, each rank gathers its k best.

    Every block must have k elements.
    """
    call = Call(node, metas, parts)
    dim, strategies = other_dims(call)
    shape, k = call.shape("self"), call["k"]
    size = shape[dim] if shape else 0
    if k < 1 or size < 2 or block_size(size, parts, parts - 1) < k:
        return strategies

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        best, places = build.rerun(node, operands)
        assert best is not None
        assert places is not None
        places = build.op("aten.add.Scalar", places, build.rank_offset(size))
        best, places = _gathered(build, best, places, dim, size)
        values, which = build.rerun(node, [best])
        return values, build.op("aten.gather.default", places, dim, which)

    comm = _comm(call.result().numel, call.result().dtype, parts, size)
    return [*strategies, call.strategy(R, self=S(dim)).by(lower, comm)]


def _place(op: str, both: bool) -> Rule:
    """Return the rule of argmax and max.dim: gather each block's extremes and their places."""

    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        rank = len(call.shape("self"))
        if call["dim"] is None or rank == 0:
            return ()
        dim, keeps, shape = call.dim("dim", rank), call["keepdim"], call.shape("self")
        passing = passing_strategies(call, frozenset({dim}))
        if shape[dim] < 2:
            return passing

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            (value,) = operands
            best, place = _first_of_all(build, value, op, dim, shape[dim])
            results = [best, place] if both else [place]
            return results if keeps else [build.op("aten.squeeze.dim", m, dim) for m in results]

        comm = _comm(call.result().numel, call.meta("self").dtype, parts, shape[dim])
        return [*passing, call.strategy(R, self=S(dim)).by(lower, comm)]

    return strategies


def _first_of_all(build: Builder, value: Ref, op: str, dim: int, size: int) -> tuple[Ref, Ref]:
    """Return the extreme of all blocks along ``dim`` (kept), and its global place."""
    top, place = _first_extremes(build, value, op, dim, size)
    tops, places = _gathered(build, top, place, dim, size)
    best, which = build.op(f"aten.{op}.dim", tops, dim, True)
    return best, build.op("aten.gather.default", places, dim, which)


def _first_extremes(build: Builder, value: Ref, op: str, dim: int, size: int) -> tuple[Ref, Ref]:
    """Return a block's extreme along ``dim`` (kept), and its global place."""
    meta = build.meta(value)
    if meta.numel:
        top, place = build.op(f"aten.{op}.dim", value, dim, True)
        return top, build.op("aten.add.Scalar", place, build.rank_offset(size))
    shape = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    top = build.full(shape, identity(meta.dtype, op), like=value)
    return top, build.op("aten.zeros_like.default", top, dtype=torch.int64)


def _multinomial(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of one sample of each row, as torch samples.

    The sample is the largest ratio of a probability to a number drawn for it. All ranks draw for
    all elements; the probabilities stay where they are.
    """
    call = Call(node, metas, parts)
    meta = call.meta("self")
    dim = len(meta.shape) - 1
    if call["num_samples"] != 1 or call["generator"] is not None:
        return ()

    strategies = []
    for cut in shardable_dims(meta.shape):
        strategy = call.strategy(R if cut == dim else S(cut), self=S(cut))
        comm = _comm(call.result().numel, meta.dtype, parts, meta.shape[dim]) if cut == dim else []
        strategies.append(strategy.by(_sampled(meta, cut), comm))
    return strategies


def _sampled(meta: TensorMeta, cut: int) -> Lowering:
    """Return a lowering to a sample of each row, in blocks along ``cut``.

    Rows, or the elements of each, are in blocks.
    """
    dim = len(meta.shape) - 1

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        drawn = build.op("aten.empty_strided.default", meta.shape, meta.stride, dtype=meta.dtype,
                         device=DEVICE)  # fmt: skip
        drawn = build.op("aten.exponential_.default", drawn)
        own_part = build.shard(drawn, cut)
        _check(build, value)
        ratios = build.op("aten.div.Tensor", value, own_part)
        if cut == dim:
            best, place = _first_of_all(build, ratios, "max", dim, meta.shape[dim])
        else:
            best, place = build.op("aten.max.dim", ratios, dim, True)
        some = build.op("aten.all.default", build.op("aten.gt.Scalar", best, 0))
        build.op("aten._assert_async.msg", some, _NOTHING)
        return (place,)

    return lower


_WRONG = "probability tensor contains either `inf`, `nan` or element < 0"
_NOTHING = "invalid multinomial distribution (sum of probabilities <= 0)"


def _check(build: Builder, probabilities: Ref) -> None:
    """Raise at run time for the probabilities that torch refuses."""
    if not build.meta(probabilities).numel:
        return
    largest = build.op("aten.max.default", probabilities)
    smallest = build.op("aten.min.default", probabilities)
    finite = build.op("aten.lt.Scalar", largest, float("inf"))
    positive = build.op("aten.ge.Scalar", smallest, 0)
    build.op("aten._assert_async.msg",
             build.op("aten.logical_and.default", finite, positive), _WRONG)  # fmt: skip


RULES: dict[str, Rule] = {
    **table("topk.default", _topk),
    **table("argmax.default", _place("max", both=False)),
    **table("argmin.default", _place("min", both=False)),
    **table("max.dim", _place("max", both=True)),
    **table("min.dim", _place("min", both=True)),
    **table("multinomial.default", _multinomial),
}
