"""Kernels with other arguments for blocks: convolutions, CPU RNN layers, cuDNN batch norm.

Convolutions are split by samples, by outgoing channels, by incoming channels, by groups, or by rows
of the picture (``spatial``); kernels take no block without channels, so a rank that has none gives
zeros. Recurrent layers are split by samples. The workspace that their forward leaves for its
backward is good for its own samples only: a forward on blocks leaves an empty one and calls it
split, so that every backward that may meet it is sharded too; and a backward that is sharded makes
a workspace of its own. Batch norm by cuDNN is sharded as the op that is made for any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.builder import bound
from lazygt.passes.sharding.rules import spatial, upsample
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    lower_strategy,
    table,
    zeros,
    zeros_when_empty,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

# -- cuDNN's recurrent layers, split by samples ----------------------------------------------------
# As for the fused layers of CPUs (``kernels``), the reserve that the forward leaves for its
# backward is good for its own samples only: a forward on blocks leaves an empty reserve and calls
# it split, and every backward makes its own by another forward.

_FORWARD = "aten._cudnn_rnn.default"
_SEQUENCES = ("input", "output", "grad_output")
_CUDNN_STATES = ("hx", "cx", "grad_hy", "grad_cy")
#: The forward's arguments behind ``cx``.
_SETTINGS = ("mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout", "train",
             "bidirectional", "batch_sizes", "dropout_state")  # fmt: skip


def _cudnn_samples(call: Call) -> int:
    """Return the dim of a sequence's samples; states have them second."""
    return 0 if call["batch_first"] else 1


def _cudnn_has_samples(call: Call) -> bool:
    """Return whether sequences have a dim of samples to split.

    Sequences of several lengths are packed together, without one.
    """
    return not call["batch_sizes"] and call.shape("input")[_cudnn_samples(call)] > 1


def _placements(call: Call) -> dict[str, Placement]:
    placements: dict[str, Placement] = {name: S(1) for name in _CUDNN_STATES if call.has(name)}
    placements.update({name: S(_cudnn_samples(call)) for name in _SEQUENCES if call.has(name)})
    return placements


