"""Twins across ranks: no value is reduced twice.

cse leaves a large twin that is computed again where the first one has died: to compute it again
takes less than to keep it. Not so once ranks have to meet for it. So nodes are numbered by their
computation (value numbering), and a second reduction of the same value is replaced by the first
one's result, which lives until then. Nodes that only the second one needed are dropped.

Recomputation stays: a value that a backward pass computes again of a matmul is not kept for it.
Ranks decide together, since a program may have twins on one of them that it has not on others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lazygt.graph.cost import family
from lazygt.graph.node import Graph
from lazygt.graph.placement import ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER
from lazygt.passes.base import Placed, placed, rebuild, written_through
from lazygt.passes.classes import by_class, classes
from lazygt.passes.cse import key_of, may_merge
from lazygt.passes.dce import DeadCode

_REDUCTIONS = frozenset({ALL_REDUCE, REDUCE_SCATTER})
#: (a collective, the earlier one that gives the same), counted from the first of the program.
Twin = tuple[int, int]


def reduced_once(graphs: Sequence[Graph], backward: Collection[int] = ()) -> list[Graph]:
    """Return the ranks' programs, with every value reduced once.

    Args:
        backward: numbers of the recorded ops of a backward pass.
    """
    agreed = set.intersection(*(_twins(graph, backward) for graph in classes(graphs)))
    return by_class(lambda graph: _merged(graph, agreed), graphs) if agreed else list(graphs)


def _twins(graph: Graph, backward: Collection[int]) -> set[Twin]:
    """Return the reductions of a rank that are twins of earlier ones."""
    written = written_through(graph)
    same: dict[int, int] = {}
    first: dict[Any, tuple[int, int, Sequence[int]]] = {}
    twins: set[Twin] = set()
    products = _products(graph)
    count = 0
    for row in placed(graph):
        node, results = row.node, row.results
        is_reduction, at = node.op in _REDUCTIONS, count
        count += node.op in COLLECTIVES
        if not (is_reduction or may_merge(row, written)) or not written.isdisjoint(results):
            continue
        key = key_of(node, same)
        where, source, earlier = first.setdefault(key, (at, row.source, results))
        if earlier is results:
            continue
        again = graph.origin(row.source) in backward and graph.origin(source) not in backward
        if is_reduction and again and node.args[0].index in products:
            continue
        same.update(zip(results, earlier, strict=True))
        if is_reduction:
            twins.add((at, where))
    return twins


def _products(graph: Graph) -> set[int]:
    """Return the results of matmuls, and values that are made of one such value alone."""
    products: set[int] = set()
    for node, results in graph.numbered():
        refs = node.refs()
        if family(node) == "matmul" or (len(refs) == 1 and refs[0] in products):
            products.update(results)
    return products


def _merged(graph: Graph, twins: Collection[Twin]) -> Graph:
    """Return the graph without these reductions."""
    earlier = dict(twins)
    kept: list[Placed] = []
    same: dict[int, int] = {}
    results: list[Sequence[int]] = []
    for row in placed(graph):
        at = len(results)
        if row.node.op in COLLECTIVES:
            results.append(row.results)
            if at in earlier:
                same.update(zip(row.results, results[earlier[at]], strict=True))
                continue
        kept.append(row)
    return DeadCode().run(rebuild(graph, kept, same))
