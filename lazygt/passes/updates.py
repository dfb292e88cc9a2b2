"""Gradient to parameter: for each gradient, the parameter that an optimizer updates with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lazygt.graph.mesh import FSDPUnit
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.placement import REDUCE_SCATTER
from lazygt.passes.base import dependencies, view_source, written_values

T = TypeVar("T")


def updated_with(graph: Graph, known: Mapping[int, T]) -> dict[int, T]:
    """Return for each value the ``known`` entry of the input that is updated with the value.

    The backward dataflow search follows ops on values of one shape, as in an optimizer's moments.
    In a horizontal op the tensors at one index of the lists belong together.

    Args:
        known: input -> its entry, for example its sharding.
    """
    memory, metas = dependencies(graph).memory, graph.values
    entry_of: dict[int, T] = {}
    for node, results in reversed(list(graph.numbered())):
        targets = written_values(node)
        for refs, outputs in _tensor_slices(node, results):
            inputs = [known[memory[v]] for v in refs if v in targets and memory[v] in known]
            later = [entry_of[value] for value in outputs if value in entry_of]
            entry = next(iter([*inputs, *later]), None)
            if entry is None:
                continue
            shapes = {meta.shape for value in outputs if (meta := metas[value]) is not None}
            for value in refs:
                meta = metas[value]
                if meta is not None and meta.shape in shapes:
                    entry_of.setdefault(value, entry)
    return entry_of


def _tensor_slices(node: Node, results: range) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (operands, results) of a node; for a horizontal op one pair for each tensor."""
    lists = [arg for arg in node.args if type(arg) is tuple and arg and type(arg[0]) is Ref]
    if not lists:
        return [(node.refs(), results)]
    versions = dict(zip(node.writes, results[len(node.fresh) :], strict=True))
    slices: list[tuple[Sequence[int], Sequence[int]]] = []
    for index in range(len(lists[0])):
        refs = [arg[index].index for arg in lists if index < len(arg)]
        written = [versions[value] for value in refs if value in versions]
        slices.append((refs, written or results[index : index + 1]))
    return slices


# -- wrap units of reduced gradients ---------------------------------------------------------------


def reduced_units(graph: Graph, units: Mapping[int, FSDPUnit]) -> dict[int, FSDPUnit]:
    """Return the wrap unit of each reduce-scatter of a rank's program, by number of the node.

    The unit is that of the parameter that is updated with the reduced gradient, else the first unit
    with a parameter block of the same shape.

    Args:
        units: input -> its wrap unit.
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
        reduced_unit = updates.get(result, unit_of_shape)
        if reduced_unit is not None:
            reduced[number] = reduced_unit
    return reduced
