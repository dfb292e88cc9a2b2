"""dce: dead code elimination. Values without readers are not computed.

Bit for bit. Random ops stay even without readers: each draws from the one generator, and
the numbers of those after it must not depend on liveness.
"""

from __future__ import annotations

from lazygt.graph.alias import has_effect
from lazygt.graph.node import Graph
from lazygt.passes.base import placed, rebuild


class DeadCode:
    """Removal of nodes with unread results, from the last to the first."""

    name = "dce"

    def run(self, graph: Graph) -> Graph:
        needed = set(graph.outputs)
        kept = []
        for row in reversed(placed(graph)):
            if has_effect(row.node) or not needed.isdisjoint(row.results):
                needed.update(row.node.refs())
                needed.update(row.node.writes)
                kept.append(row)
        if len(kept) == len(graph.nodes):
            return graph
        kept.reverse()
        return rebuild(graph, kept)
