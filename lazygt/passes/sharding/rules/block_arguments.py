"""Ops that need other arguments on blocks: convolutions, recurrent layers, cuDNN batch norm.

- Convolutions are sharded by samples, output channels, input channels, groups, or along a spatial
  dim (``windows``). The kernels reject blocks without channels; a rank with one returns zeros.
- Recurrent layers are sharded by samples. The workspace that a forward saves for the backward is
  valid for the same samples only. A sharded forward therefore returns an empty workspace with
  placement S(0), and every backward recomputes the workspace by another forward.
- cuDNN batch norm uses the strategies of ``native_batch_norm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lazygt.graph.node import Arg, Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.lower.builder import Builder, bound, schema
from lazygt.passes.sharding.rules import windows
from lazygt.passes.sharding.rules.strategy import (
    Call,
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

# -- convolutions ----------------------------------------------------------------------------------


def _weight_dims(call: Call) -> tuple[int, int]:
    """Return the weight's dims of output and of input channels."""
    return (1, 0) if call["transposed"] else (0, 1)


def _is_batched(call: Call) -> bool:
    """Return whether the input has a batch dim."""
    return len(call.shape("input")) == len(call.shape("weight"))


def _convolution(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a convolution: by samples, channels, groups, rows, or partial."""
    if not _is_batched(call):
        return ()
    output_dim, input_dim = _weight_dims(call)
    (samples, input_channels), groups = call.shape("input")[:2], call["groups"]
    bias: dict[str, Placement] = {"bias": S(0)} if call.has("bias") else {}
    strategies = [call.strategy(S(0), input=S(0))] if samples > 1 else []
    by_input_channels: list[Strategy] = []
    if groups == 1 and call.result().shape[1] > 1:
        strategies.append(call.strategy(S(1), weight=S(output_dim), **bias))
    if groups == 1 and input_channels > 1:
        by_input_channels.append(_by_input_channels(call, input_dim))
    if groups > 1 and groups % call.axis_size == 0:
        by_groups = call.strategy(S(1), input=S(1), weight=S(0), **bias)
        strategies.append(by_groups.by(_local_groups))
    return [
        *(zeros_when_empty(call, strategy) for strategy in strategies),
        *by_input_channels,
        *windows.convolution(call),
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


def _convolution_backward(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a convolution's backward; see ``_convolution``."""
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
        strategies.append(strategy.by(partial(_lower_local_channels, output_channels)))
    if groups == 1 and input_channels > 1:
        by_input_channels.append(_backward_by_input_channels(call, input_dim))
    if groups > 1 and groups % call.axis_size == 0:
        strategy = call.strategy((S(1), S(0), S(0)), grad_output=S(1), input=S(1), weight=S(0))
        strategies.append(strategy.by(partial(_lower_local_channels, output_channels)))
    padded = [zeros_when_empty(call, strategy) for strategy in strategies]
    by_rows = windows.convolution_backward(call)
    return [*padded, *by_input_channels, *by_rows, call.strategy(P, grad_output=P)]


def _backward_by_input_channels(call: Call, input_dim: int) -> Strategy:
    """Return the strategy of a backward sharded by input channels.

    The gradient of the bias is computed by a separate sum, so it is also complete on a rank without
    input channels.
    """
    strategy = call.strategy((S(1), S(input_dim), R), input=S(1), weight=S(input_dim))
    output_mask = tuple(call["output_mask"])
    dims = tuple(d for d in range(len(call.shape("grad_output"))) if d != 1)
    mask = (*output_mask[:2], False)
    without_bias = zeros_when_empty(
        call,
        strategy.by(lambda build, node, operands: build.rerun(node, operands, output_mask=mask)),
    )

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        gradients = [*lower_strategy(build, without_bias, node, operands)]
        if output_mask[2]:
            gradient = build.bind(node, operands)["grad_output"]
            gradients[2] = build.op("aten.sum.dim_IntList", gradient, dims)
        return gradients

    return strategy.by(lower)


def _lower_local_channels(
    channels: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run a backward with the local numbers of groups and of channels."""
    args = build.bind(node, operands)
    changes: dict[str, Arg] = (
        {"groups": args["groups"] // build.parts} if args["groups"] > 1 else {}
    )
    if args["bias_sizes"] is not None:
        changes["bias_sizes"] = (build.block(channels),)
    return build.rerun(node, operands, **changes)


# -- recurrent layers, sharded by samples ----------------------------------------------------------

_SEQUENCES = ("input", "output", "grad_output")


class _Layers(NamedTuple):
    """Recurrent layers of one library."""

    forward: str  # op
    states: tuple[str, ...]  # arguments with states, the forward's first
    states_dim: int  # dim of the samples in states
    #: arguments of the backward with the forward's results from the workspace on
    saved: tuple[str, ...]
    #: function of the backward's arguments to those of the forward that differ
    forward_arguments: Callable[[dict[str, Arg]], dict[str, Arg]]
    weights_last: bool  # whether the gradients of weights come after those of states

    def samples_dim(self, call: Call) -> int:
        """Return the dim of the samples in sequences."""
        return 0 if call["batch_first"] else 1

    def placements(self, call: Call) -> dict[str, Placement]:
        """Return the placements of states and sequences sharded by samples.

        Empty if there are no samples to split: sequences of several lengths are packed together.
        """
        samples = self.samples_dim(call)
        if call["batch_sizes"] or call.shape("input")[samples] < 2:
            return {}
        states = {name: S(self.states_dim) for name in self.states if call.has(name)}
        return {**states, **{name: S(samples) for name in _SEQUENCES if call.has(name)}}


_CUDNN = _Layers(
    "aten._cudnn_rnn.default",
    states=("hx", "cx", "grad_hy", "grad_cy"),
    states_dim=1,
    saved=("reserve", "weight_buf"),
    forward_arguments=lambda args: {"weight_buf": None},
    weights_last=True,
)
_CPU = _Layers(
    "aten.mkldnn_rnn_layer.default",
    states=("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"),
    states_dim=0,
    saved=("workspace",),
    forward_arguments=lambda args: {
        **{f"weight{number}": args[f"weight{number + 1}"] for number in range(4)},
        "cx_": args["cx_tmp"],
        "train": True,
    },
    weights_last=False,
)


def _recurrent(layers: _Layers, call: Call) -> Sequence[Strategy]:
    """Return the strategy of a recurrent layer sharded by samples."""
    placements, states = layers.placements(call), S(layers.states_dim)
    if not placements:
        return ()
    cell = states if call.has(layers.states[1]) else R
    outputs = (S(layers.samples_dim(call)), states, cell, S(0), R)[: len(call.node.results)]
    workspace = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        out, hidden, cell, _, *rest = build.rerun(node, operands)
        return out, hidden, cell, zeros(build, workspace, R), *rest

    return [zeros_when_empty(call, call.strategy(outputs, **placements).by(lower))]


def _recurrent_backward(layers: _Layers, call: Call) -> Sequence[Strategy]:
    """Return the strategies of a recurrent backward: replicated, or sharded by samples."""
    lower, workspace = partial(_with_recomputed_workspace, layers), layers.saved[0]
    strategies = [call.strategy(R).by(lower), call.strategy(R, **{workspace: S(0)}).by(lower)]
    placements = layers.placements(call)
    if placements:
        states: list[Placement] = [S(layers.states_dim)] * 2
        weights: list[Placement] = [P] * (len(call.node.results) - 3)
        gradients = [*states, *weights] if layers.weights_last else [*weights, *states]
        outputs: list[Placement] = [S(layers.samples_dim(call)), *gradients]
        by_samples = zeros_when_empty(call, call.strategy(outputs, **placements).by(lower))
        # the workspace is empty on every rank
        sharded = call.strategy(outputs, **{workspace: S(0)}, **placements)
        strategies.append(sharded.by(by_samples.lower))
    return strategies


def _with_recomputed_workspace(
    layers: _Layers, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run the backward with a workspace from another forward on the same operands."""
    args = build.bind(node, operands)
    args |= layers.forward_arguments(args)
    results = build.op(layers.forward, *(args[name] for name, _, _ in schema(layers.forward)))
    return build.rerun(node, operands, **dict(zip(layers.saved, results[3:], strict=True)))


# -- cuDNN batch norm ------------------------------------------------------------------------------


def batch_norm_rules(native: Rule) -> dict[str, Rule]:
    """Return the rules of cuDNN's batch norm and of its backward.

    Args:
        native: rule of ``native_batch_norm`` and its backward.
    """
    return {
        "aten.cudnn_batch_norm.default": partial(_batch_norm, native),
        "aten.cudnn_batch_norm_backward.default": partial(_batch_norm_backward, native),
    }


def _batch_norm(rule: Rule, call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``native_batch_norm``, which computes the same.

    The native op has no reserve. An empty reserve with placement S(0) is returned instead, so that
    only strategies of the backward that ignore the reserve accept it.
    """
    reserve = call.result(3)

    def lower(strategy: Strategy, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        results = lower_strategy(build, strategy, _native_batch_norm(node), operands)
        return *results[:3], zeros(build, reserve, R), *results[3:]

    return [
        replace(
            strategy,
            outputs=(*strategy.outputs[:3], S(0), *strategy.outputs[3:]),
            lower=partial(lower, strategy),
        )
        for strategy in rule(Call(_native_batch_norm(call.node), call.metas, call.axis_size))
    ]


def _native_batch_norm(node: Node) -> Node:
    """Return the equivalent ``native_batch_norm`` node, without the reserve."""
    return replace(node, op="aten.native_batch_norm.default", fresh=node.fresh[:3])


def _batch_norm_backward(rule: Rule, call: Call) -> Sequence[Strategy]:
    """Return the strategies of the native backward; the reserve is ignored in all of them."""

    def lower(strategy: Strategy, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        value, gradient, *rest = operands[:-1]
        native = _native_batch_norm_backward(node)
        return lower_strategy(build, strategy, native, [gradient, value, *rest])

    native = _native_batch_norm_backward(call.node)
    replicated = Strategy((R,) * len(native.refs()), (R,) * len(native.results))
    strategies = []
    for strategy in (replicated, *rule(Call(native, call.metas, call.axis_size))):
        gradient, value, *rest = strategy.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            strategies.append(replace(strategy, inputs=inputs, lower=partial(lower, strategy)))
    return strategies


def _native_batch_norm_backward(node: Node) -> Node:
    """Return the equivalent ``native_batch_norm_backward`` node."""
    args = bound(node)

    names = [
        "grad_output",
        "input",
        "weight",
        "running_mean",
        "running_var",
        "save_mean",
        "save_var",
    ]
    native_args = (*(args[name] for name in names), True, args["epsilon"], (True, True, True))
    return Node("aten.native_batch_norm_backward.default", native_args, (), node.fresh)


RULES: dict[str, Rule] = {
    **table("convolution.default", _convolution),
    **table("convolution_backward.default", _convolution_backward),
    _CPU.forward: partial(_recurrent, _CPU),
    "aten.mkldnn_rnn_layer_backward.default": partial(_recurrent_backward, _CPU),
    _CUDNN.forward: partial(_recurrent, _CUDNN),
    "aten._cudnn_rnn_backward.default": partial(_recurrent_backward, _CUDNN),
}
