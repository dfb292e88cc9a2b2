"""Extrema with their indices (topk, argmax, max.dim), and sampling by argmax (multinomial).

Along a sharded dim each rank finds the extrema of its block, and ranks all-gather pairs of (value,
global index) in one collective. Blocks are gathered in order, so among equal elements the first one
is found, as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.reductions import identity, other_dims, passing_strategies
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    Lowering,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
)

#: Dtypes that fit into 4 bytes, packed with a 4-byte index.
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_NARROW = _FLOATS | {torch.int32, torch.int16, torch.int8, torch.uint8}


def _gather_pairs(build: Builder, best: Ref, indices: Ref, dim: int, size: int) -> tuple[Ref, Ref]:
    """All-gather the candidates of each rank with their indices.

    Args:
        best: candidates, the same number on each rank along ``dim``.
        indices: their global indices in a dim of ``size``.
    """
    dtype, count = build.meta(best).dtype, build.shape(best)[dim] * build.parts
    if not _is_narrow(dtype, size):
        return build.all_gather(best, dim, count), build.all_gather(indices, dim, count)
    pair = (_as_bits(build, best), build.op("aten._to_copy.default", indices, dtype=torch.int32))
    pairs = build.op("aten.stack.default", pair, len(build.shape(best)))
    pairs = build.all_gather(pairs, dim, count)
    best, indices = (build.op("aten.select.int", pairs, -1, number) for number in range(2))
    return (
        _from_bits(build, best, dtype),
        build.op("aten._to_copy.default", indices, dtype=torch.int64),
    )


def _is_narrow(dtype: torch.dtype, size: int) -> bool:
    """Return whether values of ``dtype`` and indices below ``size`` each fit into 4 bytes."""
    return dtype in _NARROW and size <= torch.iinfo(torch.int32).max


def _as_bits(build: Builder, value: Ref) -> Ref:
    """Encode narrow numbers as int32: integers by value, floats by their float32 bits."""
    if build.meta(value).dtype not in _FLOATS:
        integers: Ref = build.op("aten._to_copy.default", value, dtype=torch.int32)
        return integers
    float32 = build.op("aten._to_copy.default", value, dtype=torch.float32)
    bits: Ref = build.op("aten.view.dtype", float32, torch.int32)
    return bits


def _from_bits(build: Builder, bits: Ref, dtype: torch.dtype) -> Ref:
    """Decode the int32 numbers of ``_as_bits``."""
    if dtype in _FLOATS:
        bits = build.op("aten.view.dtype", build.contiguous(bits), torch.float32)
    value: Ref = build.op("aten._to_copy.default", bits, dtype=dtype)
    return value


def _gather_comm(count: int, dtype: torch.dtype, axis_size: int, size: int) -> list[Collective]:
    """Return the collectives of ``_gather_pairs`` for ``count`` candidates per rank."""
    sizes = [8] if _is_narrow(dtype, size) else [dtype.itemsize, 8]
    return [Collective("all_gather", count * size * axis_size) for size in sizes]


def _topk(call: Call) -> Sequence[Strategy]:
    """Return the strategies of topk: along its dim, ranks gather the k best of each block.

    Every block must have at least k elements.
    """
    dim, strategies = other_dims(call)
    shape, k = call.shape("self"), call["k"]
    size = shape[dim] if shape else 0
    if k < 1 or size < 2 or block_size(size, call.axis_size, call.axis_size - 1) < k:
        return strategies

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        best, indices = build.rerun(node, operands)
        assert best is not None
        assert indices is not None
        indices = build.op("aten.add.Scalar", indices, build.rank_offset(size))
        best, indices = _gather_pairs(build, best, indices, dim, size)
        values, selected = build.rerun(node, [best])
        return values, build.op("aten.gather.default", indices, dim, selected)

    comm = _gather_comm(call.result().numel, call.result().dtype, call.axis_size, size)
    return [*strategies, call.strategy(R, self=S(dim)).by(lower, comm)]


def _arg_extremum(op: str, both: bool) -> Rule:
    """Return the rule of argmax, argmin, max.dim or min.dim.

    Args:
        op: ``max`` or ``min``.
        both: whether the op returns values and indices; else indices.
    """

    def strategies(call: Call) -> Sequence[Strategy]:
        rank = call.rank
        if call["dim"] is None or rank == 0:
            return ()
        dim, keepdim, shape = call.dim("dim", rank), call["keepdim"], call.shape("self")
        strategies_of_other_dims = passing_strategies(call, frozenset({dim}))
        if shape[dim] < 2:
            return strategies_of_other_dims

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            (value,) = operands
            best, index = _extremum_over_ranks(build, value, op, dim, shape[dim])
            results = [best, index] if both else [index]
            return results if keepdim else [build.op("aten.squeeze.dim", m, dim) for m in results]

        comm = _gather_comm(
            call.result().numel, call.meta("self").dtype, call.axis_size, shape[dim]
        )
        return [*strategies_of_other_dims, call.strategy(R, self=S(dim)).by(lower, comm)]

    return strategies


def _extremum_over_ranks(
    build: Builder, value: Ref, op: str, dim: int, size: int
) -> tuple[Ref, Ref]:
    """Return the extremum over all ranks along ``dim`` (kept as size 1), and its global index."""
    block_best, block_index = _block_extremum(build, value, op, dim, size)
    candidates, indices = _gather_pairs(build, block_best, block_index, dim, size)
    best, winner = build.op(f"aten.{op}.dim", candidates, dim, True)
    return best, build.op("aten.gather.default", indices, dim, winner)


def _block_extremum(build: Builder, value: Ref, op: str, dim: int, size: int) -> tuple[Ref, Ref]:
    """Return a block's extremum along ``dim`` (kept as size 1), and its global index."""
    meta = build.meta(value)
    if meta.numel:
        extremum, index = build.op(f"aten.{op}.dim", value, dim, True)
        return extremum, build.op("aten.add.Scalar", index, build.rank_offset(size))
    shape = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    extremum = build.full(shape, identity(meta.dtype, op), like=value)
    return extremum, build.op("aten.zeros_like.default", extremum, dtype=torch.int64)


