"""Classes of equal ranks: the program of all ranks of a class is made once.

A class has one graph object, which stands at the place of each of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lazygt.graph.node import Graph

T = TypeVar("T")


def classes(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the graph of each class, in the order of their first ranks."""
    return list({id(graph): graph for graph in graphs}.values())


def by_class(change: Callable[[Graph], T], graphs: Sequence[Graph]) -> list[T]:
    """Return a function's result for the graph of each rank, with one call a class."""
    results = {id(graph): change(graph) for graph in classes(graphs)}
    return [results[id(graph)] for graph in graphs]


def same(a: Graph, b: Graph) -> bool:
    """Return whether two ranks run equal graphs, even if these are different objects."""
    return a is b or (a.inputs == b.inputs and a == b)


def classified(graphs: Sequence[Graph]) -> list[Graph]:
    """Return the graphs, with one object for those that are the same."""
    firsts: list[Graph] = []

    def first(graph: Graph) -> Graph:
        known = next((other for other in firsts if same(other, graph)), None)
        if known is None:
            firsts.append(graph)
        return known or graph

    return by_class(first, graphs)
