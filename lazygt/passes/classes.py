"""Equivalence classes of ranks with equal programs; each class is processed once.

In a list of the ranks' graphs, all ranks of a class share one graph object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lazygt.graph.node import Graph

T = TypeVar("T")


def classes(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the distinct graph objects, in the order of their first ranks."""
    return list({id(graph): graph for graph in graphs}.values())


def by_class(change: Callable[[Graph], T], graphs: Sequence[Graph]) -> list[T]:
    """Map a function over the ranks' graphs, with one call for each distinct graph object."""
    results = {id(graph): change(graph) for graph in classes(graphs)}
    return [results[id(graph)] for graph in graphs]


def same(a: Graph, b: Graph) -> bool:
    """Return whether two graphs are equal, even if they are different objects."""
    return a is b or (a.inputs == b.inputs and a == b)


def classified(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the graphs with equal ones replaced by one object."""
    distinct: list[Graph] = []

    def canonical(graph: Graph) -> Graph:
        equal = next((candidate for candidate in distinct if same(candidate, graph)), None)
        if equal is None:
            distinct.append(graph)
        return equal or graph

    return by_class(canonical, graphs)
