"""What placements cost, by hand, and the choice against every choice of strategies."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lazygt.graph import Graph
from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.graph.cost import Cost
from lazygt.graph.liveness import def_use
from lazygt.graph.placement import Cut, Partial, Placement, StridedShard
from lazygt.machine import LinkFigures, Machine, collective_seconds
from lazygt.passes.sharding.choose import reshard_kind, reshard_seconds
from lazygt.passes.sharding.choose.catalogue import (
    StrategyCatalogue,
    StrategySet,
    seconds,
    strategy_seconds,
    work_share,
)
from lazygt.passes.sharding.choose.solver import solve
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.rules import strategies_of
from lazygt.passes.sharding.rules.strategy import Collective, Strategy
from tests.passes.sharding.placements import PLAIN, Annotations, carried, computing, question_of
from tests.passes.sharding.random_graphs import P, R, S, cheapest, random_graph
from tests.passes.tools import graph_of

# -- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (S(0), R, "all_gather"),
        (P, R, "all_reduce"),
        (Partial("max"), R, "all_reduce"),
        (P, S(1), "reduce_scatter"),
        (S(0), S(1), "all_to_all"),
        (R, S(0), ""),
        (R, P, ""),
        (R, Partial("max"), ""),
        (S(0), S(0), ""),
        (R, Partial("prod"), None),
        (S(0), P, None),
        (P, Partial("max"), None),
        (StridedShard(0, 4), R, "all_gather"),
        (P, StridedShard(0, 4), "reduce_scatter"),
        (R, StridedShard(0, 4), ""),
        (StridedShard(0, 4), S(1), "all_to_all"),
        (S(0), StridedShard(0, 4), "all_to_all"),
    ],
)
def test_collective_of_each_label_change(
    source: Placement, target: Placement, kind: str | None
) -> None:
    assert reshard_kind(source, target) == kind
    took = reshard_seconds(PLAIN, source, target, 800, 4)
    assert (
        took
        == {
            "all_gather": 600,
            "all_reduce": 1200,
            "reduce_scatter": 600,
            "all_to_all": 150,
            "": 0,
            None: math.inf,
        }[kind]
    )


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (S(0), S(1), 150),
        (StridedShard(0, 3), S(1), 150),
        (StridedShard(0, 8), S(0), 150),  # so many groups are in each block
        # of three groups a rank keeps what its blocks of them have in common with its block
        (StridedShard(0, 3), S(0), 134),
        (S(0), StridedShard(0, 3), 134),
        (S(0), StridedShard(0, 2), 200),  # ranks 1 and 2 of 4 keep nothing
        (StridedShard(0, 1, 4), S(0), 0),  # but for the rest that does not divide
        (StridedShard(0, 100), StridedShard(0, 2), 300),  # by way of another dim
        (StridedShard(0, 3), StridedShard(1, 2), 300),
    ],
)
def test_traffic_of_interleaved_block_exchange(source: Cut, target: Cut, sent: int) -> None:
    assert reshard_seconds(PLAIN, source, target, 800, 4) == pytest.approx(sent, abs=1)


def test_ring_bytes_of_one_rank_and_of_many() -> None:
    assert ring_bytes("all_reduce", 100, 1) == 0
    assert ring_bytes("all_reduce", 100, 2) == 100
    assert ring_bytes("all_gather", 100, 4) == 75
    late = carried(PLAIN, LinkFigures(5.0, 0.0, 1.0))
    assert collective_seconds(late, "all_gather", 100, 4) == 80
    assert collective_seconds(late, "all_gather", 100, 1) == 0


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_transport_of_collective_sets_its_cost(kind: str, ranks: int) -> None:
    machine = carried(PLAIN, LinkFigures(100.0, 10.0, 1.0), LinkFigures(5.0, 1.0, 2.0))
    for nbytes in (4, 16 << 10, 64 << 10, 256 << 10, 4 << 20):
        took = collective_seconds(machine, kind, nbytes, ranks)
        if goes_by_sockets(kind, nbytes, ranks):
            expected = 5 + (ranks - 2) + socket_bytes(kind, nbytes, ranks) / 2
        else:
            expected = 100 + 10 * (ranks - 2) + ring_bytes(kind, nbytes, ranks)
        assert took == pytest.approx(expected)
    assert goes_by_sockets(kind, 4, ranks)
    assert not goes_by_sockets(kind, 16 << 20, ranks)


def test_the_busiest_rank_sets_the_time() -> None:
    (node,) = graph_of("""
        %0: f32[6, 8] = input
        %1: f32[6, 8] = aten.neg.default(%0)
        return %1
        """).nodes
    metas = node.results
    row, whole = Strategy((S(0),), (S(0),)), Strategy((R,), (R,))
    assert work_share(row, metas, metas, 4) == 2 / 6  # blocks of 2, 2, 2, 0
    assert work_share(whole, metas, metas, 4) == 1
    cost = Cost(48, 192, 192, 1)
    assert strategy_seconds(PLAIN, cost, whole, metas, metas, 4) == 384
    assert strategy_seconds(PLAIN, cost, row, metas, metas, 4) == pytest.approx(128)
    inside = replace(row, comm=(Collective("all_reduce", 100),))
    assert strategy_seconds(PLAIN, cost, inside, metas, metas, 4) == pytest.approx(128 + 150)
    slow = computing(PLAIN, 1e-1).with_values({"host.launch": 7.0})
    assert strategy_seconds(slow, cost, row, metas, metas, 4) == pytest.approx(160 + 7)


# -- the problem, against every choice of strategies -----------------------------------------------


def brute_force(
    graph: Graph, entries: Sequence[StrategySet], machine: Machine, inputs: Annotations
) -> float:
    """The least time over every choice of these strategies; outputs are whole."""
    metas = graph.values
    best = math.inf
    options = [range(len(entry.strategies)) for entry in entries]
    for picked in itertools.product(*options):
        total, uses = 0.0, [[] for _ in metas]  # type: list[list[set[Placement]]]
        made = [inputs.get(v, Annotation(R)).placement for v in range(len(graph.inputs))]
        for node, entry, at in zip(graph.nodes, entries, picked, strict=True):
            row = entry.strategies[at]
            total += seconds(float(entry.costs[at]))
            made.extend(row.outputs)
            for value in set(node.refs()):
                places = [n for n, ref in enumerate(node.refs()) if ref == value]
                uses[value].append({row.inputs[place] for place in places})
        for value in set(graph.outputs):
            uses[value].append({R})
        for value, meta in enumerate(metas):
            assert meta is not None
            total += cheapest(machine, made[value], uses[value], meta.nbytes)
        best = min(best, total)
    return best


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_equals_the_best_of_all_choices_of_rows(first: int) -> None:
    inputs = (Annotation(R), Annotation(S(0)), Annotation(S(1)))
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        graph = random_graph(draw)
        annotations = {0: draw.choice(inputs), 1: draw.choice(inputs)}
        machine = carried(
            PLAIN, LinkFigures(draw.choice([0.0, 30.0]), 0.0, 10.0 ** draw.randint(-2, 2))
        )
        question = question_of(graph, annotations, 4, machine, [[R], [R]], draw.random() < 0.5)
        found = solve(question.problem)
        least = brute_force(graph, question.entries, machine, annotations)
        assert found.exact
        assert seconds(found.cost) == pytest.approx(least, rel=1e-9), f"seed {seed}\n{graph}"


def test_rows_that_are_left_out_when_exploring_are_never_better() -> None:
    """Without annotations no matmul has to be divided, so all that is left out is of no use."""
    dropped = 0
    for seed in range(100, 130):
        draw = random.Random(seed)
        graph = random_graph(draw, ops_at_most=3)
        machine = carried(PLAIN, LinkFigures(0.0, 0.0, 10.0 ** draw.randint(-2, 2)))
        question = question_of(graph, {}, 4, machine, [[R], [R]], explore=True)
        metas = graph.values
        found = StrategyCatalogue(
            def_use(graph), metas, lambda n, m=metas: strategies_of(n, m, 4), 4, machine
        )
        entries = [found.entries[number] for number in found.numbers]
        dropped += sum(len(entry.strategies) for entry in entries)
        dropped -= sum(len(entry.strategies) for entry in question.entries)
        least = brute_force(graph, entries, machine, {})
        assert seconds(solve(question.problem).cost) == pytest.approx(least, rel=1e-9), str(graph)
    assert dropped > 50
