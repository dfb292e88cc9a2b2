"""Assignment of nodes and values to the stages of a pipeline.

The nodes after a mark belong to its stage until the next mark; a node that reads a weight of one
stage belongs to that stage. A gradient that leaves a stage goes back to the stage of its value.
Nodes that depend on no stage (new tensors, random draws, numbers) run wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from lazygt.graph.alias import WRITE_BACK, draws
from lazygt.graph.node import Graph, Node
from lazygt.passes.sharding.marks import ENTER, LEAVE

#: The stage of a node that all ranks run, on operands that they are sent.
EVERY = -1


@dataclass(frozen=True, slots=True)
class Stages:
    """Stage of each node and of each value.

    Attributes:
        nodes: the stage, ``EVERY``, or None: wherever its results are needed.
        values: the stage; None: every rank has it, or can make it.
        makers: value -> the node that made it; -1: an input.
        same: a mark's result -> its first operand.
    """

    nodes: Sequence[int | None]
    values: Sequence[int | None]
    makers: Sequence[int]
    same: dict[int, int]

    def named(self, value: int) -> int:
        """Return the value behind the marks that it passed."""
        while value in self.same:
            value = self.same[value]
        return value


def assign(graph: Graph, inputs: Sequence[int | None]) -> Stages:
    """Assign every node and value to a stage.

    Args:
        inputs: the stage that has each input; None: every rank has it, and its new versions too.
    """
    return _Assignment(graph, inputs).made()


class _Assignment:
    def __init__(self, graph: Graph, inputs: Sequence[int | None]) -> None:
        self._graph = graph
        self._values = list(inputs)
        self._nodes: list[int | None] = []
        self._makers = [-1] * len(inputs)
        self._same: dict[int, int] = {}
        #: values that every rank must have, also when they are written
        self._everywhere = {value for value, stage in enumerate(inputs) if stage is None}
        #: the stage of the last mark: of two stages that a node could belong to, the likely one
        self._current: int | None = None

    def made(self) -> Stages:
        for number, (node, results) in enumerate(self._graph.numbered()):
            stage = self._marked(node) if node.op in (ENTER, LEAVE) else self._stage(node)
            self._nodes.append(stage)
            self._values += [None if stage == EVERY else stage] * len(results)
            self._makers += [number] * len(results)
            if node.op in (ENTER, LEAVE):
                self._same[results[0]] = node.args[0].index
            first = 0 if node.op == WRITE_BACK else len(node.fresh)
            versions = zip(written(node), results[first:], strict=False)
            self._everywhere.update(new for old, new in versions if old in self._everywhere)
        return Stages(self._nodes, self._values, self._makers, self._same)

    def _marked(self, node: Node) -> int | None:
        if node.op == ENTER:
            self._current = node.args[1]
        else:
            gradient, value = (self._values[arg.index] for arg in node.args[:2])
            self._current = gradient if value is None else value
        return self._current

    def _stage(self, node: Node) -> int | None:
        targets = written(node)
        staged = self._of((*node.refs(), *targets))
        if node.dynamic:
            return EVERY  # each rank names its results
        if not staged:
            return None
        if draws(node) or not self._everywhere.isdisjoint(targets):
            return EVERY
        likely = self._of(targets) or staged
        return self._current if self._current in likely else max(likely)

    def _of(self, values: Sequence[int]) -> set[int]:
        return {stage for value in values if (stage := self._values[value]) is not None}


def written(node: Node) -> Sequence[int]:
    """Return the values that a node makes new versions of."""
    return (node.args[0].index,) if node.op == WRITE_BACK else node.writes


# -- 1F1B: the order in which the stages of a pipeline take their microbatches ---------------------
# Stage ``s`` of ``P`` does ``P - 1 - s`` forward passes to warm up, then one forward and one
# backward pass in turn, then the backward passes that are left. At most ``P - s`` of its
# microbatches still wait for their backward pass; in recorded order it has one, and every stage
# waits for all others.
#
# A microbatch's forward pass reaches from the first mark of a stage to the first gradient that
# leaves one; its backward pass, with the recomputation of checkpoints, reaches to the next
# microbatch's first mark. A value that enters a stage after the last backward pass (an
# evaluation, an optimizer's state) begins no microbatch.


class Unit(NamedTuple):
    """One stage's part of one microbatch."""

    stage: int
    backward: bool
    microbatch: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"the {way} pass of microbatch {self.microbatch} on stage {self.stage}"


