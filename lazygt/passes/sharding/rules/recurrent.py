"""cuDNN's recurrent layers, split by samples.

As for the fused layers of CPUs (``kernels``), the reserve that the forward leaves for its backward
is good for its own samples only: a forward on blocks leaves an empty reserve and calls it split,
and every backward makes its own by another forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules.base import (
    Call,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    zeros,
    zeros_when_empty,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_FORWARD = "aten._cudnn_rnn.default"
_SEQUENCES = ("input", "output", "grad_output")
_STATES = ("hx", "cx", "grad_hy", "grad_cy")
#: The forward's arguments behind ``cx``.
_SETTINGS = ("mode", "hidden_size", "proj_size", "num_layers", "batch_first", "dropout", "train",
             "bidirectional", "batch_sizes", "dropout_state")  # fmt: skip


def _samples(call: Call) -> int:
    """Return the dim of a sequence's samples; states have them second."""
    return 0 if call["batch_first"] else 1


def _has_samples(call: Call) -> bool:
    """Return whether sequences have a dim of samples to split.

    Sequences of several lengths are packed together, without one.
    """
    return not call["batch_sizes"] and call.shape("input")[_samples(call)] > 1


def _placements(call: Call) -> dict[str, Placement]:
    placements: dict[str, Placement] = {name: S(1) for name in _STATES if call.has(name)}
    placements.update({name: S(_samples(call)) for name in _SEQUENCES if call.has(name)})
    return placements


def _recurrent(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    if not _has_samples(call):
        return ()
    cy = S(1) if call.has("cx") else R
    strategy = call.strategy((S(_samples(call)), S(1), cy, S(0), R), **_placements(call))
    reserve = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        out, hy, cy, _, packed = build.rerun(node, operands)
        return out, hy, cy, zeros(build, reserve, R), packed

    return [zeros_when_empty(call, strategy.by(lower))]


def _recurrent_backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    whole = [call.strategy(R), call.strategy(R, reserve=S(0))]
    strategies = [strategy.by(_with_own_reserve) for strategy in whole]
    if _has_samples(call):
        weights = len(node.results) - 3
        outputs: list[Placement] = [S(_samples(call)), S(1), S(1), *[P] * weights]
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


RULES: dict[str, Rule] = {
    _FORWARD: _recurrent,
    "aten._cudnn_rnn_backward.default": _recurrent_backward,
}