def _cudnn_recurrent(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if not _cudnn_has_samples(call):
        return ()
    cy = S(1) if call.has("cx") else R
    strategy = call.strategy((S(_cudnn_samples(call)), S(1), cy, S(0), R), **_placements(call))
    reserve = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        out, hy, cy, _, packed = build.rerun(node, operands)
        return out, hy, cy, zeros(build, reserve, R), packed

    return [zeros_when_empty(call, strategy.by(lower))]


def _cudnn_recurrent_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    whole = [call.strategy(R), call.strategy(R, reserve=S(0))]
    strategies = [strategy.by(_with_own_reserve) for strategy in whole]
    if _cudnn_has_samples(call):
        weights = len(node.results) - 3
        outputs: list[Placement] = [S(_cudnn_samples(call)), S(1), S(1), *[P] * weights]
        inner = call.strategy(outputs, **_placements(call)).by(_with_own_reserve)
        lower = zeros_when_empty(call, inner).lower  # an empty reserve says nothing
        strategies.append(call.strategy(outputs, reserve=S(0), **_placements(call)).by(lower))
    return strategies


def _with_own_reserve(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    args = build.bind(node, operands)
    *_, reserve, packed = build.op(
        _FORWARD, args["input"], args["weight"], args["weight_stride0"], None, args["hx"],
        args["cx"], *(args[name] for name in _SETTINGS)
    )  # fmt: skip
    return build.rerun(node, operands, reserve=reserve, weight_buf=packed)


# -- kernels with other arguments for blocks: convolutions, CPU RNN layers, cuDNN batch norm -------


def _weight_dims(call: Call) -> tuple[int, int]:
    """Return the weight's dims of outgoing and of incoming channels."""
    return (1, 0) if call["transposed"] else (0, 1)


def _batched(call: Call) -> bool:
    return len(call.shape("input")) == len(call.shape("weight"))


def _convolution(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if not _batched(call):
        return ()
    out, into = _weight_dims(call)
    samples, channels, outgoing = (
        call.shape("input")[0],
        call.shape("input")[1],
        call.result().shape[1],
    )
    bias = call.has("bias")
    strategies = [call.strategy(S(0), input=S(0))] if samples > 1 else []
    incoming: list[Strategy] = []
    if call["groups"] == 1 and outgoing > 1:
        strategies.append(call.strategy(S(1), weight=S(out), **({"bias": S(0)} if bias else {})))
    if call["groups"] == 1 and channels > 1:
        incoming.append(_incoming(call, into))
    if call["groups"] > 1 and call["groups"] % parts == 0:
        split: dict[str, Placement] = {"bias": S(0)} if bias else {}
        strategies.append(call.strategy(S(1), input=S(1), weight=S(0), **split).by(_fewer_groups))
    return [
        *(zeros_when_empty(call, strategy) for strategy in strategies),
        *incoming,
        *spatial.by_rows(call),
        *upsample.by_rows(call),
        *_linear_strategies(call),
    ]


def _incoming(call: Call, into: int) -> Strategy:
    """Return the strategy by incoming channels.

    A rank without any still adds its share of the bias.
    """
    strategy = call.strategy(
        P, input=S(1), weight=S(into), **({"bias": P} if call.has("bias") else {})
    )
    result = call.result()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        if build.meta(args["input"]).numel:
            return build.rerun(node, operands)
        zero = zeros(build, result, P)
        if args["bias"] is None:
            return (zero,)
        ones = [1] * (len(result.shape) - 2)
        bias = build.reshape(args["bias"], (1, result.shape[1], *ones))
        return (build.op("aten.add.Tensor", zero, bias),)

    return strategy.by(lower)


def _linear_strategies(call: Call) -> list[Strategy]:
    bias: dict[str, Placement] = {"bias": P} if call.has("bias") else {}
    return [call.strategy(P, **{name: P}, **bias) for name in ("input", "weight")]


def _fewer_groups(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    groups = build.bind(node, operands)["groups"]
    return build.rerun(node, operands, groups=groups // build.parts)


def _convolution_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if not _batched(call):
        return ()
    out, into = _weight_dims(call)
    samples, channels = call.shape("input")[:2]
    outgoing, groups = call.shape("grad_output")[1], call["groups"]
    strategies: list[Strategy] = []
    incoming: list[Strategy] = []
    if samples > 1:
        strategies.append(call.strategy((S(0), P, P), grad_output=S(0), input=S(0)))
    if groups == 1 and outgoing > 1:
        strategy = call.strategy((P, S(out), S(0)), grad_output=S(1), weight=S(out))
        strategies.append(strategy.by(_own_bias(outgoing)))
    if groups == 1 and channels > 1:
        incoming.append(_incoming_backward(call, into))
    if groups > 1 and groups % parts == 0:
        strategy = call.strategy((S(1), S(0), S(0)), grad_output=S(1), input=S(1), weight=S(0))
        strategies.append(strategy.by(_fewer_groups_backward(outgoing)))
    split = [zeros_when_empty(call, strategy) for strategy in strategies]
    by_rows = [*spatial.backward_by_rows(call), *upsample.backward_by_rows(call)]
    return [*split, *incoming, *by_rows, call.strategy(P, grad_output=P)]


def _incoming_backward(call: Call, into: int) -> Strategy:
    """Return the strategy of a backward by incoming channels, with the bias apart.

    Its gradient is whole also on a rank without incoming channels.
    """
    strategy = call.strategy((S(1), S(into), R), input=S(1), weight=S(into))
    wanted = tuple(call["output_mask"])
    dims = tuple(d for d in range(len(call.shape("grad_output"))) if d != 1)
    inner = zeros_when_empty(call, strategy.by(_without_bias(wanted)))

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradients = [*lower_strategy(build, inner, node, operands)]
        if wanted[2]:
            gradient = build.bind(node, operands)["grad_output"]
            gradients[2] = build.op("aten.sum.dim_IntList", gradient, dims)
        return gradients

    return strategy.by(lower)


def _without_bias(wanted: tuple[bool, ...]) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, output_mask=(*wanted[:2], False))

    return lower


def _own_bias(outgoing: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        sizes = build.bind(node, operands)["bias_sizes"]
        block = None if sizes is None else (build.block(outgoing),)
        return build.rerun(node, operands, bias_sizes=block)

    return lower


def _fewer_groups_backward(outgoing: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        block = None if args["bias_sizes"] is None else (build.block(outgoing),)
        return build.rerun(node, operands, groups=args["groups"] // build.parts, bias_sizes=block)

    return lower


_RECURRENT = "aten.mkldnn_rnn_layer.default"
_STATES = ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")


def _samples(call: Call) -> int:
    """Return the dim of a sequence's samples; states have them first."""
    return 0 if call["batch_first"] else 1


def _recurrent_placements(call: Call) -> dict[str, Placement]:
    placements: dict[str, Placement] = {name: S(0) for name in _STATES if call.has(name)}
    placements.update({name: S(_samples(call)) for name in _SEQUENCES if call.has(name)})
    return placements


def _has_samples(call: Call) -> bool:
    """Return whether sequences have a dim of samples to split.

    Sequences of several lengths are packed together, without one.
    """
    return not call["batch_sizes"] and call.shape("input")[_samples(call)] > 1


def _recurrent(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if not _has_samples(call):
        return ()
    strategy = call.strategy((S(_samples(call)), S(0), S(0), S(0)), **_recurrent_placements(call))
    workspace = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        results = build.rerun(node, operands)
        return (*results[:3], zeros(build, workspace, R))

    return [zeros_when_empty(call, strategy.by(lower))]


def _recurrent_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    whole = [call.strategy(R), call.strategy(R, workspace=S(0))]
    strategies = [strategy.by(_with_own_workspace) for strategy in whole]
    if _has_samples(call):
        outputs = (S(_samples(call)), P, P, P, P, S(0), S(0))
        inner = call.strategy(outputs, **_recurrent_placements(call)).by(_with_own_workspace)
        lower = zeros_when_empty(call, inner).lower  # an empty workspace says nothing
        strategies.append(
            call.strategy(outputs, workspace=S(0), **_recurrent_placements(call)).by(lower)
        )
    return strategies


def _with_own_workspace(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    args = build.bind(node, operands)
    weights = [args[f"weight{number}"] for number in range(1, 5)]
    shape = [args[name] for name in ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers",
                                     "has_biases", "bidirectional", "batch_first")]  # fmt: skip
    *_, workspace = build.op(
        _RECURRENT, args["input"], *weights, args["hx_"], args["cx_tmp"], *shape, True
    )
    return build.rerun(node, operands, workspace=workspace)


def batch_norm_rules(native: Rule) -> dict[str, Rule]:
    """Return the rules of cuDNN's batch norm and of its backward.

    Args:
        native: the rule of the ops that are made for any device.
    """
    return {
        "aten.cudnn_batch_norm.default": partial(_cudnn, native),
        "aten.cudnn_batch_norm_backward.default": partial(_cudnn_backward, native),
    }


def _cudnn(rule: Rule, node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of the native op, which computes the same.

    It leaves no reserve; an empty one is called split, so that the backward is sharded too and does
    without.
    """
    reserve = node.fresh[3]
    assert reserve is not None, f"{node.op}: no reserve"

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            results = lower_strategy(build, strategy, _native(node), operands)
            return (*results[:3], zeros(build, reserve, R), *results[3:])

        return lower

    return [
        Strategy(
            strategy.inputs,
            (*strategy.outputs[:3], S(0), *strategy.outputs[3:]),
            lowered(strategy),
            strategy.comm,
        )
        for strategy in rule(_native(node), metas, parts)
    ]


def _native(node: Node) -> Node:
    return replace(node, op="aten.native_batch_norm.default", fresh=node.fresh[:3])


def _cudnn_backward(rule: Rule, node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the native op's strategies for all: a reserve of a forward on blocks has no use."""

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            value, gradient, *rest = operands[:-1]
            return lower_strategy(build, strategy, _native_backward(node), [gradient, value, *rest])

        return lower

    native = _native_backward(node)
    whole = Strategy((R,) * len(native.refs()), (R,) * len(native.results))
    strategies = []
    for strategy in (whole, *rule(native, metas, parts)):
        gradient, value, *rest = strategy.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            strategies.append(Strategy(inputs, strategy.outputs, lowered(strategy), strategy.comm))
    return strategies


def _native_backward(node: Node) -> Node:
    args = bound(node)
    statistics = [args[name] for name in ("running_mean", "running_var", "save_mean", "save_var")]
    given = (args["grad_output"], args["input"], args["weight"], *statistics, True, args["epsilon"])
    return Node("aten.native_batch_norm_backward.default", (*given, (True, True, True)), (),
                node.fresh)  # fmt: skip


RULES: dict[str, Rule] = {
    **table("convolution.default", _convolution),
    **table("convolution_backward.default", _convolution_backward),
    _RECURRENT: _recurrent,
    "aten.mkldnn_rnn_layer_backward.default": _recurrent_backward,
    _FORWARD: _cudnn_recurrent,
    "aten._cudnn_rnn_backward.default": _cudnn_recurrent_backward,
}
