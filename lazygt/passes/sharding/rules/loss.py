"""nll_loss: split by samples, or by classes, where each rank has the losses of its own classes."""

from __future__ import annotations

from collections.abc import Sequence
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
    local_lowering,
    shardable_dims,
    table,
    zeros_when_empty,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_NONE, _MEAN, _SUM = 0, 1, 2


def _class_dim(call: Call) -> int:
    """[classes], [samples, classes] or [samples, classes, height, width]."""
    return 0 if len(call.shape("self")) == 1 else 1


def _sample_dims(call: Call) -> list[tuple[int, int]]:
    """(dim of the input, dim of the target) of what is not classes."""
    classes = _class_dim(call)
    dims = [dim for dim in shardable_dims(call.shape("self")) if dim != classes]
    return [(dim, dim - (dim > classes)) for dim in dims]


def _forward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    reduction = call["reduction"]
    comm = [Collective("all_reduce", call.result(1).nbytes)] if reduction == _MEAN else []
    weights = R if reduction in (_NONE, _MEAN) else P
    found = []
    for dim, own in _sample_dims(call):
        outputs: tuple[Placement, Placement] = (S(own) if reduction == _NONE else P, weights)
        strategy = call.strategy(outputs, self=S(dim), target=S(own))
        found.append(strategy.by(local_lowering(_mean(None)) if reduction == _MEAN else None, comm))
    dim = _class_dim(call)
    count = call.shape("self")[dim]
    if count > 1:
        lower = _mean(count) if reduction == _MEAN else _own_classes(count)
        placements = {"weight": S(0)} if call.has("weight") else {}
        found.append(call.strategy((P, weights), self=S(dim), **placements).by(lower, comm))
    return found


def _mean(classes: int | None) -> Lowering:
    """The sum over the weights of all ranks; ``classes``: how many there are, if they are split."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        target = {"target": _local_target(build, node, operands, classes)} if classes else {}
        ignored = {"ignore_index": _IGNORED} if classes else {}
        sums, weights = build.rerun(node, operands, reduction=_SUM, **target, **ignored)
        assert sums is not None
        assert weights is not None
        weights = build.all_reduce(weights)
        return build.op("aten.div.Tensor", sums, weights), weights

    return lower


#: What a target of another rank's class becomes.
_IGNORED = -100


def _own_classes(classes: int) -> Lowering:
    """The same op with targets counted from this rank's first class, all others ignored."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        target = _local_target(build, node, operands, classes)
        return build.rerun(node, operands, target=target, ignore_index=_IGNORED)

    return lower


def _local_target(build: Builder, node: Node, operands: Sequence[Ref], classes: int) -> Ref:
    args = build.bind(node, operands)
    target, (start, stop) = args["target"], build.bounds(classes)
    other = build.op("aten.logical_or.default", build.op("aten.lt.Scalar", target, start),
                     build.op("aten.ge.Scalar", target, stop))  # fmt: skip
    ignored = build.op("aten.eq.Scalar", target, args["ignore_index"])
    other = build.op("aten.logical_or.default", other, ignored)
    shifted = build.op("aten.sub.Scalar", target, start)
    made: Ref = build.op("aten.masked_fill.Scalar", shifted, other, _IGNORED)
    return made


def _backward(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    each = call["reduction"] == _NONE
    found = []
    for dim, own in _sample_dims(call):
        gradient = S(own) if each else R
        found.append(call.strategy(S(dim), self=S(dim), target=S(own), grad_output=gradient))
    dim = _class_dim(call)
    if call.shape("self")[dim] > 1:
        lower = _own_classes(call.shape("self")[dim])
        placements = {"weight": S(0)} if call.has("weight") else {}
        found.append(
            zeros_when_empty(call, call.strategy(S(dim), self=S(dim), **placements).by(lower))
        )
    return [*found, call.strategy(P, grad_output=P)]


RULES: dict[str, Rule] = {
    **table("nll_loss_forward.default nll_loss2d_forward.default", _forward),
    **table("nll_loss_backward.default nll_loss2d_backward.default", _backward),
}
