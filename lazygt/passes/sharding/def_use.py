"""Def-use chains of a graph: the producer of each value, and the nodes that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.node import Graph, Node

#: Positions of some operands of a node.
Places = tuple[int, ...]


class DefUse(NamedTuple):
    """Nodes of a graph, linked by its values.

    Attributes:
        nodes: each with the values that it reads and the numbers of its results.
        params: the kinds of the run-time numbers.
        makers: for each value (number of its producer, index of the result); None for an input.
        users: for each value: number of a node that reads it -> positions of the operands.
    """

    nodes: Sequence[tuple[Node, tuple[int, ...], range]]
    params: tuple[str, ...]
    makers: Sequence[tuple[int, int] | None]
    users: Sequence[Mapping[int, Places]]


def def_use(graph: Graph) -> DefUse:
    """Return the def-use chains of a graph."""
    nodes = []
    makers: list[tuple[int, int] | None] = [None] * len(graph.inputs)
    users: list[dict[int, Places]] = [{} for _ in graph.inputs]
    for number, (node, results) in enumerate(graph.numbered()):
        refs = node.refs()
        nodes.append((node, refs, results))
        for position in range(len(results)):
            makers.append((number, position))
            users.append({})
        for position, value in enumerate(refs):
            readers = users[value]
            readers[number] = (*readers[number], position) if number in readers else (position,)
    return DefUse(nodes, graph.params, makers, users)
