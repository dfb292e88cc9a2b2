"""Parameters by gradient: for a gradient, the parameter that an optimizer writes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.mesh import FSDPUnit
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import REDUCE_SCATTER
from lazygt.passes.base import dependencies, view_source

T = TypeVar("T")


def updated_with(graph: Graph, known: Mapping[int, T]) -> dict[int, T]:
    """Return for each value the ``known`` entry of the input that it, or a result, updates.

    The search goes through ops on values of its shape, as the moments of an optimizer have. A
    horizontal op writes each tensor of a list with those at its place in other lists.

    Args:
        known: by number of an input.
    """
    homes, metas = dependencies(graph).memory, graph.values
    known_of: dict[int, T] = {}
    for node, results in reversed(list(graph.numbered())):
        for refs, outcome in _lanes(node, results):
            inputs = [known[homes[v]] for v in refs if v in written(node) and homes[v] in known]
            later = [known_of[value] for value in outcome if value in known_of]
            home = next(iter([*inputs, *later]), None)
            if home is None:
                continue
            shapes = {meta.shape for value in outcome if (meta := metas[value]) is not None}
            for value in refs:
                meta = metas[value]
                if meta is not None and meta.shape in shapes:
                    known_of.setdefault(value, home)
    return known_of


def written(node: Node) -> tuple[int, ...]:
    """Return the values that a node writes."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


def _lanes(node: Node, results: range) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the operands that belong together, with their results.

    In a horizontal op those at one place of its lists belong together.
    """
    lists = [arg for arg in node.args if type(arg) is tuple and arg and type(arg[0]) is Ref]
    if not lists:
        return [(node.refs(), results)]
    versions = dict(zip(node.writes, results[len(node.fresh) :], strict=True))
    lanes: list[tuple[Sequence[int], Sequence[int]]] = []
    for which in range(len(lists[0])):
        refs = [arg[which].index for arg in lists if which < len(arg)]
        written = [versions[value] for value in refs if value in versions]
        lanes.append((refs, written or results[which : which + 1]))
    return lanes


# -- wrap units of reduced gradients: each has that of the parameter that it updates ---------------


def reduced_units(graph: Graph, units: Mapping[int, FSDPUnit]) -> dict[int, FSDPUnit]:
    """Return the unit of each reduce-scatter of a rank's program, by number of the node.

    A reduce-scatter that updates no parameter of this program is of the first unit that stores
    blocks of its shape.

    Args:
        units: by number of the input.
    """
    scatters = {
        number: results.start
        for number, (node, results) in enumerate(graph.numbered())
        if node.op == REDUCE_SCATTER
    }
    if not scatters or not units:
        return {}
    updates, metas = updated_with(graph, units), graph.values
    for node, results in reversed(list(graph.numbered())):
        source = view_source(node)
        if source is not None and results[0] in updates:
            updates.setdefault(source, updates[results[0]])
    shapes: dict[tuple[int, ...], FSDPUnit] = {}
    for value, unit in units.items():
        shapes.setdefault(graph.inputs[value].shape, unit)
    reduced = {}
    for number, result in scatters.items():
        meta = metas[result]
        unit_of_shape = shapes.get(meta.shape) if meta is not None else None
        home = updates.get(result, unit_of_shape)
        if home is not None:
            reduced[number] = home
    return reduced
