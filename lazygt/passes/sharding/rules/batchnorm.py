"""Batch norm by cuDNN: sharded as the op that is made for any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.builder import bound
from lazygt.passes.sharding.rules.base import (
    Lowering,
    Metas,
    R,
    Rule,
    S,
    Strategy,
    Values,
    lower_strategy,
    zeros,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


def rules(native: Rule) -> dict[str, Rule]:
    """Of both ops.

    Args:
        native: the rule of the ops that are made for any device.
    """
    return {
        "aten.cudnn_batch_norm.default": partial(_forward, native),
        "aten.cudnn_batch_norm_backward.default": partial(_backward, native),
    }


def _forward(rule: Rule, node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """As the native op, which computes the same. The reserve that there is not is called split, so
    that the backward is sharded too and does without."""
    reserve = node.fresh[3]
    assert reserve is not None, f"{node.op}: no reserve"

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            made = lower_strategy(build, strategy, _native(node), operands)
            return (*made[:3], zeros(build, reserve, R), *made[3:])

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


def _backward(rule: Rule, node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """As the native op, in all strategies: the reserve of a forward on blocks is of no use."""

    def lowered(strategy: Strategy) -> Lowering:
        def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
            value, gradient, *rest = operands[:-1]
            return lower_strategy(build, strategy, _native_backward(node), [gradient, value, *rest])

        return lower

    native = _native_backward(node)
    whole = Strategy((R,) * len(native.refs()), (R,) * len(native.results))
    found = []
    for strategy in (whole, *rule(native, metas, parts)):
        gradient, value, *rest = strategy.inputs
        for reserve in (R, S(0)):
            inputs = (value, gradient, *rest, reserve)
            found.append(Strategy(inputs, strategy.outputs, lowered(strategy), strategy.comm))
    return found


def _native_backward(node: Node) -> Node:
    args = bound(node)
    statistics = [args[name] for name in ("running_mean", "running_var", "save_mean", "save_var")]
    given = (args["grad_output"], args["input"], args["weight"], *statistics, True, args["epsilon"])
    return Node("aten.native_batch_norm_backward.default", (*given, (True, True, True)), (),
                node.fresh)  # fmt: skip
