"""Reductions, norms, cumulative ops, variance and mean, extrema with their indices.

A dim that is not reduced is sharded in operand and result. A sharded reduced dim gives partial
results. Norms and cumulative ops have no partial placement; their strategies contain collectives of
the reduced size. An empty block gives the identity of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Partial, Placement, block_size
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.strategy import (
    PMAX,
    PMIN,
    PPROD,
    Call,
    Collective,
    LocalLowering,
    Lowering,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    local_lowering,
    passing,
    shardable_dims,
    table,
    without,
)


def passing_strategies(call: Call, dims: Collection[int]) -> list[Strategy]:
    """Return the strategies that shard a dim that is not reduced.

    Args:
        dims: the reduced dims.
    """
    return passing(call, without(call.rank, dims, removed=not call.args.get("keepdim")))


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """Return the identity element of a maximum or minimum: the smallest or largest number."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _strategies(
    call: Call,
    placement: Placement,
    lower: Lowering | LocalLowering | None = None,
    comm: Sequence[Collective] = (),
) -> list[Strategy]:
    """Return the strategies of a reduction, along reduced and along other dims.

    Args:
        placement: placement of the result if a reduced dim is sharded.
        lower: local program then; None: the op itself.
        comm: its collectives.
    """
    dims = call.dims()
    reduced = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
    sharded = [call.strategy(placement, self=S(dim)).by(lower, comm) for dim in reduced]
    return [*passing_strategies(call, dims), *sharded]


def _rule(
    placement: Partial, lowered: Callable[[Call], Lowering] | None = None, *, linear: bool = True
) -> Rule:
    """Return the rule of a reduction whose block results are partial results.

    Args:
        placement: placement of the result if a reduced dim is sharded.
        lowered: function of a call to the local program; None: the op itself.
        linear: whether the op also reduces partial operands. False for ops that select or count
            elements by value.
    """

    def strategies(call: Call) -> Sequence[Strategy]:
        lower = local_lowering(lowered(call)) if lowered else None
        strategies = _strategies(call, placement, lower)
        if linear and _keeps_partials(call, placement):
            strategies.append(call.strategy(placement, self=placement))
        return strategies

    return strategies


def _keeps_partials(call: Call, partial: Partial) -> bool:
    """Return whether partial operands give partial results without loss of precision."""
    dtype, result = call.meta("self").dtype, call.result().dtype
    is_exact = dtype != torch.bool and torch.promote_types(dtype, result) == result
    return partial != PPROD and is_exact


