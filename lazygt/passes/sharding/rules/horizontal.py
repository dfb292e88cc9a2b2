"""Horizontal ops on lists of tensors, and fused optimizer steps: strategies, and a split.

A strategy gives the tensors of a list the same placement, those that can have it; the others are R.
To have each tensor choose for itself, split the node first.
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


#: Steps on whole lists of parameters.
FUSED_STEPS = frozenset(
    f"aten._fused_{name}.{which}"
    for name in ("adam_", "adamw_", "sgd_", "adagrad_")
    for which in ("default", "tensor_lr")
)
#: Horizontal ops to take apart: those that are merged again, and those of which nothing is gained.
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
    """Return the ops on one tensor that a horizontal op of ``FORMS`` stands for."""
    form = FORMS[node.op]
    nodes = []
    for which in range(len(node.args[0])):
        args, kwargs = form.narrow(node.args, which)
        kept = (*kwargs, *node.kwargs)
        fresh = node.fresh[which : which + 1]
        written = node.written[which : which + 1]
        nodes.append(Node(form.single, args, kept, fresh, node.writes[which : which + 1], written))
    return nodes


def are_apart(node: Node) -> bool:
    """Return whether the tensors of a horizontal op are independent.

    None reads or writes the memory that another one writes.
    """
    for part in singles(node):
        others = list(node.writes)
        for value in part.writes:
            others.remove(value)
        if not set(others).isdisjoint((*part.refs(), *part.writes)):
            return False
    return True


def _horizontal(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return for each placement that some tensor can have the strategies of all side by side."""
    if not are_apart(node):
        return []
    rule = reductions.RULES.get(FORMS[node.op].single, pointwise.strategies)
    options: list[dict[Placement, Strategy]] = []
    for single in singles(node):
        whole = Strategy((R,) * len(single.refs()), (R,) * len(single.results))
        strategies = [whole, *rule(single, metas, parts)]
        options.append({strategy.inputs[0]: strategy for strategy in reversed(strategies)})
    placements = dict.fromkeys(
        placement for strategies in options for placement in strategies if placement != R
    )
    together = (
        _side_by_side(node, [strategies.get(placement, strategies[R]) for strategies in options])
        for placement in placements
    )
    return [strategy for strategy in together if strategy is not None]


def _side_by_side(node: Node, strategies: list[Strategy]) -> Strategy | None:
    inputs: list[Placement] = []
    place = 0
    for kind, arg in zip(FORMS[node.op].takes, node.args, strict=False):
        if not numbers(arg):
            continue
        placements = [strategy.inputs[place] for strategy in strategies]
        if kind != EACH and set(placements) != {R}:
            return None
        inputs += placements if kind == EACH else placements[:1]
        place += 1
    comm = [one for strategy in strategies for one in strategy.comm]
    outputs = tuple(placement for strategy in strategies for placement in strategy.outputs)
    return Strategy(tuple(inputs), outputs, _each(strategies), tuple(comm))


def _each(strategies: Sequence[Strategy]) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        local = dict(zip(_positions(node), operands, strict=True))
        results: list[Ref | None] = []
        for which, (single, strategy) in enumerate(zip(singles(node), strategies, strict=True)):
            values = [local[place, which] if (place, which) in local else local[place, -1]
                    for place in _tensor_places(node)]  # fmt: skip
            results += lower_strategy(build, strategy, single, values)
        return results

    return lower


def _tensor_places(node: Node) -> list[int]:
    return [place for place, arg in enumerate(node.args) if numbers(arg)]


def _positions(node: Node) -> list[tuple[int, int]]:
    """Return (argument, place in its list) of each of ``node.refs()``; -1: of no list."""
    positions = []
    for place in _tensor_places(node):
        arg = node.args[place]
        positions += [(place, which) for which in range(len(arg))] if type(arg) is tuple else [
            (place, -1)
        ]  # fmt: skip
    return positions


def _fused(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return strategies with parameters, gradients and moments split alike.

    Steps and learning rates stay whole.
    """
    call = Call(node, metas, parts)
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
    return [
        Shard(dim) if meta.shape == shape and dim < len(shape) and shape[dim] > 1 else R
        for meta, shape in zip(metas, shapes, strict=True)
    ]


def _placement_of(call: Call, placements: dict[str, list[Placement]], value: int) -> Placement:
    for name, given in placements.items():
        refs = numbers(call.args[name])
        if value in refs:
            return given[refs.index(value)]
    return R


class SplitForeach:
    """Pass that makes one op a tensor, of the ops of ``FORMS`` and fused optimizer steps."""

    name = "split_foreach"

    def run(self, graph: Graph) -> Graph:
        rows = [part for row in placed(graph) for part in _parts(row)]
        return graph if len(rows) == len(graph.nodes) else rebuild(graph, rows)


def _parts(row: Placed) -> Sequence[Placed]:
    node = row.node
    if node.op in FORMS:
        if not are_apart(node):
            return [row]
        pairs = zip(singles(node), row.results, strict=True)
        return [Placed(single, (result,), row.source) for single, result in pairs]
    if node.op in FUSED_STEPS and len(node.args[0]) > 1 and not node.dynamic:
        return [_step(row, which) for which in range(len(node.args[0]))]
    return [row]


def _step(row: Placed, which: int) -> Placed:
    """Return a fused step on one of its parameters."""
    node = row.node
    args = tuple([_one_of(arg, which) for arg in node.args])
    taken = {item for arg in args if type(arg) is tuple for item in arg}
    places = [place for place, value in enumerate(node.writes) if Ref(value) in taken]
    single = Node(
        node.op,
        args,
        node.kwargs,
        writes=tuple([node.writes[place] for place in places]),
        written=tuple([node.written[place] for place in places]),
    )
    return Placed(single, [row.results[place] for place in places], row.source)


def _one_of(arg: Arg, which: int) -> Arg:
    """Return the item of a list that belongs to a parameter; lists may be empty."""
    return arg[which : which + 1] if type(arg) is tuple else arg


RULES: dict[str, Rule] = {
    **dict.fromkeys(FORMS, _horizontal),
    **dict.fromkeys(FUSED_STEPS, _fused),
}
