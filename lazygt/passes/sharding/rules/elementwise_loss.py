"""Losses of pairs of elements: mse, huber, binary cross-entropy and the like.

Without a reduction they are pointwise. Sums over blocks are partial sums. Of a mean, a block has
the share that it is of the whole, so nothing grows beyond the dtype of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Cut, Placement
from lazygt.passes.sharding.rules.base import (
    Call,
    LocalLowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    shardable_dims,
    table,
    zeros,
)
from lazygt.passes.sharding.rules.pointwise import aligned

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_NONE, _MEAN = 0, 1
_TENSORS = ("self", "target", "weight", "pos_weight")
Shape = tuple[int, ...]


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape, reduction = _shape(call), call["reduction"]
    found = []
    for dim in shardable_dims(shape):
        strategy = call.strategy(
            S(dim) if reduction == _NONE else P, **_placements(call, shape, dim)
        )
        found.append(strategy.by(_share_of_mean(call) if reduction == _MEAN else None))
    return found


def _share_of_mean(call: Call) -> LocalLowering:
    result = call.result()

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        share = _share(build, strategy, call)
        if not share:
            return (zeros(build, result, R),)
        return (build.op("aten.mul.Scalar", *build.rerun(node, operands), share),)

    return LocalLowering(program)


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    shape, reduction = call.result().shape, call["reduction"]
    found = []
    for dim in shardable_dims(shape):
        placements = _placements(call, shape, dim)
        if reduction == _NONE:
            placements["grad_output"] = aligned(call.meta("grad_output"), shape, dim)
        strategy = call.strategy(S(dim), **placements)
        found.append(strategy.by(_share_of_gradient(call) if reduction == _MEAN else None))
    return [*found, call.strategy(P, grad_output=P)]


def _share_of_gradient(call: Call) -> LocalLowering:
    """The kernel divides by the elements of the block, not of the whole."""
    result = call.result()

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        share = _share(build, strategy, call)
        if not share:
            return (zeros(build, result, strategy.outputs[0]),)
        gradient, *rest = operands
        mine = build.op("aten.mul.Scalar", gradient, share)
        return build.rerun(node, [mine, *rest])

    return LocalLowering(program)


def _share(build: Builder, strategy: Strategy, call: Call) -> float:
    """The part of all elements that this rank has: as of any operand that is cut."""
    operands = zip(call.node.refs(), strategy.inputs, strict=True)
    number, placement = next(each for each in operands if isinstance(each[1], Cut))
    meta = call.metas[number]
    assert meta is not None
    return prod(build.local(meta.shape, placement)) / prod(meta.shape)


def _shape(call: Call) -> Shape:
    """Of the losses before their reduction."""
    shapes = [call.shape(name) for name in _TENSORS if call.has(name)]
    return tuple(torch.broadcast_shapes(*shapes))


def _placements(call: Call, shape: Shape, dim: int) -> dict[str, Placement]:
    return {name: aligned(call.meta(name), shape, dim) for name in _TENSORS if call.has(name)}


_BACKWARD = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")

RULES: dict[str, Rule] = {
    **table("binary_cross_entropy_with_logits.default", _forward),
    **table(" ".join(f"{name}.default" for name in _BACKWARD), _forward),
    **table(" ".join(f"{name}_backward.default" for name in _BACKWARD), _backward),
}
