"""Horizontal (``_foreach``) ops and fused optimizer steps: strategies, and the split pass.

A strategy gives all tensors of a list the same placement if possible; the other tensors are R.
``SplitForeach`` splits a node into one node per tensor, with independent placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.graph.per_tensor import ALL, EACH, SPLIT, ForeachForm
from lazygt.graph.placement import Placement, Shard
from lazygt.passes.base import Placed, placed, rebuild
from lazygt.passes.sharding.builder import numbers
from lazygt.passes.sharding.rules import pointwise, reductions
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Lowering,
    Metas,
    R,
    Rule,
    S,
    Strategy,
    Values,
    lower_strategy,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


#: Fused optimizer steps on lists of parameters.
FUSED_STEPS = frozenset(
    f"aten._fused_{name}.{which}"
    for name in ("adam_", "adamw_", "sgd_", "adagrad_")
    for which in ("default", "tensor_lr")
)
#: Horizontal ops to split: those that are merged again later, and those that gain nothing.
FORMS = SPLIT | {
    form.wide: form
    for form in (
        ForeachForm("aten._foreach_maximum_.List", "aten.clamp_min_.Tensor", (EACH, EACH)),
        ForeachForm("aten._foreach_minimum_.List", "aten.clamp_max_.Tensor", (EACH, EACH)),
        ForeachForm("aten._foreach_clamp_min_.Scalar", "aten.clamp_min_.default", (EACH, ALL)),
        ForeachForm("aten._foreach_clamp_max_.Scalar", "aten.clamp_max_.default", (EACH, ALL)),
    )
}


def singles(node: Node) -> list[Node]:
    """Return the single-tensor nodes that are equivalent to a horizontal op of ``FORMS``."""
    form = FORMS[node.op]
    nodes = []
    for number in range(len(node.args[0])):
        args, kwargs = form.narrow(node.args, number)
        single_kwargs = (*kwargs, *node.kwargs)
        new_outputs = node.fresh[number : number + 1]
        written = node.written[number : number + 1]
        nodes.append(
            Node(
                form.single,
                args,
                single_kwargs,
                new_outputs,
                node.writes[number : number + 1],
                written,
            )
        )
    return nodes


def are_independent(node: Node) -> bool:
    """Return whether the single-tensor nodes of a horizontal op are independent.

    No node may read or write a value that another node writes.
    """
    for single in singles(node):
        others = list(node.writes)
        for value in single.writes:
            others.remove(value)
        if not set(others).isdisjoint((*single.refs(), *single.writes)):
            return False
    return True


def _horizontal(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of a horizontal op: one per placement that some tensor can have."""
    if not are_independent(node):
        return []
    rule = reductions.RULES.get(FORMS[node.op].single, pointwise.strategies)
    options: list[dict[Placement, Strategy]] = []
    for single in singles(node):
        replicated = Strategy((R,) * len(single.refs()), (R,) * len(single.results))
        strategies = [replicated, *rule(single, metas, axis_size)]
        options.append({strategy.inputs[0]: strategy for strategy in reversed(strategies)})
    placements = dict.fromkeys(
        placement for strategies in options for placement in strategies if placement != R
    )
    combined = (
        _combined(node, [strategies.get(placement, strategies[R]) for strategies in options])
        for placement in placements
    )
    return [strategy for strategy in combined if strategy is not None]


def _combined(node: Node, strategies: list[Strategy]) -> Strategy | None:
    """Combine one strategy per tensor; None: an operand of all tensors would not be R."""
    inputs: list[Placement] = []
    operand = 0
    for kind, arg in zip(FORMS[node.op].takes, node.args, strict=False):
        if not numbers(arg):
            continue
        placements = [strategy.inputs[operand] for strategy in strategies]
        if kind != EACH and set(placements) != {R}:
            return None
        inputs += placements if kind == EACH else placements[:1]
        operand += 1
    comm = [collective for strategy in strategies for collective in strategy.comm]
    outputs = tuple(placement for strategy in strategies for placement in strategy.outputs)
    return Strategy(tuple(inputs), outputs, _lower_singles(strategies), tuple(comm))


