"""Reductions, norms, cumulative ops, variance and mean.

A dim that is not reduced is sharded in operand and result. A sharded reduced dim gives partial
results. Norms and cumulative ops have no partial placement; their strategies contain collectives of
the reduced size. An empty block gives the identity of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import torch

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Partial, block_size
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


def _rule(
    partial: Partial, lowered: Callable[[Call], Lowering] | None = None, *, linear: bool = True
) -> Rule:
    """Return the rule of a reduction whose block results are partial results.

    Args:
        partial: partial placement of the result of a sharded reduced dim.
        lowered: function of a call to the local program; None: the op itself.
        linear: whether the op also reduces partial operands. False for ops that select or count
            elements by value.
    """

    def strategies(call: Call) -> Sequence[Strategy]:
        dims = call.dims()
        lower = lowered(call) if lowered else None
        reduced_and_shardable = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
        strategies = passing_strategies(call, dims)
        strategies += [
            call.strategy(partial, self=S(dim)).by(lower and local_lowering(lower))
            for dim in reduced_and_shardable
        ]
        if linear and _keeps_partials(call, partial):
            strategies.append(call.strategy(partial, self=partial))
        return strategies

    return strategies


def _keeps_partials(call: Call, partial: Partial) -> bool:
    """Return whether partial operands give partial results without loss of precision."""
    dtype, result = call.meta("self").dtype, call.result().dtype
    is_exact = dtype != torch.bool and torch.promote_types(dtype, result) == result
    return partial != PPROD and is_exact


def _lower_mean(call: Call) -> Lowering:
    """Return the lowering of a mean: the local sum divided by the global count."""
    mean = call.result()
    count = call.meta("self").numel // max(mean.numel, 1)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        over = (args["dim"], args["keepdim"]) if "dim" in args else ()
        name = "aten.sum.dim_IntList" if over else "aten.sum.default"
        total = build.op(name, args["self"], *over, dtype=mean.dtype)
        return (build.op("aten.div.Scalar", total, count),)

    return lower


def _extremum(op: str) -> Callable[[Call], Lowering]:
    """Return the lowering of a maximum or minimum that also accepts empty blocks."""

    def lowered(call: Call) -> Lowering:
        shape = call.result().shape

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            meta = build.meta(operands[0])
            if meta.numel:
                return build.rerun(node, operands)
            return (build.full(shape, identity(meta.dtype, op), like=operands[0]),)

        return lower

    return lowered


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
        _lower_scan(dim), [Collective("all_gather", total_bytes)]
    )
    return [*strategies, strategy]


def _lower_scan(dim: int) -> Lowering:
    """Return the lowering of a scan: local scan, all-gather of totals, add the preceding totals."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
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
            build.op(
                combine_op, scanned, build.op(reduce_op, preceding, dims, True, **dtype_option)
            ),
        )

    return lower


