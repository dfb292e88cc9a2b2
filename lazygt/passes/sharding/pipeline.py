"""Pipeline stages on one axis of the mesh: found, cut, put in order.

The other axes come first. So placements on them are chosen for the whole program at once, and
what the stages exchange lies alike on both sides; then each rank's program is cut into stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazygt.graph.label import Held, Label, Replicated
from lazygt.graph.mesh import LogicalMesh, Mesh, Stored
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import unlikened
from lazygt.passes.sharding.cost import CPU, Machine
from lazygt.passes.sharding.onefoneb import ordered
from lazygt.passes.sharding.places import ENTER, LEAVE, PLACE
from lazygt.passes.sharding.shard import AxisStep, Sharding, shard
from lazygt.passes.sharding.split import split
from lazygt.passes.sharding.stages import assign


def pipeline_axis(
    graph: Graph, mesh: Mesh, inputs: Sequence[Stored], workers: LogicalMesh | None = None
) -> str | None:
    """The axis of the mesh along which a program has stages, if it has any.

    Raises:
        ValueError: it has stages along two axes, or ``workers`` stand for the ranks.
    """
    found = {node.args[2] for node in graph.nodes if node.op in (ENTER, LEAVE)}
    for each in inputs:
        labels = zip(mesh.names, each.labels, strict=True)
        found |= {name for name, label in labels if isinstance(label, Held)}
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise ValueError(f"a program has stages along one axis of the mesh {mesh}, not {names}")
    if found and workers is not None:
        raise ValueError("invariant=True knows no pipeline stages: leave out one of the two")
    return found.pop() if found else None


def shard_stages(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    inputs: Sequence[Stored],
    machine: Machine = CPU,
    decided: list[AxisStep] | None = None,
) -> Sharding:
    """The local programs of a graph with stages along ``axis``; the rest as in ``shard``.

    Raises:
        ValueError: a value is cut into blocks along the axis of the stages.
    """
    at = mesh.names.index(axis)
    homes = [_home(each.labels[at], axis) for each in inputs]
    others = [each._replace(labels=_without(each.labels, at)) for each in inputs]
    rest = Mesh(_without(mesh.names, at), _without(mesh.sizes, at))
    local = shard(_without_axis(graph, at, axis), rest, others, machine, decided)
    graphs: list[Graph] = [graph] * mesh.world_size
    labels: list[Label] = []
    why = ""
    for line, each in zip(mesh.lines(axis), local.graphs, strict=True):
        one = unlikened(each)  # so that a dropout's mask, which all ranks draw, is of no stage
        found = assign(one, homes)
        order, why = ordered(one, found, len(line))
        parts, labels = split(one, found, order, axis, len(line))
        for rank, part in zip(line, parts, strict=True):
            graphs[rank] = part
    outputs = [
        each._replace(labels=(*each.labels[:at], label, *each.labels[at:]))
        for each, label in zip(local.outputs, labels, strict=True)
    ]
    return Sharding(tuple(graphs), tuple(outputs), why)


def _home(label: Label, axis: str) -> int | None:
    if isinstance(label, Held):
        return label.rank
    if label != Replicated():
        raise _is_cut(axis)
    return None


def _is_cut(axis: str) -> ValueError:
    return ValueError(
        f"a value is cut along axis {axis!r} of the mesh, along which the program has stages; "
        f"place it as Replicate() there"
    )


def _without(items: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*items[:at], *items[at + 1 :])


def _without_axis(graph: Graph, at: int, axis: str) -> Graph:
    """The graph with placements on the other axes only."""

    def other(node: Node) -> Node:
        if node.op != PLACE:
            return node
        value, labels, *more = node.args
        if labels[at].startswith("S"):
            raise _is_cut(axis)
        return replace(node, args=(value, _without(labels, at), *more))

    if all(node.op != PLACE for node in graph.nodes):
        return graph
    return replace(graph, nodes=tuple(map(other, graph.nodes)))