def _lower_singles(strategies: Sequence[Strategy]) -> Lowering:
    """Return the lowering that runs each single-tensor node by its strategy."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        local = dict(zip(_positions(node), operands, strict=True))
        results: list[Ref | None] = []
        for number, (single, strategy) in enumerate(zip(singles(node), strategies, strict=True)):
            values = [local[arg, number] if (arg, number) in local else local[arg, -1]
                      for arg in _tensor_arguments(node)]  # fmt: skip
            results += lower_strategy(build, strategy, single, values)
        return results

    return lower


def _tensor_arguments(node: Node) -> list[int]:
    """Return the numbers of the arguments with tensors."""
    return [number for number, arg in enumerate(node.args) if numbers(arg)]


def _positions(node: Node) -> list[tuple[int, int]]:
    """Return (argument number, index in its list) of each of ``node.refs()``; -1: no list."""
    positions = []
    for argument in _tensor_arguments(node):
        arg = node.args[argument]
        positions += [(argument, number) for number in range(len(arg))] if type(arg) is tuple else [
            (argument, -1)
        ]  # fmt: skip
    return positions


def _fused(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies that shard parameters, gradients and optimizer states alike.

    Step counts and learning rates are replicated.
    """
    call = Call(node, metas, axis_size)
    lists = {
        name: [meta for n in refs if (meta := metas[n]) is not None]
        for name, arg in call.args.items()
        if type(arg) is tuple and (refs := numbers(arg))
    }
    shapes = [meta.shape for meta in lists["self"]]
    rank = max(map(len, shapes), default=0)
    strategies = []
    for dim in range(rank):
        placements = {name: _aligned(metas, shapes, dim) for name, metas in lists.items()}
        if S(dim) in placements["self"]:
            written = [_placement_of(call, placements, value) for value in node.writes]
            strategies.append(call.strategy(written, **placements))
    return strategies


def _aligned(metas: list[TensorMeta], shapes: list[tuple[int, ...]], dim: int) -> list[Placement]:
    """Return S(dim) for each tensor with the shape of its parameter and a shardable dim, else R."""
    return [
        Shard(dim) if meta.shape == shape and dim < len(shape) and shape[dim] > 1 else R
        for meta, shape in zip(metas, shapes, strict=True)
    ]


def _placement_of(call: Call, placements: dict[str, list[Placement]], value: int) -> Placement:
    """Return the placement of an operand value of the call."""
    for name, arg_placements in placements.items():
        refs = numbers(call.args[name])
        if value in refs:
            return arg_placements[refs.index(value)]
    return R


class SplitForeach:
    """Pass that splits the ops of ``FORMS`` and fused optimizer steps into one op per tensor."""

    name = "split_foreach"

    def run(self, graph: Graph) -> Graph:
        split_nodes = [single for placed_node in placed(graph) for single in _split(placed_node)]
        return graph if len(split_nodes) == len(graph.nodes) else rebuild(graph, split_nodes)


def _split(placed_node: Placed) -> Sequence[Placed]:
    """Split one node into single-tensor nodes; others are returned as they are."""
    node = placed_node.node
    if node.op in FORMS:
        if not are_independent(node):
            return [placed_node]
        pairs = zip(singles(node), placed_node.results, strict=True)
        return [Placed(single, (result,), placed_node.source) for single, result in pairs]
    if node.op in FUSED_STEPS and len(node.args[0]) > 1 and not node.dynamic:
        return [_single_step(placed_node, number) for number in range(len(node.args[0]))]
    return [placed_node]


def _single_step(placed_node: Placed, parameter: int) -> Placed:
    """Return the fused step on one parameter alone."""
    node = placed_node.node
    args = tuple([_item_of(arg, parameter) for arg in node.args])
    selected = {item for arg in args if type(arg) is tuple for item in arg}
    written_numbers = [
        written_number for written_number, value in enumerate(node.writes) if Ref(value) in selected
    ]
    single = Node(
        node.op,
        args,
        node.kwargs,
        writes=tuple([node.writes[number] for number in written_numbers]),
        written=tuple([node.written[number] for number in written_numbers]),
    )
    return Placed(
        single,
        [placed_node.results[number] for number in written_numbers],
        placed_node.source,
    )


def _item_of(arg: Arg, number: int) -> Arg:
    """Slice a list argument to the item of parameter ``number``; empty lists stay empty."""
    return arg[number : number + 1] if type(arg) is tuple else arg


RULES: dict[str, Rule] = {
    **dict.fromkeys(FORMS, _horizontal),
    **dict.fromkeys(FUSED_STEPS, _fused),
}
