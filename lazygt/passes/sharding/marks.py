"""The user's annotations as nodes of the graph: each is its first operand, and says where it is.

Sessions know them whether they shard or not, so nothing of the sharding itself is loaded here.
"""

from __future__ import annotations

from collections.abc import Collection

from lazygt.graph.mesh import FSDPUnit, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank, Unspecified
from lazygt.passes.base import placed, rebuild

#: ``place(value, placements, pinned[, unit])``: the value; ``placements`` has one placement an
#: axis, as text.
PLACE = "lazygt.place"
#: ``enter_stage(value, stage, axis)``: the value, on a stage of a pipeline along an axis.
ENTER = "lazygt.enter_stage"
#: ``leave_stage(gradient, value, axis)``: the gradient, back on the stage that the value is on.
LEAVE = "lazygt.leave_stage"
MARKS = frozenset({PLACE, ENTER, LEAVE})


def without_places(graph: Graph, marks: Collection[str] = (PLACE,)) -> Graph:
    """The graph without its annotations of these kinds."""
    rows = placed(graph)
    same = {row.results[0]: row.node.args[0].index for row in rows if row.node.op in marks}
    kept = [row for row in rows if row.node.op not in marks]
    return rebuild(graph, kept, same) if same else graph


def place_node(value: int, meta: TensorMeta, sharding: Sharding) -> Node:
    """The annotation of a value of this number."""
    unit = () if sharding.unit is None else (tuple(sharding.unit),)
    args = (Ref(value), tuple(map(str, sharding.placements)), sharding.pinned, *unit)
    return Node(PLACE, args, (), (meta,))


def stored_by(node: Node) -> Sharding:
    """What a ``lazygt.place`` says."""
    placements, pinned, *unit = node.args[1:]
    return Sharding(
        tuple(map(_placement, placements)), pinned, FSDPUnit(*unit[0]) if unit else None
    )


def _placement(text: str) -> Placement:
    """The placement that ``R``, ``S(1)``, ``H(0)`` or ``?`` names."""
    if text == "?":
        return Unspecified()
    if text[0] == "H":
        return SingleRank(int(text[2:-1]))
    return Replicate() if text == "R" else Shard(int(text[2:-1]))
