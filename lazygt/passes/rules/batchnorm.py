"""Batch norm: split by channels, or by samples, where the ranks meet for the batch's moments.

So a batch on several ranks has the statistics that it has on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lazygt.graph.label import Label
from lazygt.graph.node import Arg, Node, Ref
from lazygt.passes.rules.base import (
    Call,
    Collective,
    Lower,
    Metas,
    P,
    R,
    Row,
    Rule,
    S,
    Values,
    anywhere,
    lower_row,
    splittable,
    table,
    zeros,
    zeros_when_empty,
)
from lazygt.passes.rules.statistics import moments, total

if TYPE_CHECKING:
    from lazygt.passes.build import Builder

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")


def _training(call: Call) -> bool:
    flag = "train" if "train" in call.args else "training"
    return bool(call.args.get(flag, "no_training" not in call.node.op))


def _one_dtype(call: Call) -> bool:
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    return len({meta.dtype for meta in metas}) == 1


def _channel_labels(call: Call, names: Sequence[str]) -> dict[str, Label]:
    """Statistics that are not kept have no elements."""
    kept = [name for name in names if call.has(name) and call.meta(name).numel]
    return dict.fromkeys(kept, S(0))


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    shape, training = call.shape("input"), _training(call)
    found = []
    for dim in splittable(shape):
        if dim == 1:
            labels = _channel_labels(call, _PER_CHANNEL)
            each: list[Label] = [S(0) if m is not None and m.numel else R for m in node.results[1:]]
            row = call.row([S(1), *each], input=S(1), **labels)
            found.append(zeros_when_empty(call, row))
        elif not training:
            found.append(call.row(_first(node, S(dim)), input=S(dim)))
        elif _one_dtype(call):
            count = call.meta("input").numel // max(shape[1], 1)
            comm = [Collective("all_reduce", call.result(1).nbytes)] * 2
            row = call.row(_first(node, S(dim)), input=S(dim))
            found.append(row.by(anywhere(_synchronised(count)), comm))
    return found


def _first(node: Node, label: Label) -> list[Label]:
    """The label of the first result, and R for the statistics."""
    return [label, *[R] * (len(node.results) - 1)]


def _synchronised(count: int) -> Lower:
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


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    shape, training = call.shape("input"), _training(call)
    found = []
    for dim in splittable(shape):
        if dim == 1:
            labels = _channel_labels(call, _PER_CHANNEL)
            row = call.row((S(1), S(0), S(0)), grad_out=S(1), input=S(1), **labels)
            found.append(zeros_when_empty(call, row))
        elif not training:
            row = call.row((S(dim), P, P), grad_out=S(dim), input=S(dim))
            found.append(zeros_when_empty(call, row))
        elif _one_dtype(call):
            count = call.meta("input").numel // max(shape[1], 1)
            comm = [Collective("all_reduce", call.meta("save_mean").nbytes)] * 2
            lower = anywhere(_synchronised_backward(count))
            labels = {"grad_out": S(dim), "input": S(dim)}
            found.append(call.row((S(dim), R, R), **labels).by(lower, comm))
    return found


def _synchronised_backward(count: int) -> Lower:
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


def _cudnn(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """As the native op, which computes the same. The reserve that there is not is called split, so
    that the backward is sharded too and does without."""
    reserve = node.fresh[3]
    assert reserve is not None, f"{node.op}: no reserve"
    native = replace(node, op="aten.native_batch_norm.default", fresh=node.fresh[:3])

    def lowered(row: Row) -> Lower:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            made = lower_row(build, row, native, operands)
            return (*made[:3], zeros(build, reserve, R), *made[3:])

        return lower

    return [
        Row(row.inputs, (*row.outputs[:3], S(0), *row.outputs[3:]), lowered(row), row.comm)
        for row in _forward(native, metas, parts)
    ]


def _cudnn_backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """As the native op, in all rows: the reserve of a forward on blocks is of no use."""
    call = Call(node, metas, parts)
    statistics = [call[name] for name in ("running_mean", "running_var", "save_mean", "save_var")]
    args = (call["grad_output"], call["input"], call["weight"], *statistics, True, call["epsilon"])
    native = Node("aten.native_batch_norm_backward.default", (*args, (True, True, True)), (),
                  node.fresh)  # fmt: skip

    def lowered(row: Row) -> Lower:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            value, gradient, *rest = operands[:-1]
            return lower_row(build, row, native, [gradient, value, *rest])

        return lower

    whole = Row((R,) * len(native.refs()), (R,) * len(native.results))
    found = []
    for row in (whole, *_backward(native, metas, parts)):
        gradient, value, *rest = row.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            found.append(Row(inputs, row.outputs, lowered(row), row.comm))
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
