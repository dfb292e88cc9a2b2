"""Pipeline parallelism on one axis of the mesh: stage assignment, schedule and split.

The other axes of the mesh are sharded first, for the full program, so that the values exchanged
between stages have the same placements on both sides. Then each rank's program is split into
stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from lazygt.graph.alias import draws, has_effect
from lazygt.graph.mesh import Mesh, Sharding, VirtualMesh
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Graph, Node, ref
from lazygt.graph.placement import RECV, SEND, Placement, Replicate, SingleRank, local_meta
from lazygt.machine import Machine
from lazygt.passes.base import (
    NodeRow,
    by_class,
    rebuild,
    rows_of,
    uninitialized,
    view_source,
    without_likenesses,
    written_values,
)
from lazygt.passes.pipeline.stages import EVERY, Stages, assign, ordered
from lazygt.passes.sharding.axis import AxisStep, PartitionedProgram, shard
from lazygt.passes.sharding.marks import ENTER, LEAVE, PLACE

# -- split of a program with stages into one program for each stage --------------------------------
# A stage runs its own nodes, and those nodes without a stage on which its results depend. Each
# value of another stage is received once, right before its first use; values for other stages are
# sent as soon as they are computed.


def split(
    graph: Graph, assigned: Stages, order: Sequence[int], axis: str, stages: int
) -> tuple[list[Graph], list[Placement]]:
    """Return each stage's graph, and the placement of each output along the axis.

    A stage has an empty tensor for each input and output that only another stage has.

    Args:
        assigned: the stage of each node and value.
        order: the nodes that have a stage, in the order of ``stages.ordered``.
        axis: the mesh axis of the stages.
        stages: their number.
    """
    program = FullProgram(graph, assigned, order, stages)
    stage_programs = [StageProgram(program, stage) for stage in range(stages)]
    output_stages = [assigned.values[value] for value in graph.outputs]
    placements: list[Placement] = [
        Replicate() if output_stage is None else SingleRank(output_stage)
        for output_stage in output_stages
    ]
    return [
        _StageWriter(program, stage_programs, stage, axis).graph(placements)
        for stage in range(stages)
    ], placements


class FullProgram:
    """Full program with the stage assignment and the order that all stages share.

    Args:
        assigned: the stage of each node and value.
        order: the nodes that have a stage, in the order that all ranks keep.
        stages: number of stages.

    Attributes:
        order: the nodes that have a stage, in the order that all ranks keep.
    """

    def __init__(self, graph: Graph, assigned: Stages, order: Sequence[int], stages: int) -> None:
        self.graph, self.assigned, self.stages = graph, assigned, stages
        self.metas, self.rows = graph.values, rows_of(graph)
        self.ends_dynamic = bool(order) and graph.nodes[order[-1]].dynamic
        self.order = order[:-1] if self.ends_dynamic else order

    @cached_property
    def effects(self) -> list[int]:
        """Nodes with an effect and without a stage; all ranks run them."""
        nodes = enumerate(self.graph.nodes)
        return [n for n, node in nodes if self.assigned.nodes[n] is None and has_effect(node)]

    @cached_property
    def earlier_draw(self) -> dict[int, int]:
        """Random op -> the previous random op: all ranks draw alike, in recorded order."""
        drawing = [number for number, node in enumerate(self.graph.nodes) if draws(node)]
        return dict(zip(drawing[1:], drawing, strict=False))

    def is_cheap_view(self, number: int) -> bool:
        """Return whether a node is a view of all elements of its operand.

        Then the operand is sent instead, and the receiver runs the view.
        """
        node = self.graph.nodes[number]
        source = view_source(node)
        if source is None or len(node.results) != 1 or len(set(node.refs())) != 1:
            return False
        result, base = node.results[0], self.metas[source]
        return result is not None and base is not None and result.numel >= base.numel


class StageProgram:
    """Tasks of one stage, in order: ``number`` runs a node, ``~value`` receives a value."""

    def __init__(self, program: FullProgram, stage: int) -> None:
        self._program, self._assigned, self.stage = program, program.assigned, stage
        self.tasks: dict[int, None] = {}
        graph, local_stages = program.graph, (stage, EVERY)
        for number in program.order:
            if self._assigned.nodes[number] in local_stages:
                self._add_task(number)
        for value in graph.outputs:
            if self._assigned.values[value] in (None, stage):
                self._add_task(self._task_of(value))
        for number in program.effects:
            self._add_task(number)
        if program.ends_dynamic:
            self._add_task(len(graph.nodes) - 1)

    def received(self) -> Iterator[int]:
        """Return the values that are received from other stages, in order."""
        return (~task for task in self.tasks if task < 0)

    def _task_of(self, value: int) -> int | None:
        """Return the task that computes or receives a value; None for an input of the stage."""
        value = self._assigned.named(value)
        producer, owner = self._assigned.producers[value], self._assigned.values[value]
        if owner is None or owner == self.stage:
            return None if producer < 0 else producer
        if producer >= 0 and self._program.is_cheap_view(producer):
            return producer
        return ~value  # a receive

    def _add_task(self, task: int | None) -> None:
        """Add a task after its dependencies, by iterative depth-first search."""
        stack = [] if task is None else [task]
        while stack:
            if stack[-1] in self.tasks:
                stack.pop()
                continue
            missing = [
                dependency
                for dependency in self._dependencies_of(stack[-1])
                if dependency not in self.tasks
            ]
            if missing:
                stack += reversed(missing)
            else:
                self.tasks[stack.pop()] = None

    def _dependencies_of(self, task: int) -> list[int]:
        """Return the tasks that have to run before a task."""
        if task < 0:  # a receive
            return []
        node = self._program.graph.nodes[task]
        values = (*node.refs(), *written_values(node))
        dependencies = [
            dependency for value in values if (dependency := self._task_of(value)) is not None
        ]
        earlier_draw = self._program.earlier_draw.get(task)
        return dependencies if earlier_draw is None else [earlier_draw, *dependencies]


class _StageWriter:
    """Builder of one stage's graph, with sends and receives."""

    def __init__(
        self, program: FullProgram, stage_programs: Sequence[StageProgram], stage: int, axis: str
    ) -> None:
        self._program, self._stage_programs = program, stage_programs
        self._stage, self._axis = stage, axis
        self._rows: list[NodeRow] = []
        #: value -> the stages that it is sent to
        self._targets: dict[int, list[int]] = {}
        for stage_program in stage_programs:
            for value in stage_program.received():
                if program.assigned.values[value] == stage:
                    self._targets.setdefault(value, []).append(stage_program.stage)
        self._pending_receives = {
            other: _sent(stage_program, program, stage_programs[stage])
            for other, stage_program in enumerate(stage_programs)
        }

    def graph(self, placements: Sequence[Placement]) -> Graph:
        """Return the stage's graph.

        Args:
            placements: of the full program's outputs.
        """
        program, assigned, count = self._program, self._program.assigned, self._program.stages
        empty_tensors = self._empty_tensors(placements)
        for value in range(len(program.graph.inputs)):
            self._send(value, 0)
        for task in self._stage_programs[self._stage].tasks:
            if task < 0:
                self._receive(~task)
                continue
            self._rows.append(program.rows[task])
            for value in program.rows[task].results:
                self._send(value, task)
        input_stages = [assigned.values[value] for value in range(len(program.graph.inputs))]
        inputs = tuple([
            meta if stage is None else local_meta(meta, SingleRank(stage), count, self._stage)
            for meta, stage in zip(program.graph.inputs, input_stages, strict=True)
        ])  # fmt: skip
        outputs = tuple([
            value
            if placement in (Replicate(), SingleRank(self._stage))
            else empty_tensors[self._dtype(value)]
            for value, placement in zip(program.graph.outputs, placements, strict=True)
        ])  # fmt: skip
        return rebuild(
            replace(program.graph, inputs=inputs, outputs=outputs), self._rows, assigned.same
        )

    def _dtype(self, value: int) -> torch.dtype:
        meta = self._program.metas[value]
        assert meta is not None
        return meta.dtype

    def _empty_tensors(self, placements: Sequence[Placement]) -> dict[torch.dtype, int]:
        """Add an empty tensor for each dtype of the outputs that other stages have."""
        values: dict[torch.dtype, int] = {}
        for value, placement in zip(self._program.graph.outputs, placements, strict=True):
            dtype = self._dtype(value)
            if placement not in (Replicate(), SingleRank(self._stage)) and dtype not in values:
                number = values[dtype] = len(self._program.metas) + len(values)
                node = uninitialized(intern((0,), (1,), dtype))
                self._rows.append(NodeRow(node, (number,), 0))
        return values

    def _send(self, value: int, source: int) -> None:
        """Add the sends of a value to all stages that receive it."""
        for peer in self._targets.get(value, ()):
            node = Node(SEND, (ref(value), peer, self._axis))
            self._rows.append(NodeRow(node, (), source))

    def _receive(self, value: int) -> None:
        """Add the receives of a value and of all values that its sender sends before it.

        Sends and receives between two ranks are matched by their order.
        """
        sender = self._program.assigned.values[value]
        assert sender is not None
        pending = self._pending_receives[sender]
        if value not in pending:
            return  # received with an earlier value
        while pending:
            first = pending.pop(0)
            meta = _received_meta(self._program.metas[first])
            args = (sender, meta.shape, meta.dtype, DEVICE, self._axis)
            source = max(self._program.assigned.producers[first], 0)
            self._rows.append(NodeRow(Node(RECV, args, (), (meta,)), (first,), source))
            if first == value:
                return


def _sent(sender: StageProgram, program: FullProgram, receiver: StageProgram) -> list[int]:
    """Return the values that one stage receives from another, in the order of the sends."""
    wanted = {v for v in receiver.received() if program.assigned.values[v] == sender.stage}
    inputs = [value for value in sorted(wanted) if program.assigned.producers[value] < 0]
    values = [value for task in sender.tasks if task >= 0 for value in program.rows[task].results]
    return inputs + [value for value in values if value in wanted]


def _received_meta(meta: TensorMeta | None) -> TensorMeta:
    """Return the meta of a received value: the sender's if dense, else a contiguous one."""
    assert meta is not None
    dense = meta.extent - meta.offset == meta.numel
    stride = meta.stride if dense else contiguous_stride(meta.shape)
    return intern(meta.shape, stride, meta.dtype)


# -- pipeline parallelism on one axis of the mesh: stage assignment, schedule and split ------------


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
    for axis_group, (stage_graphs, _, _) in zip(mesh.axis_groups(axis), splits, strict=True):
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
    """Return the error for a value that is sharded along the axis of the stages."""
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
