"""Batch norm: split by channels, or by samples, where the ranks meet for the batch's moments.

So a batch on several ranks has the statistics that it has on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lazygt.graph.node import Arg, Node, Ref
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
    local_lowering,
    lower_strategy,
    shardable_dims,
    table,
    zeros,
    zeros_when_empty,
)
from lazygt.passes.sharding.rules.statistics import moments, total

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _training(call: Call) -> bool:
    flag = "train" if "train" in call.args else "training"
    return bool(call.args.get(flag, "no_training" not in call.node.op))


def _one_dtype(call: Call) -> bool:
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    return len({meta.dtype for meta in metas}) == 1


def _channel_placements(call: Call, names: Sequence[str]) -> dict[str, Placement]:
    """Statistics that are not kept have no elements."""
    kept = [name for name in names if call.has(name) and call.meta(name).numel]
    return dict.fromkeys(kept, S(0))


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape, training = call.shape("input"), _training(call)
    found = []
    for dim in shardable_dims(shape):
        if dim == 1:
            placements = _channel_placements(call, _PER_CHANNEL)
            each: list[Placement] = [
                S(0) if m is not None and m.numel else R for m in node.results[1:]
            ]
            strategy = call.strategy([S(1), *each], input=S(1), **placements)
            found.append(zeros_when_empty(call, strategy))
        elif not training:
            found.append(call.strategy(_first(node, S(dim)), input=S(dim)))
        elif _one_dtype(call):
            count = call.meta("input").numel // max(shape[1], 1)
            comm = [Collective("all_reduce", call.result(1).nbytes)] * 2
            strategy = call.strategy(_first(node, S(dim)), input=S(dim))
            found.append(strategy.by(local_lowering(_synchronised(count)), comm))
    return found


def _first(node: Node, placement: Placement) -> list[Placement]:
    """The placement of the first result, and R for the statistics."""
    return [placement, *[R] * (len(node.results) - 1)]


def _synchronised(count: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        value = args["input"]
        shape = build.shape(value)
        channel, dims = shape[1:2], [d for d in range(len(shape)) if d != 1]
        mean, squares = moments(build, value, dims, count)
        variance = build.op("aten.div.Scalar", squares, count)
        inverse = build.op("aten.rsqrt.default", build.op("aten.add.Scalar", variance, args["eps"]))
        made = build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", value, mean), inverse)
        made = _affine(build, made, args["weight"], args["bias"])
        flat = [build.reshape(one, channel) for one in (mean, inverse)]
        return [made, *flat, *_running(build, node, args, flat[0], squares, count)]

    return lower


def _affine(build: Builder, value: Ref, weight: Arg, bias: Arg) -> Ref:
    if weight is not None:
        value = build.op("aten.mul.Tensor", value, _along(build, weight, value))
    if bias is not None:
        value = build.op("aten.add.Tensor", value, _along(build, bias, value))
    return value


def _along(build: Builder, vector: Ref, value: Ref) -> Ref:
    """A number a channel, as it is broadcast to ``value``."""
    ones = [1] * (len(build.shape(value)) - 2)
    return build.reshape(vector, (1, build.shape(value)[1], *ones))


def _running(
    build: Builder, node: Node, args: dict[str, Arg], mean: Ref, squares: Ref, count: int
) -> list[Ref]:
    """The new versions of the running statistics; torch keeps the unbiased variance."""
    if not node.writes:
        return []
    unbiased = build.op("aten.div.Scalar", squares, max(count - 1, 1))
    unbiased = build.reshape(unbiased, build.shape(mean))
    return [
        build.op("aten.lerp_.Scalar", args[name], new, args["momentum"])
        for name, new in (("running_mean", mean), ("running_var", unbiased))
    ]


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape, training = call.shape("input"), _training(call)
    found = []
    for dim in shardable_dims(shape):
        if dim == 1:
            placements = _channel_placements(call, _PER_CHANNEL)
            strategy = call.strategy((S(1), S(0), S(0)), grad_out=S(1), input=S(1), **placements)
            found.append(zeros_when_empty(call, strategy))
        elif not training:
            strategy = call.strategy((S(dim), P, P), grad_out=S(dim), input=S(dim))
            found.append(zeros_when_empty(call, strategy))
        elif _one_dtype(call):
            count = call.meta("input").numel // max(shape[1], 1)
            comm = [Collective("all_reduce", call.meta("save_mean").nbytes)] * 2
            lower = local_lowering(_synchronised_backward(count))
            placements = {"grad_out": S(dim), "input": S(dim)}
            found.append(call.strategy((S(dim), R, R), **placements).by(lower, comm))
    return found


def _synchronised_backward(count: int) -> Lowering:
    """invstd * weight * (g - mean(g) - x * mean(g * x)), x normalised, means over all ranks."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, value = args["grad_out"], args["input"]
        dims = [d for d in range(len(build.shape(value))) if d != 1]
        inverse = _along(build, args["save_invstd"], value)
        distance = build.op("aten.sub.Tensor", value, _along(build, args["save_mean"], value))
        scaled = build.op("aten.mul.Tensor", distance, inverse)
        products = total(build, build.op("aten.mul.Tensor", gradient, scaled), dims)
        sums = total(build, gradient, dims)
        along = build.op("aten.mul.Tensor", scaled, build.op("aten.div.Scalar", products, count))
        rest = build.op("aten.sub.Tensor", gradient, build.op("aten.div.Scalar", sums, count))
        rest = build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", rest, along), inverse)
        channel = build.shape(value)[1:2]
        made = [_affine(build, rest, args["weight"], None),
                build.reshape(products, channel), build.reshape(sums, channel)]  # fmt: skip
        wanted = args["output_mask"]
        return [one if want else None for one, want in zip(made, wanted, strict=True)]

    return lower


