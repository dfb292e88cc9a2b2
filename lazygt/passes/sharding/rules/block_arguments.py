"""Ops that need other arguments on blocks: convolutions, recurrent layers, cuDNN batch norm.

- Convolutions are sharded by samples, output channels, input channels, groups, or along a spatial
  dim (``spatial``). The kernels reject blocks without channels; a rank with one returns zeros.
- Recurrent layers are sharded by samples. The workspace that a forward saves for the backward is
  valid for the same samples only. A sharded forward therefore returns an empty workspace with
  placement S(0), and every backward that may get this workspace recomputes the forward.
- cuDNN batch norm uses the strategies of ``native_batch_norm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.lower.builder import bound
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
    from lazygt.passes.sharding.lower.builder import Builder

# -- cuDNN's recurrent layers, sharded by samples --------------------------------------------------
# The reserve that a forward saves for the backward is valid for the same samples only. A sharded
# forward returns an empty reserve with placement S(0), and every backward recomputes the reserve by
# another forward.

_FORWARD = "aten._cudnn_rnn.default"
_SEQUENCES = ("input", "output", "grad_output")
_CUDNN_STATES = ("hx", "cx", "grad_hy", "grad_cy")
#: The forward's arguments after ``cx``.
_SETTINGS = ("mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout", "train",
             "bidirectional", "batch_sizes", "dropout_state")  # fmt: skip


def _cudnn_samples_dim(call: Call) -> int:
    """Return the samples dim of cuDNN sequences; in states it is dim 1."""
    return 0 if call["batch_first"] else 1


def _cudnn_has_samples(call: Call) -> bool:
    """Return whether sequences have a dim of samples to split.

    Sequences of several lengths are packed together, without one.
    """
    return not call["batch_sizes"] and call.shape("input")[_cudnn_samples_dim(call)] > 1


def _cudnn_placements(call: Call) -> dict[str, Placement]:
    """Return the placements of states and sequences sharded by samples."""
    placements: dict[str, Placement] = {name: S(1) for name in _CUDNN_STATES if call.has(name)}
    placements.update({name: S(_cudnn_samples_dim(call)) for name in _SEQUENCES if call.has(name)})
    return placements


def _cudnn_recurrent(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategy of ``_cudnn_rnn`` sharded by samples."""
    call = Call(node, metas, axis_size)
    if not _cudnn_has_samples(call):
        return ()
    cy = S(1) if call.has("cx") else R
    strategy = call.strategy(
        (S(_cudnn_samples_dim(call)), S(1), cy, S(0), R), **_cudnn_placements(call)
    )
    reserve = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        out, hy, cy, _, packed = build.rerun(node, operands)
        return out, hy, cy, zeros(build, reserve, R), packed

    return [zeros_when_empty(call, strategy.by(lower))]


def _cudnn_recurrent_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``_cudnn_rnn_backward``: replicated, or sharded by samples."""
    call = Call(node, metas, axis_size)
    replicated = [call.strategy(R), call.strategy(R, reserve=S(0))]
    strategies = [strategy.by(_with_recomputed_reserve) for strategy in replicated]
    if _cudnn_has_samples(call):
        weights = len(node.results) - 3
        outputs: list[Placement] = [S(_cudnn_samples_dim(call)), S(1), S(1), *[P] * weights]
        by_samples = call.strategy(outputs, **_cudnn_placements(call)).by(_with_recomputed_reserve)
        lower = zeros_when_empty(call, by_samples).lower  # the reserve is empty on every rank
        strategies.append(call.strategy(outputs, reserve=S(0), **_cudnn_placements(call)).by(lower))
    return strategies


def _with_recomputed_reserve(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run the backward with a reserve from another forward on the same operands."""
    args = build.bind(node, operands)
    *_, reserve, packed = build.op(
        _FORWARD, args["input"], args["weight"], args["weight_stride0"], None, args["hx"],
        args["cx"], *(args[name] for name in _SETTINGS)
    )  # fmt: skip
    return build.rerun(node, operands, reserve=reserve, weight_buf=packed)