def _norm(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a norm.

    A norm of constant finite order is computed by an all-reduce of sums of powers. A norm of other
    order (0, inf, a run-time number) is computed from an all-gather of the blocks' norms.
    """
    dims = call.dims()
    strategies = passing_strategies(call, dims)
    order, nbytes = _order(call.args), call.result().nbytes
    if type(order) in (int, float) and 0 < order < float("inf"):
        comm = [Collective("all_reduce", nbytes)]
        return strategies + _sharded_reduced(
            call, dims, local_lowering(_lower_power_norm(order)), comm
        )
    comm = [Collective("all_gather", nbytes * call.axis_size)]
    for dim in shardable_dims(call.shape("self")):
        if dim in dims:
            lower = _lower_norm_of_norms(call.shape("self")[dim], dims)
            strategies.append(call.strategy(R, self=S(dim)).by(lower, comm))
    return strategies


def _order(args: Mapping[str, Arg]) -> Arg:
    """Return the order of ``linalg_vector_norm`` or ``norm``; default 2."""
    order = args["ord"] if "ord" in args else args["p"]
    return 2 if order is None else order


def _lower_norm_of_norms(size: int, dims: Collection[int]) -> Lowering:
    """Return the lowering of a norm as the norm of the norms of all nonempty blocks.

    For order 0 the blocks' norms are counts, which are summed.

    Args:
        size: global size of the sharded dim.
        dims: the reduced dims.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        order = _order(build.bind(node, operands))
        norm = _block_norm(build, node, operands, dims)
        norms = build.all_gather(build.op("aten.unsqueeze.default", norm, 0), 0, build.parts)
        nonempty = sum(block_size(size, build.parts, rank) > 0 for rank in range(build.parts))
        norms = build.op("aten.slice.Tensor", norms, 0, 0, nonempty)
        norm_of_norms = build.op("aten.linalg_vector_norm.default", norms, order, (0,))
        counts = build.op("aten.sum.dim_IntList", norms, (0,))
        is_zero = build.op("aten.eq.Scalar", build.full((), order, like=norms), 0)
        return (build.op("aten.where.self", is_zero, counts, norm_of_norms),)

    return lower


def _block_norm(build: Builder, node: Node, operands: Sequence[Ref], dims: Collection[int]) -> Ref:
    """Return the norm of a block.

    For an empty block the number is arbitrary and is dropped by the caller.
    """
    if not build.meta(operands[0]).numel:
        operands = [build.op("aten.constant_pad_nd.default", operands[0],
                             _pads_of_empty_dims(build.shape(operands[0]), dims), 0)]  # fmt: skip
    (norm,) = build.rerun(node, operands)
    assert norm is not None
    return norm


def _pads_of_empty_dims(shape: tuple[int, ...], dims: Collection[int]) -> tuple[int, ...]:
    """Return the padding (last dim first) that adds one element to each empty dim of ``dims``."""
    pads = [int(size == 0 and dim in dims) for dim, size in enumerate(shape)]
    return tuple(item for pad in reversed(pads) for item in (0, pad))


def _lower_power_norm(order: float) -> Lowering:
    """Return the lowering of a norm by an all-reduce of its power sums."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (norm,) = build.rerun(node, operands)
        powers = build.op("aten.pow.Tensor_Scalar", norm, order)
        return (build.op("aten.pow.Tensor_Scalar", build.all_reduce(powers), 1 / order),)

    return lower


def _sharded_reduced(
    call: Call, dims: frozenset[int], lower: LocalLowering, comm: Sequence[Collective]
) -> list[Strategy]:
    """Return the strategies that shard a reduced dim, with collectives in the local program."""
    reduced_and_shardable = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
    return [call.strategy(R, self=S(dim)).by(lower, comm) for dim in reduced_and_shardable]


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
    reduced_and_shardable = [dim for dim in shardable_dims(value.shape) if dim in dims]
    lower = _lower_var_mean(prod(value.shape[dim] for dim in dims))
    sharded = [call.strategy(R, self=S(dim)).by(lower, comm) for dim in reduced_and_shardable]
    return [*passing_strategies(call, dims), *sharded]


def _is_of_channels(shape: tuple[int, ...], dims: frozenset[int]) -> bool:
    """Return whether all dims but dim 1 are reduced."""
    return len(shape) > 1 and dims == frozenset(range(len(shape))) - {1}


def _lower_var_mean(count: int) -> Lowering:
    """Return the lowering to variance and mean over ``count`` elements per channel of all ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
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

    return lower


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


RULES: Mapping[str, Rule] = {
    "aten.var_mean.correction": _var_mean,
    **table("sum.default sum.dim_IntList", _rule(P)),
    **table(
        "nansum.default count_nonzero.dim_IntList count_nonzero.default", _rule(P, linear=False)
    ),
    **table("mean.default mean.dim", _rule(P, _lower_mean)),
    **table("amax.default max.default", _rule(PMAX, _extremum("max"))),
    **table("amin.default min.default", _rule(PMIN, _extremum("min"))),
    **table("prod.default prod.dim_int", _rule(PPROD)),
    **table("any.default any.dim any.dims", _rule(PMAX)),
    **table("all.default all.dim all.dims", _rule(PMIN)),
    **table("kthvalue.default", _kthvalue),
    **table("cumsum.default cumprod.default logcumsumexp.default", _scan),
    **table("linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar", _norm),
}
