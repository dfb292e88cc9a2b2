"""Layer norm, group norm and their gradients; along a normalised split dim the ranks meet for the
moments of layer norm. Its results are row-major then too, as torch's are: views may ask for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

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
from lazygt.passes.sharding.rules.statistics import moments, total

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def _lead(call: Call) -> int:
    """How many dims are not normalised."""
    return len(call.shape("input")) - len(call["normalized_shape"])


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    lead = _lead(call)
    return [
        call.strategy(S(dim), input=S(dim)) if dim < lead else _normalised(call, dim, lead)
        for dim in shardable_dims(call.shape("input"))
        if dim < lead or _one_dtype(call)
    ]


def _one_dtype(call: Call) -> bool:
    """Mixed precision is left to the kernel."""
    return len({meta.dtype for n in call.node.refs() if (meta := call.metas[n]) is not None}) == 1


def _normalised(call: Call, dim: int, lead: int) -> Strategy:
    comm = [Collective("all_reduce", call.result(1).nbytes)] * 2
    placements = {name: S(dim - lead) for name in ("weight", "bias") if call.has(name)}
    lower = _forward_lower(lead, prod(call["normalized_shape"]))
    return call.strategy((S(dim), R, R), input=S(dim), **placements).by(lower, comm)


def _forward_lower(lead: int, count: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value, weight, bias = build.contiguous(args["input"]), args["weight"], args["bias"]
        dims = range(lead, len(build.shape(value)))
        mean, squares = moments(build, value, dims, count)
        variance = build.op("aten.div.Scalar", squares, count)
        inverse = build.op("aten.rsqrt.default", build.op("aten.add.Scalar", variance, args["eps"]))
        made = build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", value, mean), inverse)
        if weight is not None:
            made = build.op("aten.mul.Tensor", made, weight)
        if bias is not None:
            made = build.op("aten.add.Tensor", made, bias)
        return made, mean, inverse

    return lower


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    lead = _lead(call)
    found = []
    for dim in shardable_dims(call.shape("input")):
        if dim < lead:
            each = {name: S(dim) for name in ("grad_out", "input", "mean", "rstd")}
            found.append(call.strategy((S(dim), P, P), **each))
        elif _one_dtype(call):
            found.append(_normalised_backward(call, dim, lead))
    return found


def _normalised_backward(call: Call, dim: int, lead: int) -> Strategy:
    own = S(dim - lead)
    placements: dict[str, Placement] = {"grad_out": S(dim), "input": S(dim)}
    placements |= {name: own for name in ("weight", "bias") if call.has(name)}
    comm = (
        [Collective("all_reduce", call.meta("mean").nbytes)] * 2 if call["output_mask"][0] else []
    )
    lower = _backward_lower(lead, prod(call["normalized_shape"]))
    return call.strategy((S(dim), own, own), **placements).by(lower, comm)


def _backward_lower(lead: int, count: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, value = (build.contiguous(args[name]) for name in ("grad_out", "input"))
        weight, mask = args["weight"], args["output_mask"]
        distance = build.op("aten.sub.Tensor", value, args["mean"])
        scaled = build.op("aten.mul.Tensor", distance, args["rstd"])
        product = build.op("aten.mul.Tensor", gradient, scaled)
        batch = tuple(range(lead))
        made: list[Ref | None] = [None, None, None]
        if mask[0]:
            flow = build.op("aten.mul.Tensor", gradient, weight) if weight else gradient
            made[0] = _input_gradient(build, flow, scaled, args["rstd"], lead, count)
        if mask[1]:
            made[1] = build.op("aten.sum.dim_IntList", product, batch) if batch else product
        if mask[2]:
            made[2] = build.op("aten.sum.dim_IntList", gradient, batch) if batch else gradient
        return made

    return lower


def _input_gradient(
    build: Builder, flow: Ref, scaled: Ref, inverse: Ref, lead: int, count: int
) -> Ref:
    """(flow - mean(flow) - scaled * mean(flow * scaled)) / deviation, means over all blocks."""
    dims = range(lead, len(build.shape(flow)))
    product = build.op("aten.mul.Tensor", flow, scaled)
    along = build.op("aten.div.Scalar", total(build, product, dims), count)
    mean = build.op("aten.div.Scalar", total(build, flow, dims), count)
    rest = build.op("aten.sub.Tensor", build.op("aten.sub.Tensor", flow, mean),
                    build.op("aten.mul.Tensor", scaled, along))  # fmt: skip
    made: Ref = build.op("aten.mul.Tensor", rest, inverse)
    return made


def _group_norm(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """By samples, or by groups where each rank gets as many."""
    call = Call(node, metas, parts)
    found = []
    if call["N"] > 1:
        found.append(call.strategy(S(0), input=S(0)).by(_smaller(N=call["N"])))
    if call["group"] > 1 and call["group"] % parts == 0:
        placements = {name: S(0) for name in ("weight", "bias") if call.has(name)}
        strategy = call.strategy(S(1), input=S(1), **placements)
        found.append(strategy.by(_smaller(C=call["C"], group=call["group"])))
    return [zeros_when_empty(call, strategy) for strategy in found]


def _group_norm_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    each: dict[str, Placement] = dict.fromkeys(("grad_out", "input", "mean", "rstd"), S(0))
    found = []
    if call["N"] > 1:
        found.append(call.strategy((S(0), P, P), **each).by(_smaller(N=call["N"])))
    if call["group"] > 1 and call["group"] % parts == 0:
        placements = {name: S(1) for name in each} | (
            {"weight": S(0)} if call.has("weight") else {}
        )
        strategy = call.strategy((S(1), S(0), S(0)), **placements)
        found.append(strategy.by(_smaller(C=call["C"], group=call["group"])))
    return [zeros_when_empty(call, strategy) for strategy in found]


def _smaller(**sizes: int) -> Lowering:
    """The same op with this rank's share of the sizes."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        mine = {name: build.block(size) for name, size in sizes.items()}
        return build.rerun(node, operands, **mine)

    return lower


RULES: dict[str, Rule] = {
    **table("native_layer_norm.default", _forward),
    **table("native_layer_norm_backward.default", _backward),
    **table("native_group_norm.default", _group_norm),
    **table("native_group_norm_backward.default", _group_norm_backward),
}
