"""The user's annotations as nodes of the graph: ``lazygt.place``.

Sessions know them whether they shard or not, so nothing of the sharding itself is loaded here.
"""

from __future__ import annotations

from lazygt.graph.mesh import Placement
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.passes.base import placed, rebuild

#: ``place(value, labels, pinned)``: the value; ``labels`` has one label an axis, as text.
PLACE = "lazygt.place"


def without_places(graph: Graph) -> Graph:
    """The graph without its annotations."""
    rows = placed(graph)
    same = {row.results[0]: row.node.args[0].index for row in rows if row.node.op == PLACE}
    kept = [row for row in rows if row.node.op != PLACE]
    return rebuild(graph, kept, same) if same else graph


def place_node(value: int, meta: TensorMeta, placement: Placement, pinned: bool) -> Node:
    """The annotation of a value of this number."""
    return Node(PLACE, (Ref(value), tuple(map(str, placement)), pinned), (), (meta,))
