"""Def-use chains of a graph: the node that makes each value, and the nodes that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.node import Graph, Node

#: Places of some operands of a node.
Places = tuple[int, ...]


class DefUse(NamedTuple):
    """Nodes of a graph, linked by its values.

    Attributes:
        nodes: each with the values that it reads and the numbers of its results.
        params: the kinds of the run-time numbers.
        makers: of each value the node and the place among its results; None of an input.
        users: of each value the nodes that read it, and in which of their operands.
    """

    nodes: Sequence[tuple[Node, tuple[int, ...], range]]
    params: tuple[str, ...]
    makers: Sequence[tuple[int, int] | None]
    users: Sequence[Mapping[int, Places]]


def def_use(graph: Graph) -> DefUse:
    """Return the chains of a graph."""
    nodes = []
    makers: list[tuple[int, int] | None] = [None] * len(graph.inputs)
    users: list[dict[int, Places]] = [{} for _ in graph.inputs]
    for number, (node, results) in enumerate(graph.numbered()):
        refs = node.refs()
        nodes.append((node, refs, results))
        for place in range(len(results)):
            makers.append((number, place))
            users.append({})
        for place, value in enumerate(refs):
            readers = users[value]
            readers[number] = (*readers[number], place) if number in readers else (place,)
    return DefUse(nodes, graph.params, makers, users)
