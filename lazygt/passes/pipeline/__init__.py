"""Pipeline stages on one axis of the mesh: found, cut, put in order.

The other axes come first. So placements on them are chosen for the whole program at once, and the
values that stages exchange have the same placements on both sides; then each rank's program is cut
into stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazygt.graph.mesh import Mesh, Sharding, VirtualMesh
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import Placement, Replicate, SingleRank
from lazygt.machine import Machine
from lazygt.passes.base import without_likenesses
from lazygt.passes.classes import by_class
from lazygt.passes.pipeline.split import split
from lazygt.passes.pipeline.stages import assign, ordered
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, shard
from lazygt.passes.sharding.marks import ENTER, LEAVE, PLACE


def pipeline_axis(
    graph: Graph, mesh: Mesh, inputs: Sequence[Sharding], workers: VirtualMesh | None = None
) -> str | None:
    """Return the mesh axis along which a program has stages; None if it has none.

    Raises:
        ValueError: it has stages along two axes, or ``workers`` stand for the ranks.
    """
    axes = {node.args[2] for node in graph.nodes if node.op in (ENTER, LEAVE)}
    for sharding in inputs:
        placements = zip(mesh.names, sharding.placements, strict=True)
        axes |= {name for name, placement in placements if isinstance(placement, SingleRank)}
    if len(axes) > 1:
        names = " and ".join(sorted(axes))
        raise ValueError(f"a program has stages along one axis of the mesh {mesh}, not {names}")
    if axes and workers is not None:
        raise ValueError("invariant=True knows no pipeline stages: leave out one of the two")
    return axes.pop() if axes else None


def shard_stages(
    graph: Graph,
    mesh: Mesh,
    axis: str,
    inputs: Sequence[Sharding],
    machine: Machine | None = None,
    decided: list[AxisStep] | None = None,
) -> PartitionedProgram:
    """Return the local programs of a graph with stages along ``axis``; else as ``shard``.

    Raises:
        ValueError: a value is sharded along the axis of the stages.
    """
    at = mesh.names.index(axis)
    homes = [_home(sharding.placements[at], axis) for sharding in inputs]
    others = [
        sharding._replace(placements=_without(sharding.placements, at)) for sharding in inputs
    ]
    rest = Mesh(_without(mesh.names, at), _without(mesh.sizes, at))
    local = shard(_without_axis(graph, at, axis), rest, others, machine, decided)
    stages = mesh.sizes[at]

    def cut(whole: Graph) -> tuple[list[Graph], list[Placement], str]:
        # so that a dropout's mask, which all ranks draw, is of no stage
        program = without_likenesses(whole)
        assigned = assign(program, homes)
        order, why = ordered(program, assigned, stages)
        return *split(program, assigned, order, axis, stages), why

    cuts = by_class(cut, local.graphs)
    graphs: list[Graph] = [graph] * mesh.world_size
    for line, (parts, _, _) in zip(mesh.lines(axis), cuts, strict=True):
        for rank, part in zip(line, parts, strict=True):
            graphs[rank] = part
    _, placements, why = cuts[-1]
    outputs = [
        output._replace(placements=(*output.placements[:at], placement, *output.placements[at:]))
        for output, placement in zip(local.outputs, placements, strict=True)
    ]
    return PartitionedProgram(tuple(graphs), tuple(outputs), why)


def _home(placement: Placement, axis: str) -> int | None:
    if isinstance(placement, SingleRank):
        return placement.rank
    if placement != Replicate():
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
    """Return the graph with placements on the other axes only."""

    def other(node: Node) -> Node:
        if node.op != PLACE:
            return node
        value, placements, *more = node.args
        if placements[at].startswith("S"):
            raise _is_cut(axis)
        return replace(node, args=(value, _without(placements, at), *more))

    if all(node.op != PLACE for node in graph.nodes):
        return graph
    return replace(graph, nodes=tuple(map(other, graph.nodes)))