def _multinomial(call: Call) -> Sequence[Strategy]:
    """Return the strategies of multinomial with one sample per row (exponential trick).

    The sample is the argmax of probability / exponential random number, as in torch. All ranks draw
    the numbers of all elements; the probabilities stay sharded.
    """
    meta = call.meta("self")
    dim = len(meta.shape) - 1
    if call["num_samples"] != 1 or call["generator"] is not None:
        return ()

    strategies = []
    for sharded_dim in shardable_dims(meta.shape):
        strategy = call.strategy(R if sharded_dim == dim else S(sharded_dim), self=S(sharded_dim))
        comm = (
            _gather_comm(call.result().numel, meta.dtype, call.axis_size, meta.shape[dim])
            if sharded_dim == dim
            else []
        )
        strategies.append(strategy.by(_lower_multinomial(meta, sharded_dim), comm))
    return strategies


def _lower_multinomial(meta: TensorMeta, sharded_dim: int) -> Lowering:
    """Return the lowering to one sample per row of a value sharded along ``sharded_dim``."""
    dim = len(meta.shape) - 1

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (value,) = operands
        memory = build.op("aten.empty_strided.default", meta.shape, meta.stride, dtype=meta.dtype,
                          device=DEVICE)  # fmt: skip
        exponentials = build.op("aten.exponential_.default", memory)
        local_exponentials = build.shard(exponentials, sharded_dim)
        _assert_probabilities(build, value)
        ratios = build.op("aten.div.Tensor", value, local_exponentials)
        if sharded_dim == dim:
            best, index = _extremum_over_ranks(build, ratios, "max", dim, meta.shape[dim])
        else:
            best, index = build.op("aten.max.dim", ratios, dim, True)
        has_positive = build.op("aten.all.default", build.op("aten.gt.Scalar", best, 0))
        build.op("aten._assert_async.msg", has_positive, _ALL_ZERO)
        return (index,)

    return lower


_INVALID = "probability tensor contains either `inf`, `nan` or element < 0"
_ALL_ZERO = "invalid multinomial distribution (sum of probabilities <= 0)"


def _assert_probabilities(build: Builder, probabilities: Ref) -> None:
    """Add asserts that raise at run time for probabilities that torch rejects."""
    if not build.meta(probabilities).numel:
        return
    largest = build.op("aten.max.default", probabilities)
    smallest = build.op("aten.min.default", probabilities)
    finite = build.op("aten.lt.Scalar", largest, float("inf"))
    positive = build.op("aten.ge.Scalar", smallest, 0)
    build.op("aten._assert_async.msg",
             build.op("aten.logical_and.default", finite, positive), _INVALID)  # fmt: skip


RULES: dict[str, Rule] = {
    **table("topk.default", _topk),
    **table("argmax.default", _arg_extremum("max", both=False)),
    **table("argmin.default", _arg_extremum("min", both=False)),
    **table("max.dim", _arg_extremum("max", both=True)),
    **table("min.dim", _arg_extremum("min", both=True)),
    **table("multinomial.default", _multinomial),
}
