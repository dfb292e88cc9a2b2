"""Reductions, norms, cumulative sums.

Dims that stay pass through; a dim that is reduced leaves partial results, or, where no partial
placement can say it (norms, cumsum), ranks meet inside the strategy, with collectives of the
reduced size. Empty blocks give the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Partial, block_size
from lazygt.passes.sharding.rules.strategy import (
    PMAX,
    PMIN,
    PPROD,
    Call,
    Collective,
    LocalLowering,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    local_lowering,
    shardable_dims,
    table,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def reduced_dims(call: Call, name: str = "dim") -> frozenset[int]:
    """Return the dims that a reduction takes away, from the front; all when its dim says none."""
    rank = len(call.shape("self"))
    dims: Arg = call.args.get(name)
    if dims is None or dims == ():
        return frozenset(range(rank))
    return frozenset(dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,)) if rank)


def passing_strategies(call: Call, dims: frozenset[int]) -> list[Strategy]:
    """Return the strategies that split a dim that stays."""
    keeps = bool(call.args.get("keepdim"))
    strategies = []
    for dim in shardable_dims(call.shape("self")):
        if dim not in dims:
            gone = 0 if keeps else sum(other < dim for other in dims)
            strategies.append(call.strategy(S(dim - gone), self=S(dim)))
    return strategies


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """Return the identity of a maximum or minimum."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def _rule(
    partial: Partial, lowered: Callable[[Call], Lowering] | None = None, *, linear: bool = True
) -> Rule:
    """Return the rule of a reduction in which the results of parts reduce to the whole's.

    Args:
        linear: partial elements do so too; not where an element counts or not by its value.
    """

    def strategies(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
        call = Call(node, metas, axis_size)
        dims = reduced_dims(call)
        lower = lowered(call) if lowered else None
        split = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
        strategies = passing_strategies(call, dims)
        strategies += [
            call.strategy(partial, self=S(dim)).by(lower and local_lowering(lower)) for dim in split
        ]
        if linear and _keeps_partials(call, partial):
            strategies.append(call.strategy(partial, self=partial))
        return strategies

    return strategies


def _keeps_partials(call: Call, partial: Partial) -> bool:
    """Return whether reducing each part loses nothing.

    The op is the same in both, in the same or a wider dtype.
    """
    have, result = call.meta("self").dtype, call.result().dtype
    exact = have != torch.bool and torch.promote_types(have, result) == result
    return partial != PPROD and exact


def _mean(call: Call) -> Lowering:
    """Return a lowering by the sum over the global count: blocks may differ in size."""
    mean = call.result()
    count = call.meta("self").numel // max(mean.numel, 1)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        over = (args["dim"], args["keepdim"]) if "dim" in args else ()
        name = "aten.sum.dim_IntList" if over else "aten.sum.default"
        total = build.op(name, args["self"], *over, dtype=mean.dtype)
        return (build.op("aten.div.Scalar", total, count),)

    return lower


def _extreme(op: str) -> Callable[[Call], Lowering]:
    """Return the lowering of a maximum or minimum, of an empty block too."""

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
    """Return the dim that the op works along, and the strategies that split another."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    keeps = call.args.get("keepdim", True)
    strategies = [
        call.strategy(S(d - (not keeps and d > dim)), self=S(d))
        for d in shardable_dims(shape)
        if d != dim
    ]
    return dim, strategies


def _kthvalue(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of kthvalue: along its dim, each rank gathers its k smallest.

    Every block must have k elements.
    """
    call = Call(node, metas, axis_size)
    dim, strategies = other_dims(call)
    shape, k, value = call.shape("self"), call["k"], call.meta("self")
    size = shape[dim] if shape else 0
    few = size > 1 and 1 <= k <= block_size(size, axis_size, axis_size - 1)
    if not few or type(k) is not int or not value.dtype.is_floating_point:
        return strategies

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        least, places = build.op("aten.topk.default", operands[0], k, dim, False)
        places = build.op("aten.add.Scalar", places, build.rank_offset(size))
        least, places = (build.all_gather(part, dim, k * axis_size) for part in (least, places))
        kth, which = build.op("aten.kthvalue.default", least, k, dim, True)
        results = [kth, build.op("aten.gather.default", places, dim, which)]
        keeps = call["keepdim"]
        return results if keeps else [build.op("aten.squeeze.dim", r, dim) for r in results]

    rest = call.result().numel * k * axis_size
    comm = [Collective("all_gather", rest * nbytes) for nbytes in (value.dtype.itemsize, 8)]
    return [*strategies, call.strategy(R, self=S(dim)).by(lower, comm)]


#: For each cumulative op, the op that gives a block's total, and the one that joins two totals.
_TOTALS = {
    "aten.cumsum.default": ("aten.sum.dim_IntList", "aten.add.Tensor"),
    "aten.cumprod.default": ("aten.prod.dim_int", "aten.mul.Tensor"),
    "aten.logcumsumexp.default": ("aten.logsumexp.default", "aten.logaddexp.default"),
}


def _cumulated(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a cumulative op: an exclusive scan of the blocks' totals."""
    call = Call(node, metas, axis_size)
    dim, strategies = other_dims(call)
    shape = call.shape("self")
    size = shape[dim] if shape else 0
    strategies += [call.strategy(P, self=P)] if node.op == "aten.cumsum.default" else []
    if size < 2:
        return strategies
    total = call.result().nbytes // size * axis_size
    strategy = call.strategy(S(dim), self=S(dim)).by(_after(dim), [Collective("all_gather", total)])
    return [*strategies, strategy]


def _after(dim: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        total, together = _TOTALS[node.op]
        (cumulated,) = build.rerun(node, operands)
        assert cumulated is not None
        dims = dim if total == "aten.prod.dim_int" else (dim,)
        wide = {} if total == "aten.logsumexp.default" else {"dtype": build.meta(cumulated).dtype}
        totals = build.op(total, operands[0], dims, True, **wide)
        totals = build.all_gather(totals, dim, build.parts)
        before = build.op("aten.slice.Tensor", totals, dim, 0, build.index)
        return (build.op(together, cumulated, build.op(total, before, dims, True, **wide)),)

    return lower


def _norm(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a norm, by sums of powers where the order is known.

    A run-time number may be any order, 0 and inf too.
    """
    call = Call(node, metas, axis_size)
    dims = reduced_dims(call)
    strategies = passing_strategies(call, dims)
    order, nbytes = _order(call.args), call.result().nbytes
    if type(order) in (int, float) and 0 < order < float("inf"):
        comm = [Collective("all_reduce", nbytes)]
        return strategies + _met(call, dims, local_lowering(_norm_lower(order)), comm)
    comm = [Collective("all_gather", nbytes * axis_size)]
    for dim in shardable_dims(call.shape("self")):
        if dim in dims:
            lower = _norm_of_norms(call.shape("self")[dim], dims)
            strategies.append(call.strategy(R, self=S(dim)).by(lower, comm))
    return strategies


def _order(args: Mapping[str, Arg]) -> Arg:
    """Return the order of ``linalg_vector_norm``, or of the older ``norm``: 2 if left out."""
    order = args["ord"] if "ord" in args else args["p"]
    return 2 if order is None else order


def _norm_of_norms(size: int, dims: Collection[int]) -> Lowering:
    """Return a lowering by the norm of the norms of all blocks that have elements.

    Of order 0 they are counts.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        order = _order(build.bind(node, operands))
        norm = _norm_of_block(build, node, operands, dims)
        norms = build.all_gather(build.op("aten.unsqueeze.default", norm, 0), 0, build.parts)
        filled = sum(block_size(size, build.parts, rank) > 0 for rank in range(build.parts))
        norms = build.op("aten.slice.Tensor", norms, 0, 0, filled)
        usual = build.op("aten.linalg_vector_norm.default", norms, order, (0,))
        counts = build.op("aten.sum.dim_IntList", norms, (0,))
        is_zero = build.op("aten.eq.Scalar", build.full((), order, like=norms), 0)
        return (build.op("aten.where.self", is_zero, counts, usual),)

    return lower


def _norm_of_block(
    build: Builder, node: Node, operands: Sequence[Ref], dims: Collection[int]
) -> Ref:
    """Return the norm of a block; of an empty one, which need not have one, any number.

    That number is cut off.
    """
    if not build.meta(operands[0]).numel:
        operands = [build.op("aten.constant_pad_nd.default", operands[0],
                             _one_more(build.shape(operands[0]), dims), 0)]  # fmt: skip
    (norm,) = build.rerun(node, operands)
    assert norm is not None
    return norm


def _one_more(shape: tuple[int, ...], dims: Collection[int]) -> tuple[int, ...]:
    """Return the padding, last dim first, that gives those of ``dims`` without elements one."""
    more = [int(size == 0 and dim in dims) for dim, size in enumerate(shape)]
    return tuple(pad for one in reversed(more) for pad in (0, one))


def _norm_lower(order: float) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (norm,) = build.rerun(node, operands)
        powers = build.op("aten.pow.Tensor_Scalar", norm, order)
        return (build.op("aten.pow.Tensor_Scalar", build.all_reduce(powers), 1 / order),)

    return lower


def _met(
    call: Call, dims: frozenset[int], lower: LocalLowering, comm: Sequence[Collective]
) -> list[Strategy]:
    """Return the strategies that split a reduced dim."""
    split = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
    return [call.strategy(R, self=S(dim)).by(lower, comm) for dim in split]


# -- batch norm's variance and mean of each channel, by one all-reduce of local moments ------------
# Of its n elements a rank has the mean and the variance. n times the mean, and n times the sum of
# the variance and the mean's square, add up to those of all elements: in float64, so that nothing
# of the variance is lost where the mean is large beside it. Channels are few; elsewhere (a layer
# norm of many tokens) two all-reduces of the values' own dtype are fewer bytes, see ``formulas``.

_WIDE = torch.float64
#: The kernel would round a rank's moments to these.
_NARROW = (torch.float16, torch.bfloat16)


def _var_mean(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    call = Call(node, metas, axis_size)
    value, dims = call.meta("self"), reduced_dims(call)
    if not call["keepdim"] or call["correction"] != 0 or not _is_of_channels(value.shape, dims):
        return ()
    if value.dtype.is_complex or value.dtype == _WIDE:
        return ()
    comm = [Collective("all_reduce", 2 * 8 * call.result().numel)]
    split = [dim for dim in shardable_dims(value.shape) if dim in dims]
    lower = _combined(prod(value.shape[dim] for dim in dims))
    met = [call.strategy(R, self=S(dim)).by(lower, comm) for dim in split]
    return [*passing_strategies(call, dims), *met]


def _is_of_channels(shape: tuple[int, ...], dims: frozenset[int]) -> bool:
    return len(shape) > 1 and dims == frozenset(range(len(shape))) - {1}


def _combined(count: int) -> Lowering:
    """Return a lowering to the moments of all ranks' elements, ``count`` of each channel."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        sums = build.all_reduce(_sums(build, operands[0]))
        mean, square = (
            build.op("aten.select.int", build.op("aten.div.Scalar", sums, count), 0, which)
            for which in range(2)
        )
        variance = build.op("aten.sub.Tensor", square, build.op("aten.mul.Tensor", mean, mean))
        variance = build.op("aten.clamp_min.default", variance, 0)
        return [
            build.op("aten._to_copy.default", moment, dtype=meta.dtype)
            for moment, meta in zip((variance, mean), node.fresh, strict=True)
            if meta is not None
        ]

    return lower


def _sums(build: Builder, value: Ref) -> Ref:
    """Return the sums of a rank's elements, and of their squares."""
    meta = build.meta(value)
    dims = [dim for dim in range(len(meta.shape)) if dim != 1]
    count = prod(meta.shape[dim] for dim in dims)
    if not count:
        shape = [1 if dim in dims else size for dim, size in enumerate(meta.shape)]
        nothing: Ref = build.op("aten.zeros.default", (2, *shape), dtype=_WIDE, device=DEVICE)
        return nothing
    if meta.dtype in _NARROW:
        value = build.op("aten._to_copy.default", value, dtype=torch.float32)
    moments = build.op("aten.var_mean.correction", value, dims, correction=0, keepdim=True)
    variance, mean = (build.op("aten._to_copy.default", each, dtype=_WIDE) for each in moments)
    square = build.op("aten.add.Tensor", variance, build.op("aten.mul.Tensor", mean, mean))
    both = build.op("aten.stack.default", [mean, square])
    sums: Ref = build.op("aten.mul.Scalar", both, count)
    return sums


RULES: Mapping[str, Rule] = {
    "aten.var_mean.correction": _var_mean,
    **table("sum.default sum.dim_IntList", _rule(P)),
    **table(
        "nansum.default count_nonzero.dim_IntList count_nonzero.default", _rule(P, linear=False)
    ),
    **table("mean.default mean.dim", _rule(P, _mean)),
    **table("amax.default max.default", _rule(PMAX, _extreme("max"))),
    **table("amin.default min.default", _rule(PMIN, _extreme("min"))),
    **table("prod.default prod.dim_int", _rule(PPROD)),
    **table("any.default any.dim any.dims", _rule(PMAX)),
    **table("all.default all.dim all.dims", _rule(PMIN)),
    **table("kthvalue.default", _kthvalue),
    **table("cumsum.default cumprod.default logcumsumexp.default", _cumulated),
    **table("linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar", _norm),
}