def _cudnn(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """As the native op, which computes the same. The reserve that there is not is called split, so
    that the backward is sharded too and does without."""
    reserve = node.fresh[3]
    assert reserve is not None, f"{node.op}: no reserve"
    native = replace(node, op="aten.native_batch_norm.default", fresh=node.fresh[:3])

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            made = lower_strategy(build, strategy, native, operands)
            return (*made[:3], zeros(build, reserve, R), *made[3:])

        return lower

    return [
        Strategy(
            strategy.inputs,
            (*strategy.outputs[:3], S(0), *strategy.outputs[3:]),
            lowered(strategy),
            strategy.comm,
        )
        for strategy in _forward(native, metas, parts)
    ]


def _cudnn_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """As the native op, in all strategies: the reserve of a forward on blocks is of no use."""
    call = Call(node, metas, parts)
    statistics = [call[name] for name in ("running_mean", "running_var", "save_mean", "save_var")]
    args = (call["grad_output"], call["input"], call["weight"], *statistics, True, call["epsilon"])
    native = Node("aten.native_batch_norm_backward.default", (*args, (True, True, True)), (),
                  node.fresh)  # fmt: skip

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            value, gradient, *rest = operands[:-1]
            return lower_strategy(build, strategy, native, [gradient, value, *rest])

        return lower

    whole = Strategy((R,) * len(native.refs()), (R,) * len(native.results))
    found = []
    for strategy in (whole, *_backward(native, metas, parts)):
        gradient, value, *rest = strategy.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            found.append(Strategy(inputs, strategy.outputs, lowered(strategy), strategy.comm))
    return found


RULES: dict[str, Rule] = {
    **table("cudnn_batch_norm.default", _cudnn),
    **table("cudnn_batch_norm_backward.default", _cudnn_backward),
    **table(
        "native_batch_norm.default _native_batch_norm_legit.default "
        "_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training.default",
        _forward,
    ),
    **table("native_batch_norm_backward.default", _backward),
}
