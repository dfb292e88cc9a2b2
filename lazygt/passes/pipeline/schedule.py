"""1F1B: the order in which the stages of a pipeline take their microbatches.

Stage ``s`` of ``P`` does ``P - 1 - s`` forward passes to warm up, then one forward and one backward
pass in turn, then the backward passes that are left. At most ``P - s`` of its microbatches still
wait for their backward pass; in recorded order it has one, and every stage waits for all others.

A microbatch's forward pass reaches from the first mark of a stage to the first gradient that leaves
one; its backward pass, with the recomputation of checkpoints, reaches to the next microbatch's
first mark. A value that enters a stage after the last backward pass (an evaluation, an optimizer's
state) begins no microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from lazygt.graph.node import Graph, Node
from lazygt.passes.pipeline.stages import EVERY, Stages
from lazygt.passes.sharding.marks import ENTER, LEAVE


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
