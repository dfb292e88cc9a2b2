"""Split of a program with stages into one program for each stage.

A stage runs its own nodes, and of those without a stage the ones with results that it needs. It
receives a value of another stage just before its first use, each value once, and sends its own
values as soon as it has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from lazygt.graph.alias import draws, has_effect
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Graph, Node, ref
from lazygt.graph.placement import RECV, SEND, Placement, Replicate, SingleRank, local_meta
from lazygt.passes.base import Placed, placed, rebuild, uninitialized, view_source
from lazygt.passes.pipeline.stages import EVERY, Stages, written


def split(
    graph: Graph, assigned: Stages, order: Sequence[int], axis: str, stages: int
) -> tuple[list[Graph], list[Placement]]:
    """Return each stage's graph, and the stage of each output.

    A stage has a tensor of no elements for each input and output that only another one has.

    Args:
        order: the nodes that have a stage, as ``schedule.ordered`` gives them.
    """
    whole = Whole(graph, assigned, order, stages)
    parts = [StageProgram(whole, stage) for stage in range(stages)]
    homes = [assigned.values[value] for value in graph.outputs]
    placements: list[Placement] = [
        Replicate() if home is None else SingleRank(home) for home in homes
    ]
    return [
        _Writer(whole, parts, stage, axis).graph(placements) for stage in range(stages)
    ], placements


class Whole:
    """Program, assignment and order that all stages share.

    Attributes:
        order: the nodes that have a stage, in the order that all ranks keep.
    """

    def __init__(self, graph: Graph, assigned: Stages, order: Sequence[int], stages: int) -> None:
        self.graph, self.assigned, self.stages = graph, assigned, stages
        self.metas, self.rows = graph.values, placed(graph)
        self.asks = bool(order) and graph.nodes[order[-1]].dynamic
        self.order = order[:-1] if self.asks else order

    @cached_property
    def effects(self) -> list[int]:
        """Nodes without a stage that all ranks run, needed or not."""
        nodes = enumerate(self.graph.nodes)
        return [n for n, node in nodes if self.assigned.nodes[n] is None and has_effect(node)]

    @cached_property
    def earlier_draw(self) -> dict[int, int]:
        """Random op -> the one before it: all ranks draw alike, in recorded order."""
        drawing = [number for number, node in enumerate(self.graph.nodes) if draws(node)]
        return dict(zip(drawing[1:], drawing, strict=False))

    def is_cheap_view(self, number: int) -> bool:
        """Return whether a node is a view of all its operand's elements.

        Then the operand is sent in its place.
        """
        node = self.graph.nodes[number]
        source = view_source(node)
        if source is None or len(node.results) != 1 or len(set(node.refs())) != 1:
            return False
        result, base = node.results[0], self.metas[source]
        return result is not None and base is not None and result.numel >= base.numel


class StageProgram:
    """Program of one stage: nodes by number, and ``~value`` for a value that it receives."""

    def __init__(self, whole: Whole, stage: int) -> None:
        self._whole, self._assigned, self.stage = whole, whole.assigned, stage
        self.tasks: dict[int, None] = {}
        graph, here = whole.graph, (stage, EVERY)
        for number in whole.order:
            if self._assigned.nodes[number] in here:
                self._do(number)
        for value in graph.outputs:
            if self._assigned.values[value] in (None, stage):
                self._do(self._task(value))
        for number in whole.effects:
            self._do(number)
        if whole.asks:
            self._do(len(graph.nodes) - 1)

    def received(self) -> Iterator[int]:
        """Yield the values that come from other stages."""
        return (~task for task in self.tasks if task < 0)

    def _task(self, value: int) -> int | None:
        """Return the task that makes or receives a value; None: it is there."""
        value = self._assigned.named(value)
        maker, home = self._assigned.makers[value], self._assigned.values[value]
        if home is None or home == self.stage:
            return None if maker < 0 else maker
        if maker >= 0 and self._whole.is_cheap_view(maker):
            return maker
        return ~value

    def _do(self, task: int | None) -> None:
        """Do a task after its dependencies, depth first; iterative, since chains are long."""
        stack = [] if task is None else [task]
        while stack:
            if stack[-1] in self.tasks:
                stack.pop()
                continue
            missing = [one for one in self._needs(stack[-1]) if one not in self.tasks]
            if missing:
                stack += reversed(missing)
            else:
                self.tasks[stack.pop()] = None

    def _needs(self, task: int) -> list[int]:
        if task < 0:
            return []
        node = self._whole.graph.nodes[task]
        values = (*node.refs(), *written(node))
        needs = [need for value in values if (need := self._task(value)) is not None]
        earlier = self._whole.earlier_draw.get(task)
        return needs if earlier is None else [earlier, *needs]


class _Writer:
    """Writer of one stage's graph."""

    def __init__(self, whole: Whole, parts: Sequence[StageProgram], stage: int, axis: str) -> None:
        self._whole, self._parts, self._stage, self._axis = whole, parts, stage, axis
        self._rows: list[Placed] = []
        #: value -> the stages that it is sent to
        self._targets: dict[int, list[int]] = {}
        for part in parts:
            for value in part.received():
                if whole.assigned.values[value] == stage:
                    self._targets.setdefault(value, []).append(part.stage)
        self._arriving = {
            other: _sent(part, whole, parts[stage]) for other, part in enumerate(parts)
        }

    def graph(self, placements: Sequence[Placement]) -> Graph:
        """Return the stage's graph.

        Args:
            placements: of the whole program's outputs.
        """
        whole, assigned, count = self._whole, self._whole.assigned, self._whole.stages
        blanks = self._blanks(placements)
        for value in range(len(whole.graph.inputs)):
            self._send(value, 0)
        for task in self._parts[self._stage].tasks:
            if task < 0:
                self._receive(~task)
                continue
            self._rows.append(whole.rows[task])
            for value in whole.rows[task].results:
                self._send(value, task)
        homes = [assigned.values[value] for value in range(len(whole.graph.inputs))]
        inputs = tuple([
            meta if home is None else local_meta(meta, SingleRank(home), count, self._stage)
            for meta, home in zip(whole.graph.inputs, homes, strict=True)
        ])  # fmt: skip
        outputs = tuple([
            value
            if placement in (Replicate(), SingleRank(self._stage))
            else blanks[self._dtype(value)]
            for value, placement in zip(whole.graph.outputs, placements, strict=True)
        ])  # fmt: skip
        return rebuild(
            replace(whole.graph, inputs=inputs, outputs=outputs), self._rows, assigned.same
        )

    def _dtype(self, value: int) -> torch.dtype:
        meta = self._whole.metas[value]
        assert meta is not None
        return meta.dtype

    def _blanks(self, placements: Sequence[Placement]) -> dict[torch.dtype, int]:
        """Make a tensor of no elements for each dtype of the outputs that other stages have."""
        values: dict[torch.dtype, int] = {}
        for value, placement in zip(self._whole.graph.outputs, placements, strict=True):
            dtype = self._dtype(value)
            if placement not in (Replicate(), SingleRank(self._stage)) and dtype not in values:
                number = values[dtype] = len(self._whole.metas) + len(values)
                node = uninitialized(intern((0,), (1,), dtype))
                self._rows.append(Placed(node, (number,), 0))
        return values

    def _send(self, value: int, source: int) -> None:
        for peer in self._targets.get(value, ()):
            node = Node(SEND, (ref(value), peer, self._axis))
            self._rows.append(Placed(node, (), source))

    def _receive(self, value: int) -> None:
        """Receive a value and those sent before it: both ranks of a pair keep one order."""
        home = self._whole.assigned.values[value]
        assert home is not None
        arriving = self._arriving[home]
        if value not in arriving:
            return  # with an earlier one
        while arriving:
            first = arriving.pop(0)
            meta = _arrived(self._whole.metas[first])
            args = (home, meta.shape, meta.dtype, DEVICE, self._axis)
            source = max(self._whole.assigned.makers[first], 0)
            self._rows.append(Placed(Node(RECV, args, (), (meta,)), (first,), source))
            if first == value:
                return


def _sent(sender: StageProgram, whole: Whole, receiver: StageProgram) -> list[int]:
    """Return the values that one stage receives of another, in the order of the sends."""
    wanted = {v for v in receiver.received() if whole.assigned.values[v] == sender.stage}
    inputs = [value for value in sorted(wanted) if whole.assigned.makers[value] < 0]
    values = [value for task in sender.tasks if task >= 0 for value in whole.rows[task].results]
    return inputs + [value for value in values if value in wanted]


def _arrived(meta: TensorMeta | None) -> TensorMeta:
    """Return the meta of a received value: with the sender's strides, if no elements overlap."""
    assert meta is not None
    dense = meta.extent - meta.offset == meta.numel
    stride = meta.stride if dense else contiguous_stride(meta.shape)
    return intern(meta.shape, stride, meta.dtype)