def _mean(call: Call) -> Lowering:
    """Return the lowering of a mean: the local sum divided by the global count."""
    return partial(_lower_mean, call.meta("self").numel // max(call.result().numel, 1))


def _lower_mean(count: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Divide the local sum by the global ``count``."""
    args, (mean,) = build.bind(node, operands), node.results
    assert mean is not None
    over = (args["dim"], args["keepdim"]) if "dim" in args else ()
    name = "aten.sum.dim_IntList" if over else "aten.sum.default"
    total = build.op(name, args["self"], *over, dtype=mean.dtype)
    return (build.op("aten.div.Scalar", total, count),)


def _lower_extremum(op: str, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run a maximum or minimum, also of empty blocks."""
    meta, (result,) = build.meta(operands[0]), node.results
    if meta.numel or result is None:
        return build.rerun(node, operands)
    return (build.full(result.shape, identity(meta.dtype, op), like=operands[0]),)


def other_dims(call: Call) -> tuple[int, list[Strategy]]:
    """Return the dim that the op works along, and the strategies that shard another dim."""
    removed = not call.args.get("keepdim", True)
    return call.dim(), passing(call, without(call.rank, {call.dim()}, removed))


def _kthvalue(call: Call) -> Sequence[Strategy]:
    """Return the strategies of kthvalue: along its dim, ranks gather the k smallest of each block.

    Every block must have at least k elements.
    """
    dim, strategies = other_dims(call)
    shape, k, value = call.shape("self"), call["k"], call.meta("self")
    size = shape[dim] if shape else 0
    blocks_have_k = size > 1 and 1 <= k <= block_size(size, call.axis_size, call.axis_size - 1)
    if not blocks_have_k or type(k) is not int or not value.dtype.is_floating_point:
        return strategies

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        smallest, indices = build.op("aten.topk.default", operands[0], k, dim, False)
        indices = build.op("aten.add.Scalar", indices, build.rank_offset(size))
        smallest, indices = (
            build.all_gather(tensor, dim, k * call.axis_size) for tensor in (smallest, indices)
        )
        kth, position = build.op("aten.kthvalue.default", smallest, k, dim, True)
        results = [kth, build.op("aten.gather.default", indices, dim, position)]
        keepdim = call["keepdim"]
        return results if keepdim else [build.op("aten.squeeze.dim", r, dim) for r in results]

    num_candidates = call.result().numel * k * call.axis_size
    comm = [
        Collective("all_gather", num_candidates * nbytes) for nbytes in (value.dtype.itemsize, 8)
    ]
    return [*strategies, call.strategy(R, self=S(dim)).by(lower, comm)]


#: Cumulative op -> the op that reduces a block, and the op that combines two totals.
_TOTALS = {
    "aten.cumsum.default": ("aten.sum.dim_IntList", "aten.add.Tensor"),
    "aten.cumprod.default": ("aten.prod.dim_int", "aten.mul.Tensor"),
    "aten.logcumsumexp.default": ("aten.logsumexp.default", "aten.logaddexp.default"),
}


def _scan(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a cumulative op (inclusive prefix scan).

    Along a sharded dim each rank scans its block and combines the totals of the blocks before it.
    """
    dim, strategies = other_dims(call)
    shape = call.shape("self")
    size = shape[dim] if shape else 0
    strategies += [call.strategy(P, self=P)] if call.node.op == "aten.cumsum.default" else []
    if size < 2:
        return strategies
    total_bytes = call.result().nbytes // size * call.axis_size
    strategy = call.strategy(S(dim), self=S(dim)).by(
        partial(_lower_scan, dim), [Collective("all_gather", total_bytes)]
    )
    return [*strategies, strategy]


def _lower_scan(dim: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Scan the block, all-gather the totals, and add the preceding ones."""
    reduce_op, combine_op = _TOTALS[node.op]
    (scanned,) = build.rerun(node, operands)
    assert scanned is not None
    dims = dim if reduce_op == "aten.prod.dim_int" else (dim,)
    dtype_option = (
        {} if reduce_op == "aten.logsumexp.default" else {"dtype": build.meta(scanned).dtype}
    )
    totals = build.op(reduce_op, operands[0], dims, True, **dtype_option)
    totals = build.all_gather(totals, dim, build.parts)
    preceding = build.op("aten.slice.Tensor", totals, dim, 0, build.index)
    return (
        build.op(combine_op, scanned, build.op(reduce_op, preceding, dims, True, **dtype_option)),
    )


def _norm(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a norm.

    A norm of constant finite order is computed by an all-reduce of sums of powers. A norm of other
    order (0, inf, a run-time number) is computed from an all-gather of the blocks' norms.
    """
    dims = call.dims()
    order, nbytes = _order(call.args), call.result().nbytes
    if type(order) in (int, float) and 0 < order < float("inf"):
        lower = local_lowering(partial(_lower_power_norm, order))
        return _strategies(call, R, lower, [Collective("all_reduce", nbytes)])
    comm = [Collective("all_gather", nbytes * call.axis_size)]
    strategies = passing_strategies(call, dims)
    for dim in sorted(dims.intersection(shardable_dims(call.shape("self")))):
        lower_norms = partial(_lower_norm_of_norms, call.shape("self")[dim], dims)
        strategies.append(call.strategy(R, self=S(dim)).by(lower_norms, comm))
    return strategies


def _order(args: Mapping[str, Arg]) -> Arg:
    """Return the order of ``linalg_vector_norm`` or ``norm``; default 2."""
    order = args["ord"] if "ord" in args else args["p"]
    return 2 if order is None else order


def _lower_norm_of_norms(
    size: int, dims: Collection[int], build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Compute a norm as the norm of the norms of all nonempty blocks.

    For order 0 the blocks' norms are counts, which are summed.

    Args:
        size: global size of the sharded dim.
        dims: the reduced dims.
    """
    order = _order(build.bind(node, operands))
    norm = _block_norm(build, node, operands, dims)
    norms = build.all_gather(build.op("aten.unsqueeze.default", norm, 0), 0, build.parts)
    nonempty = sum(block_size(size, build.parts, rank) > 0 for rank in range(build.parts))
    norms = build.op("aten.slice.Tensor", norms, 0, 0, nonempty)
    norm_of_norms = build.op("aten.linalg_vector_norm.default", norms, order, (0,))
    counts = build.op("aten.sum.dim_IntList", norms, (0,))
    is_zero = build.op("aten.eq.Scalar", build.full((), order, like=norms), 0)
    return (build.op("aten.where.self", is_zero, counts, norm_of_norms),)


def _block_norm(build: Builder, node: Node, operands: Sequence[Ref], dims: Collection[int]) -> Ref:
    """Return the norm of a block.

    An empty block gets one element along each reduced empty dim; the caller drops its norm.
    """
    if not build.meta(operands[0]).numel:
        shape = enumerate(build.shape(operands[0]))
        pads = [(0, int(size == 0 and dim in dims)) for dim, size in shape]
        padding = tuple([item for pad in reversed(pads) for item in pad])
        operands = [build.op("aten.constant_pad_nd.default", operands[0], padding, 0)]
    (norm,) = build.rerun(node, operands)
    assert norm is not None
    return norm


def _lower_power_norm(order: float, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Compute a norm by an all-reduce of its power sums."""
    (norm,) = build.rerun(node, operands)
    powers = build.op("aten.pow.Tensor_Scalar", norm, order)
    return (build.op("aten.pow.Tensor_Scalar", build.all_reduce(powers), 1 / order),)


# -- variance and mean per channel (batch norm) by one all-reduce of moments -----------------------
# A rank computes mean and variance of its n elements. The sums n * mean and n * (variance + mean^2)
# are added over the ranks, in float64 to avoid cancellation if the mean is large. Channels are few;
# for a layer norm of many tokens two all-reduces in the values' dtype send fewer bytes, see
# ``decompositions``.

_MOMENT_DTYPE = torch.float64
#: Dtypes too narrow for a rank's moments.
_NARROW = (torch.float16, torch.bfloat16)


def _var_mean(call: Call) -> Sequence[Strategy]:
    """Return the strategies of var_mean per channel (all dims but 1), as in batch norm."""
    value, dims = call.meta("self"), call.dims()
    if not call["keepdim"] or call["correction"] != 0 or not _is_of_channels(value.shape, dims):
        return ()
    if value.dtype.is_complex or value.dtype == _MOMENT_DTYPE:
        return ()
    comm = [Collective("all_reduce", 2 * 8 * call.result().numel)]
    lower = partial(_lower_var_mean, prod(value.shape[dim] for dim in dims))
    return _strategies(call, R, lower, comm)


def _is_of_channels(shape: tuple[int, ...], dims: frozenset[int]) -> bool:
    """Return whether all dims but dim 1 are reduced."""
    return len(shape) > 1 and dims == frozenset(range(len(shape))) - {1}


def _lower_var_mean(count: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Compute variance and mean over ``count`` elements per channel of all ranks."""
    sums = build.all_reduce(_moment_sums(build, operands[0]))
    mean, square = (
        build.op("aten.select.int", build.op("aten.div.Scalar", sums, count), 0, number)
        for number in range(2)
    )
    variance = build.op("aten.sub.Tensor", square, build.op("aten.mul.Tensor", mean, mean))
    variance = build.op("aten.clamp_min.default", variance, 0)
    return [
        build.op("aten._to_copy.default", moment, dtype=meta.dtype)
        for moment, meta in zip((variance, mean), node.fresh, strict=True)
        if meta is not None
    ]


def _moment_sums(build: Builder, value: Ref) -> Ref:
    """Return the float64 sums of a rank's elements and of their squares, stacked in dim 0."""
    meta = build.meta(value)
    dims = [dim for dim in range(len(meta.shape)) if dim != 1]
    count = prod(meta.shape[dim] for dim in dims)
    if not count:
        shape = [1 if dim in dims else size for dim, size in enumerate(meta.shape)]
        no_elements: Ref = build.op(
            "aten.zeros.default", (2, *shape), dtype=_MOMENT_DTYPE, device=DEVICE
        )
        return no_elements
    if meta.dtype in _NARROW:
        value = build.op("aten._to_copy.default", value, dtype=torch.float32)
    moments = build.op("aten.var_mean.correction", value, dims, correction=0, keepdim=True)
    variance, mean = (
        build.op("aten._to_copy.default", moment, dtype=_MOMENT_DTYPE) for moment in moments
    )
    square = build.op("aten.add.Tensor", variance, build.op("aten.mul.Tensor", mean, mean))
    mean_and_square = build.op("aten.stack.default", [mean, square])
    sums: Ref = build.op("aten.mul.Scalar", mean_and_square, count)
    return sums


# -- extrema with their indices (topk, argmax, max.dim), and sampling by argmax (multinomial) ------
# Along a sharded dim each rank finds the extrema of its block, and ranks all-gather pairs of value
# and global index in one collective. Blocks are gathered in order, so among equal elements the
# first one is found, as on one device.

#: Dtypes that fit into 4 bytes, packed with a 4-byte index.
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FOUR_BYTES = _FLOATS | {torch.int32, torch.int16, torch.int8, torch.uint8}


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
    return dtype in _FOUR_BYTES and size <= torch.iinfo(torch.int32).max


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


def _arg_extremum(call: Call, op: str, both: bool) -> Sequence[Strategy]:
    """Return the strategies of argmax, argmin, max.dim or min.dim.

    Args:
        op: ``max`` or ``min``.
        both: whether the op returns values and indices; else indices.
    """
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

    comm = _gather_comm(call.result().numel, call.meta("self").dtype, call.axis_size, shape[dim])
    return [*strategies_of_other_dims, call.strategy(R, self=S(dim)).by(lower, comm)]


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

    gathered = _gather_comm(call.result().numel, meta.dtype, call.axis_size, meta.shape[dim])
    return [
        call.strategy(R if d == dim else S(d), self=S(d)).by(
            partial(_lower_multinomial, meta, d), gathered if d == dim else ()
        )
        for d in shardable_dims(meta.shape)
    ]


def _lower_multinomial(
    meta: TensorMeta, sharded_dim: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Draw one sample per row of a value sharded along ``sharded_dim``."""
    (value,), dim = operands, len(meta.shape) - 1
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


RULES: Mapping[str, Rule] = {
    "aten.var_mean.correction": _var_mean,
    **table("sum.default sum.dim_IntList", _rule(P)),
    **table(
        "nansum.default count_nonzero.dim_IntList count_nonzero.default", _rule(P, linear=False)
    ),
    **table("mean.default mean.dim", _rule(P, _mean)),
    **table("amax.default max.default", _rule(PMAX, lambda call: partial(_lower_extremum, "max"))),
    **table("amin.default min.default", _rule(PMIN, lambda call: partial(_lower_extremum, "min"))),
    **table("prod.default prod.dim_int", _rule(PPROD)),
    **table("any.default any.dim any.dims", _rule(PMAX)),
    **table("all.default all.dim all.dims", _rule(PMIN)),
    **table("kthvalue.default", _kthvalue),
    **table("cumsum.default cumprod.default logcumsumexp.default", _scan),
    **table("linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar", _norm),
    **table("topk.default", _topk),
    **table("argmax.default", partial(_arg_extremum, op="max", both=False)),
    **table("argmin.default", partial(_arg_extremum, op="min", both=False)),
    **table("max.dim", partial(_arg_extremum, op="max", both=True)),
    **table("min.dim", partial(_arg_extremum, op="min", both=True)),
    **table("multinomial.default", _multinomial),
}
