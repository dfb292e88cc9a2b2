"""unpack: results of a bucketed collective that outlive the run leave its buffer.

The others are used where they lie in the buffer, which is freed when the last of them dies. One
that is kept would keep all of it.
"""

from __future__ import annotations

from lazygt.graph.alias import Aliases
from lazygt.graph.label import WAIT
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import placed, rebuild


class Unpack:
    """Tells each wait which of its results to copy out; runs when all writes are decided."""

    name = "unpack"

    def run(self, graph: Graph) -> Graph:
        waits = {n for n, node in enumerate(graph.nodes) if node.op == WAIT and len(node.fresh) > 1}
        if not waits:
            return graph
        aliases = Aliases(graph)
        aliases.run()
        outlive = {aliases.memory[value] for value in graph.outputs}
        rows = placed(graph)
        for number in waits:
            row = rows[number]
            kept = tuple(p for p, value in enumerate(row.results) if value in outlive)
            rows[number] = row._replace(node=_keeping(row.node, kept))
        return rebuild(graph, rows)


def _keeping(node: Node, kept: tuple[int, ...]) -> Node:
    flying, held, _, axis = node.args
    return Node(node.op, (flying, held, kept, axis), node.kwargs, node.fresh)
