"""The choice of placements under fixed and wishes, against every choice of strategies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from lazygt.graph import Graph
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.machine import LinkFigures, Machine
from lazygt.passes.sharding.choose import reshard_seconds
from lazygt.passes.sharding.choose.catalogue import StrategySet, seconds
from lazygt.passes.sharding.choose.solver import solve
from lazygt.passes.sharding.marks import Annotation
from tests.passes.sharding.placements import PLAIN, carried, question_of
from tests.passes.sharding.random_graphs import cheapest, random_graph

R, S = Replicate(), Shard


def served(machine: Machine, have: Placement, use: set[Placement], nbytes: int) -> float:
    """The least time to make all the placements of a use of one, by way of one more if better."""

    def each(have: Sequence[Placement], placements: Sequence[Placement]) -> float:
        return sum(
            min(reshard_seconds(machine, h, la, nbytes, 4) for h in have) for la in placements
        )

    wanted = sorted(use, key=str)
    ways = [each([have], [way]) + each([have, way], wanted) for way in (R, *wanted)]
    return min(each([have], wanted), *ways)


def annotated(
    machine: Machine,
    made: Placement | None,
    note: Annotation,
    uses: Sequence[set[Placement]],
    nbytes: int,
) -> float:
    """The least time to serve these uses of a value that an annotation says something of.

    Args:
        made: the placement that an op makes it with; None: it is an input.
    """
    if note.kind == "fixed":
        moved = 0.0 if made is None else reshard_seconds(machine, made, note.placement, nbytes, 4)
        return moved + sum(served(machine, note.placement, use, nbytes) for use in uses)
    if made is None and note.kind == "free":
        return min(cheapest(machine, placement, uses, nbytes) for placement in (R, S(0), S(1)))
    return cheapest(machine, note.placement if made is None else made, uses, nbytes)


def annotations_at_random(draw: random.Random, graph: Graph) -> dict[int, Annotation]:
    placements = (R, S(0), S(1))
    found = {
        0: Annotation(draw.choice(placements), draw.choice(["given", "stored", "fixed", "free"])),
        1: Annotation(draw.choice(placements), draw.choice(["given", "stored", "fixed", "free"])),
    }
    for value in range(2, len(graph.values)):
        if draw.random() < 0.3:
            found[value] = Annotation(draw.choice(placements), draw.choice(["given", "fixed"]))
    return found


def brute_force(
    graph: Graph, entries: Sequence[StrategySet], machine: Machine, notes: Mapping[int, Annotation]
) -> float:
    """The least time over every choice of these strategies; outputs are whole."""
    best = math.inf
    for rows in itertools.product(*(range(len(entry.strategies)) for entry in entries)):
        total = 0.0
        uses: list[list[set[Placement]]] = [[] for _ in graph.values]
        made: list[Placement | None] = [None] * len(graph.inputs)
        for node, entry, at in zip(graph.nodes, entries, rows, strict=True):
            total += seconds(float(entry.costs[at]))
            made.extend(entry.strategies[at].outputs)
            refs, wanted = node.refs(), entry.strategies[at].inputs
            for value in set(refs):
                uses[value].append({la for v, la in zip(refs, wanted, strict=True) if v == value})
        for value in set(graph.outputs):
            uses[value].append({R})
        for value, meta in enumerate(graph.values):
            assert meta is not None
            if uses[value]:  # a fixed of what nobody takes costs nothing
                note = notes.get(value, Annotation(R))
                total += annotated(machine, made[value], note, uses[value], meta.nbytes)
        best = min(best, total)
    return best


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_pins_and_wishes_get_the_best_of_all_choices(first: int) -> None:
    kinds = set()
    for seed in range(first, first + 30):
        draw = random.Random(seed)
        graph = random_graph(draw, ops_at_most=3)
        notes = annotations_at_random(draw, graph)
        machine = carried(
            PLAIN, LinkFigures(draw.choice([0.0, 30.0]), 0.0, 10.0 ** draw.randint(-2, 2))
        )
        question = question_of(graph, notes, 4, machine, [[R], [R]], draw.random() < 0.5)
        found = solve(question.problem)
        least = brute_force(graph, question.entries, machine, notes)
        assert seconds(found.cost) == pytest.approx(least, rel=1e-9), (
            f"seed {seed} {notes}\n{graph}"
        )
        kinds |= {note.kind for note in notes.values()}
    assert kinds == {"given", "stored", "fixed", "free"}
