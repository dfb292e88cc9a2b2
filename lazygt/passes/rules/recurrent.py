"""Fused recurrent layers of CPUs: split by samples.

The workspace that a forward leaves for its backward is good for its own samples only. A forward on
blocks leaves an empty one and calls it split, so that every backward that may meet it is sharded
too; and a backward that is sharded makes a workspace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.label import Label
from lazygt.graph.node import Node, Ref
from lazygt.passes.rules.base import Call, Metas, P, R, Row, Rule, S, Values
from lazygt.passes.rules.lower import zeros, zeros_when_empty

if TYPE_CHECKING:
    from lazygt.passes.build import Builder

_FORWARD = "aten.mkldnn_rnn_layer.default"
_STATES = ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
_SEQUENCES = ("input", "output", "grad_output")


def _samples(call: Call) -> int:
    """The dim of a sequence's samples; states have them first."""
    return 0 if call["batch_first"] else 1


def _labels(call: Call) -> dict[str, Label]:
    labels: dict[str, Label] = {name: S(0) for name in _STATES if call.has(name)}
    labels.update({name: S(_samples(call)) for name in _SEQUENCES if call.has(name)})
    return labels


def _can_split(call: Call) -> bool:
    """Sequences of several lengths are packed together, with no dim of samples."""
    return not call["batch_sizes"] and call.shape("input")[_samples(call)] > 1


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    if not _can_split(call):
        return ()
    row = call.row((S(_samples(call)), S(0), S(0), S(0)), **_labels(call))
    workspace = call.result(3)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        made = build.rerun(node, operands)
        return (*made[:3], zeros(build, workspace, R))

    return [zeros_when_empty(call, row.by(lower))]


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    call = Call(node, metas, parts)
    rows = [call.row(R), call.row(R, workspace=S(0))]
    found = [row.by(_with_own_workspace) for row in rows]
    if _can_split(call):
        outputs = (S(_samples(call)), P, P, P, P, S(0), S(0))
        inner = call.row(outputs, **_labels(call)).by(_with_own_workspace)
        lower = zeros_when_empty(call, inner).lower  # an empty workspace says nothing
        found.append(call.row(outputs, workspace=S(0), **_labels(call)).by(lower))
    return found


def _with_own_workspace(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    args = build.bind(node, operands)
    weights = [args[f"weight{number}"] for number in range(1, 5)]
    shape = [args[name] for name in ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers",
                                     "has_biases", "bidirectional", "batch_first")]  # fmt: skip
    *_, workspace = build.op(
        _FORWARD, args["input"], *weights, args["hx_"], args["cx_tmp"], *shape, True
    )
    return build.rerun(node, operands, workspace=workspace)


RULES: dict[str, Rule] = {
    _FORWARD: _forward,
    "aten.mkldnn_rnn_layer_backward.default": _backward,
}
