"""User annotations as nodes of the graph: each is its first operand, with a placement.

Sessions know them whether they shard or not, so nothing of the sharding itself is loaded here.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from lazygt.graph.mesh import FSDPUnit, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank, Unspecified
from lazygt.passes.base import placed, rebuild

# -- forward and backward turns of a step of several microbatches ----------------------------------


def turns(graph: Graph, backward: Collection[int]) -> list[int]:
    """Return for each node the number of changes of pass before it: odd in a backward.

    A change is one between forward and backward. lazygt's own ops belong to the pass around them.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    count, numbers = 0, []
    for number, node in enumerate(graph.nodes):
        if not node.op.startswith("lazygt."):
            count += (graph.origin(number) in backward) != count % 2
        numbers.append(count)
    return numbers


# -- user annotations as nodes of the graph: each is its first operand, with a placement -----------

#: ``place(value, placements, pinned[, unit])``: the value; ``placements`` has one placement an
#: axis, as text.
PLACE = "lazygt.place"
#: ``enter_stage(value, stage, axis[, again])``: the value, on a stage of a pipeline along an axis;
#: again where the backward pass computes a stage anew.
ENTER = "lazygt.enter_stage"
#: ``leave_stage(gradient, value, axis)``: the gradient, back on the stage that the value is on.
LEAVE = "lazygt.leave_stage"
#: ``reduce_as(gradient)``: the gradient in the result's dtype; where ranks have parts of it, these
#: are cast, and reduced in that dtype.
REDUCE_AS = "lazygt.reduce_as"
MARKS = frozenset({PLACE, ENTER, LEAVE, REDUCE_AS})


def without_places(graph: Graph, marks: Collection[str] = (PLACE,)) -> Graph:
    """Drop the annotations of these kinds from a graph; of ``reduce_as`` the cast stays."""
    rows = [row._replace(node=_cast(row.node)) for row in placed(graph)]
    marks = {*marks} - {REDUCE_AS}
    same = {row.results[0]: row.node.args[0].index for row in rows if row.node.op in marks}
    kept = [row for row in rows if row.node.op not in marks]
    casts = any(node.op == REDUCE_AS for node in graph.nodes)
    return rebuild(graph, kept, same) if same or casts else graph


def _cast(node: Node) -> Node:
    """Return a ``reduce_as`` as torch's op; else the node."""
    if node.op != REDUCE_AS:
        return node
    (meta,) = node.fresh
    assert meta is not None
    return Node("aten._to_copy.default", node.args, (("dtype", meta.dtype),), (meta,))


def reduce_as_node(value: int, meta: TensorMeta, dtype: torch.dtype) -> Node:
    """Return a node of a gradient of this number and meta, to be reduced in a dtype."""
    return Node(REDUCE_AS, (Ref(value),), (), (TensorMeta.of(meta.empty("meta").to(dtype)),))


def place_node(value: int, meta: TensorMeta, sharding: Sharding) -> Node:
    """Return the annotation of a value of this number."""
    unit = () if sharding.unit is None else (tuple(sharding.unit),)
    args = (Ref(value), tuple(map(str, sharding.placements)), sharding.pinned, *unit)
    return Node(PLACE, args, (), (meta,))


def stored_by(node: Node) -> Sharding:
    """Return the sharding that a ``lazygt.place`` says."""
    placements, pinned, *unit = node.args[1:]
    return Sharding(
        tuple(map(_placement, placements)), pinned, FSDPUnit(*unit[0]) if unit else None
    )


def _placement(text: str) -> Placement:
    """Return the placement that ``R``, ``S(1)``, ``H(0)`` or ``?`` names."""
    if text == "?":
        return Unspecified()
    if text[0] == "H":
        return SingleRank(int(text[2:-1]))
    return Replicate() if text == "R" else Shard(int(text[2:-1]))
