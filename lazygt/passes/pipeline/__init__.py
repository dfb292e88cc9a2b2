"""Pipeline parallelism on one axis of the mesh: stage assignment, schedule and split.

The other axes of the mesh are sharded first, for the full program, so that the values exchanged
between stages have the same placements on both sides. Then each rank's program is split into
stages.
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
        ValueError: the program has stages along two axes, or virtual ranks (``workers``).
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
    """Return each rank's program of a graph with pipeline stages along ``axis``.

    The other arguments are those of ``shard``.

    Raises:
        ValueError: a value is sharded along the axis of the stages.
    """
    axis_index = mesh.names.index(axis)
    input_stages = [
        _stage_of_placement(sharding.placements[axis_index], axis) for sharding in inputs
    ]
    other_inputs = [
        sharding._replace(placements=_drop_item(sharding.placements, axis_index))
        for sharding in inputs
    ]
    other_axes = Mesh(_drop_item(mesh.names, axis_index), _drop_item(mesh.sizes, axis_index))
    local = shard(_drop_axis(graph, axis_index, axis), other_axes, other_inputs, machine, decided)
    stages = mesh.sizes[axis_index]

    def split_graph(full_graph: Graph) -> tuple[list[Graph], list[Placement], str]:
        # the dropout mask, which all ranks draw, then belongs to no stage
        program = without_likenesses(full_graph)
        assigned = assign(program, input_stages)
        order, in_order_reason = ordered(program, assigned, stages)
        return *split(program, assigned, order, axis, stages), in_order_reason

    splits = by_class(split_graph, local.graphs)
    graphs: list[Graph] = [graph] * mesh.world_size
    for axis_group, (stage_graphs, _, _) in zip(mesh.lines(axis), splits, strict=True):
        for rank, stage_graph in zip(axis_group, stage_graphs, strict=True):
            graphs[rank] = stage_graph
    _, placements, in_order_reason = splits[-1]
    outputs = [
        output._replace(
            placements=(*output.placements[:axis_index], placement, *output.placements[axis_index:])
        )
        for output, placement in zip(local.outputs, placements, strict=True)
    ]
    return PartitionedProgram(tuple(graphs), tuple(outputs), in_order_reason)


def _stage_of_placement(placement: Placement, axis: str) -> int | None:
    """Return the stage that has a value; None: every stage has it."""
    if isinstance(placement, SingleRank):
        return placement.rank
    if placement != Replicate():
        raise _sharded_error(axis)
    return None


def _sharded_error(axis: str) -> ValueError:
    return ValueError(
        f"a value is cut along axis {axis!r} of the mesh, along which the program has stages; "
        f"place it as Replicate() there"
    )


def _drop_item(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return (*items[:index], *items[index + 1 :])


def _drop_axis(graph: Graph, index: int, axis: str) -> Graph:
    """Return the graph without the placements on axis number ``index``."""

    def other(node: Node) -> Node:
        if node.op != PLACE:
            return node
        operand, placements, *more = node.args
        if placements[index].startswith("S"):
            raise _sharded_error(axis)
        return replace(node, args=(operand, _drop_item(placements, index), *more))

    if all(node.op != PLACE for node in graph.nodes):
        return graph
    return replace(graph, nodes=tuple(map(other, graph.nodes)))
