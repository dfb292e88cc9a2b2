"""Assignment of nodes and values to the stages of a pipeline, and the 1F1B schedule.

The nodes after a stage mark belong to its stage until the next mark; a node that reads a weight of
one stage belongs to that stage. A gradient that leaves a stage returns to the stage of its value.
Nodes that depend on no stage (new tensors, random draws, numbers) run on every stage that reads
their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from lazygt.graph.alias import draws
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import new_versions, written_values
from lazygt.passes.sharding.marks import ENTER, LEAVE

#: Stage of a node that all ranks run, after they receive the operands.
EVERY = -1


@dataclass(frozen=True, slots=True)
class Stages:
    """Stage of each node and of each value."""

    nodes: Sequence[int | None]  # the stage, ``EVERY``, or None: every stage that reads the results
    values: Sequence[int | None]  # the stage; None: every rank has the value, or can compute it
    producers: Sequence[int]  # value -> the number of its producer; -1: an input
    same: dict[int, int]  # a mark's result -> its first operand, which is the same value

    def named(self, value: int) -> int:
        """Return the operand of the chain of marks that a value is the result of."""
        while value in self.same:
            value = self.same[value]
        return value


def assign(graph: Graph, inputs: Sequence[int | None]) -> Stages:
    """Assign every node and value to a stage.

    Args:
        inputs: the stage that has each input; None: every rank has it, and its new versions too.
    """
    return _Assignment(graph, inputs).run()


class _Assignment:
    """Stage assignment in one walk over the nodes."""

    def __init__(self, graph: Graph, inputs: Sequence[int | None]) -> None:
        self._graph = graph
        self._values = list(inputs)
        self._nodes: list[int | None] = []
        self._producers = [-1] * len(inputs)
        self._same: dict[int, int] = {}
        #: values that every rank must have, also when they are written
        self._on_every_rank = {value for value, stage in enumerate(inputs) if stage is None}
        #: the stage of the last mark; preferred where a node could belong to several stages
        self._current: int | None = None

    def run(self) -> Stages:
        """Walk the nodes; see ``assign``."""
        for number, (node, results) in enumerate(self._graph.numbered()):
            stage = (
                self._stage_of_mark(node)
                if node.op in (ENTER, LEAVE)
                else self._stage_of_node(node)
            )
            self._nodes.append(stage)
            self._values += [None if stage == EVERY else stage] * len(results)
            self._producers += [number] * len(results)
            if node.op in (ENTER, LEAVE):
                self._same[results[0]] = node.args[0].index
            versions = new_versions(node, results)
            self._on_every_rank.update(new for old, new in versions if old in self._on_every_rank)
        return Stages(self._nodes, self._values, self._producers, self._same)

    def _stage_of_mark(self, node: Node) -> int | None:
        """Return the stage of a mark, which is the current one from here on."""
        if node.op == ENTER:
            self._current = node.args[1]
        else:
            gradient, value = (self._values[arg.index] for arg in node.args[:2])
            self._current = gradient if value is None else value
        return self._current

    def _stage_of_node(self, node: Node) -> int | None:
        """Return the stage of a node that is no mark, as ``Stages.nodes`` has it."""
        targets = written_values(node)
        operand_stages = self._stages_of((*node.refs(), *targets))
        if node.dynamic:
            return EVERY  # each rank has the results
        if not operand_stages:
            return None
        if draws(node) or not self._on_every_rank.isdisjoint(targets):
            return EVERY
        candidates = self._stages_of(targets) or operand_stages
        return self._current if self._current in candidates else max(candidates)

    def _stages_of(self, values: Sequence[int]) -> set[int]:
        """Return the stages of some values."""
        return {stage for value in values if (stage := self._values[value]) is not None}


# -- 1F1B pipeline schedule ------------------------------------------------------------------------
# Stage ``s`` of ``P`` runs ``P - 1 - s`` forward passes to warm up, then one forward and one
# backward pass alternately, then the remaining backward passes. At most ``P - s`` microbatches of
# the stage are in flight. In recorded order there is one microbatch in flight, and every stage
# waits for all others.
#
# A microbatch's forward pass extends from the first mark of a stage to the first gradient that
# leaves one; its backward pass, with the recomputation of checkpoints, extends to the next
# microbatch's first mark. A value that enters a stage after the last backward pass (an
# evaluation, an optimizer's state) begins no microbatch.


class Unit(NamedTuple):
    """Forward or backward pass of one microbatch on one stage."""

    stage: int
    backward: bool
    microbatch: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"the {way} pass of microbatch {self.microbatch} on stage {self.stage}"


class StageOrder(NamedTuple):
    """Nodes that have a stage, marks apart, by number."""

    numbers: list[int]
    why: str = ""  # the reason for recorded order in place of 1F1B; empty if it is 1F1B


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Unit]:
    """Return the units of one stage in 1F1B order."""
    warm_up = min(stages - 1 - stage, microbatches)
    order = [Unit(stage, False, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(warm_up, microbatches):
        order += [Unit(stage, False, microbatch), Unit(stage, True, microbatch - warm_up)]
    return order + [
        Unit(stage, True, microbatch) for microbatch in range(microbatches - warm_up, microbatches)
    ]


def ordered(graph: Graph, assigned: Stages, stages: int) -> StageOrder:
    """Return the 1F1B order of all nodes that have a stage.

    The order is one topological order of the nodes of all stages, and each rank runs its own nodes
    in that order. Since sends do not block, there is no deadlock. Where 1F1B is impossible (a
    microbatch depends on another microbatch's gradient, or every rank runs one of its nodes), the
    result is the recorded order.
    """
    numbers = [
        number for number, node in enumerate(graph.nodes)
        if assigned.nodes[number] is not None and node.op not in (ENTER, LEAVE)
    ]  # fmt: skip
    phases, microbatches = _phases(graph)
    # the last backward pass, with all later nodes, stays the last of each stage
    scheduled = [number for number in numbers if phases[number] != (True, microbatches - 1)]
    on_every_rank = next((number for number in scheduled if assigned.nodes[number] == EVERY), None)
    if microbatches == 1:
        return StageOrder(numbers)
    if on_every_rank is not None:
        op, line = graph.nodes[on_every_rank].op, graph.line(on_every_rank)
        return StageOrder(
            numbers, f"every rank runs {op} ({line}): do that after the last microbatch"
        )
    nodes_of_unit: dict[Unit, list[int]] = {}
    for number in scheduled:
        stage = assigned.nodes[number]
        assert stage is not None
        nodes_of_unit.setdefault(Unit(stage, *phases[number]), []).append(number)
    dependencies = _unit_dependencies(graph, assigned, nodes_of_unit)
    try:
        units = _topological_order(dependencies, stages, microbatches)
    except CycleError as error:
        return StageOrder(numbers, _contradiction(dependencies, error.args[1]))
    schedule = [number for unit in units for number in nodes_of_unit.get(unit, ())]
    return StageOrder([*schedule, *numbers[len(schedule) :]])


def _phases(graph: Graph) -> tuple[list[tuple[bool, int]], int]:
    """Return (is in backward, microbatch) of each node; and the number of microbatches."""
    last_leave = max((n for n, node in enumerate(graph.nodes) if node.op == LEAVE), default=-1)
    backward, microbatch, phases = False, 0, []
    for number, node in enumerate(graph.nodes):
        if node.op == LEAVE:
            backward = True
        elif node.op == ENTER and backward and number < last_leave and not _is_recomputation(node):
            backward, microbatch = False, microbatch + 1
        phases.append((backward, microbatch))
    return phases, microbatch + 1


def _is_recomputation(node: Node) -> bool:
    """Return whether a value enters a stage in the recomputation of a checkpoint."""
    return len(node.args) > 3


def _unit_dependencies(
    graph: Graph, assigned: Stages, nodes_of_unit: Mapping[Unit, Sequence[int]]
) -> dict[Unit, dict[Unit, None]]:
    """Return for each unit the units that it depends on.

    Values computed outside of all units do not count.

    Args:
        nodes_of_unit: the node numbers of each unit.
    """
    units = {number: unit for unit, numbers in nodes_of_unit.items() for number in numbers}
    dependencies: dict[Unit, dict[Unit, None]] = {unit: {} for unit in nodes_of_unit}
    for number, unit in units.items():
        node = graph.nodes[number]
        for value in (*node.refs(), *node.writes):
            other = units.get(assigned.producers[assigned.named(value)], unit)
            if other != unit:
                dependencies[unit][other] = None
    return dependencies


def _topological_order(
    dependencies: Mapping[Unit, Mapping[Unit, None]], stages: int, microbatches: int
) -> list[Unit]:
    """Return the units of all stages in topological order, each stage's in 1F1B order.

    Raises:
        CycleError: the dependencies contradict 1F1B.
    """
    sorter: TopologicalSorter[Unit] = TopologicalSorter(dependencies)
    for stage in range(stages):
        order = one_f_one_b(stage, stages, microbatches)
        for before, after in pairwise(order):
            sorter.add(after, before)
    return list(sorter.static_order())


def _contradiction(dependencies: Mapping[Unit, Mapping[Unit, None]], cycle: Sequence[Unit]) -> str:
    """Describe the dependency in a cycle of units that contradicts 1F1B.

    Args:
        cycle: units, each before the next.
    """
    pairs = [
        (first, second)
        for first, second in pairwise(cycle)
        if first in dependencies.get(second, ())
    ]
    first, second = max(pairs, key=lambda pair: pair[0].microbatch != pair[1].microbatch)
    return f"{second} needs what {first} makes"
