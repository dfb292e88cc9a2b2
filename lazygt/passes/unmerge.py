"""unmerge: horizontal ops taken apart, so that each of their tensors may be sharded in its own way.

``aten._foreach_mul_.Scalar([a, b], 2)`` is ``a.mul_(2)`` and ``b.mul_(2)``; a fused optimizer's
step on two parameters is two steps on one. Bit for bit. Pass foreach merges what belongs together
again. An op stays as it is where the part of one tensor meets what another's part writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.passes.base import Placed, placed, rebuild
from lazygt.passes.rules.optimizer import FORMS, FUSED_STEPS, are_apart, singles


class Unmerge:
    """One op a tensor, for the ops of ``FORMS`` and the fused steps of optimizers."""

    name = "unmerge"

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
    """A fused step on one of its parameters."""
    node = row.node
    args = tuple([_one_of(arg, which) for arg in node.args])
    taken = {item for arg in args if type(arg) is tuple for item in arg}
    places = [place for place, value in enumerate(node.writes) if Ref(value) in taken]
    made = Node(
        node.op,
        args,
        node.kwargs,
        writes=tuple([node.writes[place] for place in places]),
        written=tuple([node.written[place] for place in places]),
    )
    return Placed(made, [row.results[place] for place in places], row.source)


def _one_of(arg: Arg, which: int) -> Arg:
    """The item of a list that belongs to a parameter; lists may be empty."""
    return arg[which : which + 1] if type(arg) is tuple else arg