class StageOrder(NamedTuple):
    """Nodes that have a stage, marks apart, by number.

    Attributes:
        why: the reason for recorded order in place of 1F1B; empty if it is 1F1B.
    """

    numbers: list[int]
    why: str = ""


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Unit]:
    """Return the units of one stage, in order."""
    ahead = min(stages - 1 - stage, microbatches)
    order = [Unit(stage, False, microbatch) for microbatch in range(ahead)]
    for microbatch in range(ahead, microbatches):
        order += [Unit(stage, False, microbatch), Unit(stage, True, microbatch - ahead)]
    return order + [
        Unit(stage, True, microbatch) for microbatch in range(microbatches - ahead, microbatches)
    ]


def ordered(graph: Graph, assigned: Stages, stages: int) -> StageOrder:
    """Return an order that all ranks keep.

    It is one topological order of all nodes, and each rank runs its part of it: since no send
    waits, there is no deadlock. Where 1F1B is impossible (a stage of one microbatch needs another
    microbatch's gradient, or every rank has a part in it), it is the recorded order.
    """
    numbers = [
        number for number, node in enumerate(graph.nodes)
        if assigned.nodes[number] is not None and node.op not in (ENTER, LEAVE)
    ]  # fmt: skip
    phases, microbatches = _phases(graph)
    # the last backward pass, with all that follows it, is each stage's last in any case
    middle = [number for number in numbers if phases[number] != (True, microbatches - 1)]
    shared = next((number for number in middle if assigned.nodes[number] == EVERY), None)
    if microbatches == 1:
        return StageOrder(numbers)
    if shared is not None:
        op, line = graph.nodes[shared].op, graph.line(shared)
        return StageOrder(
            numbers, f"every rank runs {op} ({line}): do that after the last microbatch"
        )
    parts: dict[Unit, list[int]] = {}
    for number in middle:
        stage = assigned.nodes[number]
        assert stage is not None
        parts.setdefault(Unit(stage, *phases[number]), []).append(number)
    needs = _needs(graph, assigned, parts)
    try:
        units = _sorted(needs, stages, microbatches)
    except CycleError as error:
        return StageOrder(numbers, _need(needs, error.args[1]))
    moved = [number for unit in units for number in parts.get(unit, ())]
    return StageOrder([*moved, *numbers[len(moved) :]])


def _phases(graph: Graph) -> tuple[list[tuple[bool, int]], int]:
    """Return (in backward, microbatch) of each node; and the number of microbatches."""
    last = max((n for n, node in enumerate(graph.nodes) if node.op == LEAVE), default=-1)
    backward, microbatch, phases = False, 0, []
    for number, node in enumerate(graph.nodes):
        if node.op == LEAVE:
            backward = True
        elif node.op == ENTER and backward and number < last and not _is_again(node):
            backward, microbatch = False, microbatch + 1
        phases.append((backward, microbatch))
    return phases, microbatch + 1


def _is_again(node: Node) -> bool:
    """Return whether a value enters a stage in the recomputation of a checkpoint."""
    return len(node.args) > 3


def _needs(
    graph: Graph, assigned: Stages, parts: Mapping[Unit, Sequence[int]]
) -> dict[Unit, dict[Unit, None]]:
    """Return for each unit the units that it takes results of.

    Values made outside of all units add nothing.
    """
    units = {number: unit for unit, numbers in parts.items() for number in numbers}
    needs: dict[Unit, dict[Unit, None]] = {unit: {} for unit in parts}
    for number, unit in units.items():
        node = graph.nodes[number]
        for value in (*node.refs(), *node.writes):
            other = units.get(assigned.makers[assigned.named(value)], unit)
            if other != unit:
                needs[unit][other] = None
    return needs


def _sorted(
    needs: Mapping[Unit, Mapping[Unit, None]], stages: int, microbatches: int
) -> list[Unit]:
    """Return the units of all stages in topological order.

    Raises:
        CycleError: there is none.
    """
    sorter: TopologicalSorter[Unit] = TopologicalSorter(needs)
    for stage in range(stages):
        order = one_f_one_b(stage, stages, microbatches)
        for before, after in pairwise(order):
            sorter.add(after, before)
    return list(sorter.static_order())


def _need(needs: Mapping[Unit, Mapping[Unit, None]], cycle: Sequence[Unit]) -> str:
    """Describe the dependency in a cycle of units that contradicts 1F1B.

    Args:
        cycle: units, each before the next.
    """
    pairs = [(first, second) for first, second in pairwise(cycle) if first in needs.get(second, ())]
    first, second = max(pairs, key=lambda pair: pair[0].microbatch != pair[1].microbatch)
    return f"{second} needs what {first} makes"
