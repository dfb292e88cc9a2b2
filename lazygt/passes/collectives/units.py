"""Wrap units of reduced gradients: each has that of the parameter that it updates."""

from __future__ import annotations

from collections.abc import Mapping

from lazygt.graph.mesh import FSDPUnit
from lazygt.graph.node import Graph
from lazygt.graph.placement import REDUCE_SCATTER
from lazygt.passes.base import view_source
from lazygt.passes.updates import updated_with


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
