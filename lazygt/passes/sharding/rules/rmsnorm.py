"""Fused RMS norm and its gradient; along a normalised split dim the ranks meet for the squares.

Its results are row-major then too, as torch's are: views may ask for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules.base import (
    Call,
    Collective,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
    zeros_when_empty,
)
from lazygt.passes.sharding.rules.statistics import total

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def _lead(call: Call) -> int:
    """How many dims are not normalised."""
    return len(call.shape("input")) - len(call["normalized_shape"])


def _one_dtype(call: Call) -> bool:
    """Mixed precision is left to the kernel."""
    return len({meta.dtype for n in call.node.refs() if (meta := call.metas[n]) is not None}) == 1


def _weight(call: Call, placement: Placement) -> dict[str, Placement]:
    return {"weight": placement} if call.has("weight") else {}


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    lead = _lead(call)
    found = []
    for dim in shardable_dims(call.shape("input")):
        if dim < lead:
            found.append(zeros_when_empty(call, call.strategy(S(dim), input=S(dim))))
        elif _one_dtype(call) and call.result(1).dtype == call.result().dtype:
            strategy = call.strategy((S(dim), R), input=S(dim), **_weight(call, S(dim - lead)))
            comm = [Collective("all_reduce", call.result(1).nbytes)]
            found.append(strategy.by(_meeting(lead, prod(call["normalized_shape"])), comm))
    return found


def _meeting(lead: int, count: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, weight = build.contiguous(args["input"]), args["weight"]
        eps = torch.finfo(build.meta(value).dtype).eps if args["eps"] is None else args["eps"]
        squares = build.op("aten.mul.Tensor", value, value)
        sums = total(build, squares, range(lead, len(build.shape(value))))
        mean = build.op("aten.div.Scalar", sums, count)
        inverse = build.op("aten.rsqrt.default", build.op("aten.add.Scalar", mean, eps))
        made = build.op("aten.mul.Tensor", value, inverse)
        return made if weight is None else build.op("aten.mul.Tensor", made, weight), inverse

    return lower


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    lead = _lead(call)
    found = []
    for dim in shardable_dims(call.shape("input")):
        if dim < lead:
            each = {name: S(dim) for name in ("grad_out", "input", "rstd")}
            found.append(zeros_when_empty(call, call.strategy((S(dim), P), **each)))
        elif _one_dtype(call):
            own = S(dim - lead)
            strategy = call.strategy(
                (S(dim), own), grad_out=S(dim), input=S(dim), **_weight(call, own)
            )
            met = [Collective("all_reduce", call.meta("rstd").nbytes)] * call["output_mask"][0]
            found.append(strategy.by(backward_lower(lead, prod(call["normalized_shape"])), met))
    return found


def backward_lower(lead: int, count: int) -> Lowering:
    """(flow - x * mean(flow * x)) * rstd, with x normalised and flow the gradient times weight."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, value = (build.contiguous(args[name]) for name in ("grad_out", "input"))
        weight, mask = args["weight"], args["output_mask"]
        scaled = build.op("aten.mul.Tensor", value, args["rstd"])
        made: list[Ref | None] = [None, None]
        if mask[0]:
            flow = build.op("aten.mul.Tensor", gradient, weight) if weight else gradient
            product = build.op("aten.mul.Tensor", flow, scaled)
            sums = total(build, product, range(lead, len(build.shape(flow))))
            along = build.op("aten.mul.Tensor", scaled, build.op("aten.div.Scalar", sums, count))
            rest = build.op("aten.sub.Tensor", flow, along)
            made[0] = build.op("aten.mul.Tensor", rest, args["rstd"])
        if mask[1] and weight is not None:
            product, batch = build.op("aten.mul.Tensor", gradient, scaled), tuple(range(lead))
            made[1] = build.op("aten.sum.dim_IntList", product, batch) if batch else product
        return made

    return lower


RULES: dict[str, Rule] = {
    **table("_fused_rms_norm.default", _forward),
    **table("_fused_rms_norm_backward.default", _backward),
}