# -- convolutions ----------------------------------------------------------------------------------


def _weight_dims(call: Call) -> tuple[int, int]:
    """Return the weight's dims of output and of input channels."""
    return (1, 0) if call["transposed"] else (0, 1)


def _is_batched(call: Call) -> bool:
    """Return whether the input has a batch dim."""
    return len(call.shape("input")) == len(call.shape("weight"))


def _convolution(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a convolution: by samples, channels, groups, rows, or partial."""
    call = Call(node, metas, axis_size)
    if not _is_batched(call):
        return ()
    output_dim, input_dim = _weight_dims(call)
    samples, input_channels, output_channels = (
        call.shape("input")[0],
        call.shape("input")[1],
        call.result().shape[1],
    )
    bias = call.has("bias")
    strategies = [call.strategy(S(0), input=S(0))] if samples > 1 else []
    by_input_channels: list[Strategy] = []
    if call["groups"] == 1 and output_channels > 1:
        strategies.append(
            call.strategy(S(1), weight=S(output_dim), **({"bias": S(0)} if bias else {}))
        )
    if call["groups"] == 1 and input_channels > 1:
        by_input_channels.append(_by_input_channels(call, input_dim))
    if call["groups"] > 1 and call["groups"] % axis_size == 0:
        bias_placement: dict[str, Placement] = {"bias": S(0)} if bias else {}
        strategies.append(
            call.strategy(S(1), input=S(1), weight=S(0), **bias_placement).by(_local_groups)
        )
    return [
        *(zeros_when_empty(call, strategy) for strategy in strategies),
        *by_input_channels,
        *spatial.by_rows(call),
        *upsample.by_rows(call),
        *_partial_strategies(call),
    ]


def _by_input_channels(call: Call, input_dim: int) -> Strategy:
    """Return the strategy sharded by input channels, with a partial result.

    A rank without channels returns only its partial bias.
    """
    strategy = call.strategy(
        P, input=S(1), weight=S(input_dim), **({"bias": P} if call.has("bias") else {})
    )
    result = call.result()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        if build.meta(args["input"]).numel:
            return build.rerun(node, operands)
        zero_result = zeros(build, result, P)
        if args["bias"] is None:
            return (zero_result,)
        ones = [1] * (len(result.shape) - 2)
        bias = build.reshape(args["bias"], (1, result.shape[1], *ones))
        return (build.op("aten.add.Tensor", zero_result, bias),)

    return strategy.by(lower)


def _partial_strategies(call: Call) -> list[Strategy]:
    """Return the strategies of a partial input or weight; the bias is then partial too."""
    bias: dict[str, Placement] = {"bias": P} if call.has("bias") else {}
    return [call.strategy(P, **{name: P}, **bias) for name in ("input", "weight")]


def _local_groups(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run a convolution with the number of groups of this rank's block."""
    groups = build.bind(node, operands)["groups"]
    return build.rerun(node, operands, groups=groups // build.parts)


def _convolution_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a convolution's backward; see ``_convolution``."""
    call = Call(node, metas, axis_size)
    if not _is_batched(call):
        return ()
    output_dim, input_dim = _weight_dims(call)
    samples, input_channels = call.shape("input")[:2]
    output_channels, groups = call.shape("grad_output")[1], call["groups"]
    strategies: list[Strategy] = []
    by_input_channels: list[Strategy] = []
    if samples > 1:
        strategies.append(call.strategy((S(0), P, P), grad_output=S(0), input=S(0)))
    if groups == 1 and output_channels > 1:
        strategy = call.strategy((P, S(output_dim), S(0)), grad_output=S(1), weight=S(output_dim))
        strategies.append(strategy.by(_local_bias_sizes(output_channels)))
    if groups == 1 and input_channels > 1:
        by_input_channels.append(_backward_by_input_channels(call, input_dim))
    if groups > 1 and groups % axis_size == 0:
        strategy = call.strategy((S(1), S(0), S(0)), grad_output=S(1), input=S(1), weight=S(0))
        strategies.append(strategy.by(_local_groups_backward(output_channels)))
    padded = [zeros_when_empty(call, strategy) for strategy in strategies]
    by_rows = [*spatial.backward_by_rows(call), *upsample.backward_by_rows(call)]
    return [*padded, *by_input_channels, *by_rows, call.strategy(P, grad_output=P)]


def _backward_by_input_channels(call: Call, input_dim: int) -> Strategy:
    """Return the strategy of a backward sharded by input channels.

    The gradient of the bias is computed by a separate sum, so it is also complete on a rank without
    input channels.
    """
    strategy = call.strategy((S(1), S(input_dim), R), input=S(1), weight=S(input_dim))
    output_mask = tuple(call["output_mask"])
    dims = tuple(d for d in range(len(call.shape("grad_output"))) if d != 1)
    without_bias = zeros_when_empty(call, strategy.by(_without_bias(output_mask)))

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradients = [*lower_strategy(build, without_bias, node, operands)]
        if output_mask[2]:
            gradient = build.bind(node, operands)["grad_output"]
            gradients[2] = build.op("aten.sum.dim_IntList", gradient, dims)
        return gradients

    return strategy.by(lower)


def _without_bias(output_mask: tuple[bool, ...]) -> Lowering:
    """Return the lowering of a backward without the gradient of the bias."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, output_mask=(*output_mask[:2], False))

    return lower


def _local_bias_sizes(output_channels: int) -> Lowering:
    """Return the lowering of a backward with the local size of the bias."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        bias_sizes = build.bind(node, operands)["bias_sizes"]
        local_sizes = None if bias_sizes is None else (build.block(output_channels),)
        return build.rerun(node, operands, bias_sizes=local_sizes)

    return lower


def _local_groups_backward(output_channels: int) -> Lowering:
    """Return the lowering of a backward with the local number of groups and bias size."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        local_sizes = None if args["bias_sizes"] is None else (build.block(output_channels),)
        return build.rerun(
            node, operands, groups=args["groups"] // build.parts, bias_sizes=local_sizes
        )

    return lower


# -- CPU recurrent layers, sharded by samples -----------------------------------------------------

_RECURRENT = "aten.mkldnn_rnn_layer.default"
_STATES = ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")


def _samples_dim(call: Call) -> int:
    """Return the samples dim of CPU sequences; in states it is dim 0."""
    return 0 if call["batch_first"] else 1


def _recurrent_placements(call: Call) -> dict[str, Placement]:
    """Return the placements of states and sequences sharded by samples."""
    placements: dict[str, Placement] = {name: S(0) for name in _STATES if call.has(name)}
    placements.update({name: S(_samples_dim(call)) for name in _SEQUENCES if call.has(name)})
    return placements


def _has_samples(call: Call) -> bool:
    """Return whether sequences have a dim of samples to split.

    Sequences of several lengths are packed together, without one.
    """
    return not call["batch_sizes"] and call.shape("input")[_samples_dim(call)] > 1


def _recurrent(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategy of ``mkldnn_rnn_layer`` sharded by samples."""
    call = Call(node, metas, axis_size)
    if not _has_samples(call):
        return ()
    strategy = call.strategy(
        (S(_samples_dim(call)), S(0), S(0), S(0)), **_recurrent_placements(call)
    )
    workspace = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        results = build.rerun(node, operands)
        return (*results[:3], zeros(build, workspace, R))

    return [zeros_when_empty(call, strategy.by(lower))]


def _recurrent_backward(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of its backward: replicated, or sharded by samples."""
    call = Call(node, metas, axis_size)
    replicated = [call.strategy(R), call.strategy(R, workspace=S(0))]
    strategies = [strategy.by(_with_recomputed_workspace) for strategy in replicated]
    if _has_samples(call):
        outputs = (S(_samples_dim(call)), P, P, P, P, S(0), S(0))
        by_samples = call.strategy(outputs, **_recurrent_placements(call)).by(
            _with_recomputed_workspace
        )
        lower = zeros_when_empty(call, by_samples).lower  # the workspace is empty on every rank
        strategies.append(
            call.strategy(outputs, workspace=S(0), **_recurrent_placements(call)).by(lower)
        )
    return strategies


def _with_recomputed_workspace(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run the backward with a workspace from another forward on the same operands."""
    args = build.bind(node, operands)
    weights = [args[f"weight{number}"] for number in range(1, 5)]
    names = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases",
             "bidirectional", "batch_first")  # fmt: skip
    settings = [args[name] for name in names]
    *_, workspace = build.op(
        _RECURRENT, args["input"], *weights, args["hx_"], args["cx_tmp"], *settings, True
    )
    return build.rerun(node, operands, workspace=workspace)


# -- cuDNN batch norm ------------------------------------------------------------------------------


def batch_norm_rules(native: Rule) -> dict[str, Rule]:
    """Return the rules of cuDNN's batch norm and of its backward.

    Args:
        native: rule of ``native_batch_norm`` and its backward.
    """
    return {
        "aten.cudnn_batch_norm.default": partial(_cudnn_batch_norm, native),
        "aten.cudnn_batch_norm_backward.default": partial(_cudnn_batch_norm_backward, native),
    }


def _cudnn_batch_norm(rule: Rule, node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``native_batch_norm``, which computes the same.

    The native op has no reserve. An empty reserve with placement S(0) is returned instead, so that
    only strategies of the backward that ignore the reserve accept it.
    """
    reserve = node.fresh[3]
    assert reserve is not None, f"{node.op}: no reserve"

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            results = lower_strategy(build, strategy, _native_batch_norm(node), operands)
            return (*results[:3], zeros(build, reserve, R), *results[3:])

        return lower

    return [
        Strategy(
            strategy.inputs,
            (*strategy.outputs[:3], S(0), *strategy.outputs[3:]),
            lowered(strategy),
            strategy.comm,
        )
        for strategy in rule(_native_batch_norm(node), metas, axis_size)
    ]


def _native_batch_norm(node: Node) -> Node:
    """Return the equivalent ``native_batch_norm`` node, without the reserve."""
    return replace(node, op="aten.native_batch_norm.default", fresh=node.fresh[:3])


def _cudnn_batch_norm_backward(
    rule: Rule, node: Node, metas: Metas, axis_size: int
) -> Sequence[Strategy]:
    """Return the strategies of the native backward; the reserve is ignored in all of them."""

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            value, gradient, *rest = operands[:-1]
            return lower_strategy(
                build, strategy, _native_batch_norm_backward(node), [gradient, value, *rest]
            )

        return lower

    native = _native_batch_norm_backward(node)
    replicated = Strategy((R,) * len(native.refs()), (R,) * len(native.results))
    strategies = []
    for strategy in (replicated, *rule(native, metas, axis_size)):
        gradient, value, *rest = strategy.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            strategies.append(Strategy(inputs, strategy.outputs, lowered(strategy), strategy.comm))
    return strategies


def _native_batch_norm_backward(node: Node) -> Node:
    """Return the equivalent ``native_batch_norm_backward`` node."""
    args = bound(node)
    statistics = [args[name] for name in ("running_mean", "running_var", "save_mean", "save_var")]
    native_args = (
        args["grad_output"],
        args["input"],
        args["weight"],
        *statistics,
        True,
        args["epsilon"],
    )
    return Node("aten.native_batch_norm_backward.default", (*native_args, (True, True, True)), (),
                node.fresh)  # fmt: skip


RULES: dict[str, Rule] = {
    **table("convolution.default", _convolution),
    **table("convolution_backward.default", _convolution_backward),
    _RECURRENT: _recurrent,
    "aten.mkldnn_rnn_layer_backward.default": _recurrent_backward,
    _FORWARD: _cudnn_recurrent,
    "aten._cudnn_rnn_backward.default": _cudnn_recurrent_backward,
}
