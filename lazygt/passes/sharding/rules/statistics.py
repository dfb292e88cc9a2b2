"""Reductions whose ranks must meet: norms, places of extremes.

Each meets inside the strategy, with collectives of the reduced size, and its result is R.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.rules.base import (
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
from lazygt.passes.sharding.rules.reductions import identity, passing_strategies, reduced_dims

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def _norm(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Sums of powers where the order is known; a run-time number may be any, 0 and inf too."""
    call = Call(node, metas, parts)
    dims = reduced_dims(call)
    found = passing_strategies(call, dims)
    order, nbytes = _order(call.args), call.result().nbytes
    if type(order) in (int, float) and 0 < order < float("inf"):
        comm = [Collective("all_reduce", nbytes)]
        return found + _met(call, dims, _norm_lower(order), comm)
    comm = [Collective("all_gather", nbytes * parts)]
    for dim in shardable_dims(call.shape("self")):
        if dim in dims:
            lower = _norm_of_norms(call.shape("self")[dim], dims)
            found.append(call.strategy(R, self=S(dim)).by(lower, comm))
    return found


def _order(args: Mapping[str, Arg]) -> Arg:
    """Of ``linalg_vector_norm``, or of the older ``norm``, whose order may be left out."""
    order = args["ord"] if "ord" in args else args["p"]
    return 2 if order is None else order


def _norm_of_norms(size: int, dims: Collection[int]) -> Lowering:
    """The norm of the norms of all blocks that have elements; of order 0 they are counts."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        order = _order(build.bind(node, operands))
        mine = _norm_of_block(build, node, operands, dims)
        norms = build.all_gather(build.op("aten.unsqueeze.default", mine, 0), 0, build.parts)
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
    """Of an empty block, which no order need be defined for, anything: it is cut off."""
    if not build.meta(operands[0]).numel:
        operands = [build.op("aten.constant_pad_nd.default", operands[0],
                             _one_more(build.shape(operands[0]), dims), 0)]  # fmt: skip
    (made,) = build.rerun(node, operands)
    assert made is not None
    return made


def _one_more(shape: tuple[int, ...], dims: Collection[int]) -> tuple[int, ...]:
    """Padding, last dim first, that gives those of ``dims`` without elements one."""
    more = [int(size == 0 and dim in dims) for dim, size in enumerate(shape)]
    return tuple(pad for one in reversed(more) for pad in (0, one))


def _norm_lower(order: float) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        (mine,) = build.rerun(node, operands)
        powers = build.op("aten.pow.Tensor_Scalar", mine, order)
        return (build.op("aten.pow.Tensor_Scalar", build.all_reduce(powers), 1 / order),)

    return lower


def _met(
    call: Call, dims: frozenset[int], lower: Lowering, comm: Sequence[Collective]
) -> list[Strategy]:
    """The strategies that split a dim which is reduced."""
    split = [dim for dim in shardable_dims(call.shape("self")) if dim in dims]
    return [call.strategy(R, self=S(dim)).by(lower, comm) for dim in split]


def _place(op: str, both: bool) -> Rule:
    """argmax and max.dim: the block's extremes and where they are, gathered and compared.

    Blocks stand in order, so the first of equal elements stays the first.
    """

    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        rank = len(call.shape("self"))
        if call["dim"] is None or rank == 0:
            return ()
        dim, keeps, shape = call.dim("dim", rank), call["keepdim"], call.shape("self")
        found = passing_strategies(call, frozenset({dim}))
        if shape[dim] < 2:
            return found

        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            (value,) = operands
            top, place = _first_extremes(build, value, op, dim, shape[dim])
            tops = build.all_gather(top, dim, parts)
            places = build.all_gather(place, dim, parts)
            best, which = build.op(f"aten.{op}.dim", tops, dim, True)
            made = [build.op("aten.gather.default", places, dim, which)]
            made = [best, *made] if both else made
            return made if keeps else [build.op("aten.squeeze.dim", m, dim) for m in made]

        rest = call.result().numel
        sizes = [rest * call.meta("self").dtype.itemsize, rest * 8]
        comm = [Collective("all_gather", size * parts) for size in sizes]
        return [*found, call.strategy(R, self=S(dim)).by(lower, comm)]

    return strategies


def _first_extremes(build: Builder, value: Ref, op: str, dim: int, size: int) -> tuple[Ref, Ref]:
    """A block's extreme along ``dim`` (kept), and its global place."""
    meta = build.meta(value)
    if meta.numel:
        top, place = build.op(f"aten.{op}.dim", value, dim, True)
        return top, build.op("aten.add.Scalar", place, build.rank_offset(size))
    shape = (*meta.shape[:dim], 1, *meta.shape[dim + 1 :])
    top = build.full(shape, identity(meta.dtype, op), like=value)
    return top, build.op("aten.zeros_like.default", top, dtype=torch.int64)


RULES: dict[str, Rule] = {
    **table("linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar", _norm),
    **table("argmax.default", _place("max", both=False)),
    **table("argmin.default", _place("min", both=False)),
    **table("max.dim", _place("max", both=True)),
    **table("min.dim", _place("min", both=True)),
}
