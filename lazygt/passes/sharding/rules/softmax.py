"""Softmax, log_softmax and their gradients; along a split dim the ranks meet for the sums.

Results are row-major, as torch's are: the kernels of losses ask for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.rules.base import (
    Call,
    Collective,
    Lowering,
    Metas,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
)
from lazygt.passes.sharding.rules.statistics import extreme, total

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: torch computes these in float32.
_HALF = (torch.float16, torch.bfloat16)


def _forward(log: bool, safe: bool = False) -> Rule:
    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        dim, nbytes = call.dim("dim", len(call.shape("self"))), _reduced_bytes(call, "self")
        comm = [Collective("all_reduce", nbytes, "max"), Collective("all_reduce", nbytes)]
        return _strategies(
            call, ["self"], dim, _forward_lower(dim, call.result().dtype, log, safe), comm
        )

    return strategies


def _forward_lower(dim: int, dtype: torch.dtype, log: bool, safe: bool) -> Lowering:
    """``safe``: 0 where every element is -inf."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value = build.contiguous(_wide(build, operands[0]))
        top = extreme(build, value, [dim], "max")
        shifted = build.op("aten.sub.Tensor", value, top)
        powers = build.op("aten.exp.default", shifted)
        sums = total(build, powers, [dim])
        if log:
            made = build.op("aten.sub.Tensor", shifted, build.op("aten.log.default", sums))
        else:
            made = build.op("aten.div.Tensor", powers, sums)
        if safe:
            nothing = build.op("aten.eq.Scalar", top, float("-inf"))
            made = build.op("aten.masked_fill.Scalar", made, nothing, 0)
        return (_cast(build, made, dtype),)

    return lower


def _backward(log: bool) -> Rule:
    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        dim = call.dim("dim", len(call.shape("output")))
        comm = [Collective("all_reduce", _reduced_bytes(call, "output"))]
        lower = _backward_lower(dim, call.result().dtype, log)
        return _strategies(call, ["grad_output", "output"], dim, lower, comm)

    return strategies


def _backward_lower(dim: int, dtype: torch.dtype, log: bool) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradient, output = (build.contiguous(_wide(build, operand)) for operand in operands)
        if log:
            share = build.op("aten.exp.default", output)
            sums = build.op("aten.mul.Tensor", share, total(build, gradient, [dim]))
            made = build.op("aten.sub.Tensor", gradient, sums)
        else:
            product = build.op("aten.mul.Tensor", gradient, output)
            sums = build.op("aten.mul.Tensor", output, total(build, product, [dim]))
            made = build.op("aten.sub.Tensor", product, sums)
        return (_cast(build, made, dtype),)

    return lower


def _strategies(
    call: Call, names: list[str], dim: int, lower: Lowering, comm: Sequence[Collective]
) -> list[Strategy]:
    found = []
    for split in shardable_dims(call.shape(names[0])):
        placements = {name: S(split) for name in names}
        meets = split == dim
        found.append(
            call.strategy(S(split), **placements).by(
                lower if meets else None, comm if meets else ()
            )
        )
    return found


def _reduced_bytes(call: Call, name: str) -> int:
    shape, dim = call.shape(name), call.dim("dim", len(call.shape(name)))
    itemsize = max(call.meta(name).dtype.itemsize, 4)
    return call.meta(name).numel // max(shape[dim] if shape else 1, 1) * itemsize


def _wide(build: Builder, value: Ref) -> Ref:
    half = build.meta(value).dtype in _HALF
    return _cast(build, value, torch.float32) if half else value


def _cast(build: Builder, value: Ref, dtype: torch.dtype) -> Ref:
    if build.meta(value).dtype == dtype:
        return value
    made: Ref = build.op("aten._to_copy.default", value, dtype=dtype)
    return made


RULES: dict[str, Rule] = {
    **table("_softmax.default", _forward(log=False)),
    **table("_safe_softmax.default", _forward(log=False, safe=True)),
    **table("_log_softmax.default", _forward(log=True)),
    **table("_softmax_backward_data.default", _backward(log=False)),
    **table("_log_softmax_backward_data.default", _backward(log=True)),
}
