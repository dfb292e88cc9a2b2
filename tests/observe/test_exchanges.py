"""How long workers stood still for collectives, from timed runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.observe.timeline import ExchangeTime, exchange_times
from lazygt.runtime.messages import Timings
from lazygt.runtime.plan import Plan

pytestmark = pytest.mark.timeout(120)
LAUNCHES = (LAUNCH, LAUNCH_)


def train(steps: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    lazygt.data_parallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = lazygt.distribute(torch.randn(8, 32), {"data": Shard(0)})
    for _ in range(steps):
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()


def planned() -> Plan:
    with lazygt.session(launcher="dry", mesh={"data": 2}) as s:
        train(1)
        return max(s.plans(), key=lambda plan: len(plan.collectives))


def test_launches_and_waits_are_exposed_and_time_between_is_hidden() -> None:
    """Every step takes a second."""
    plan = planned()
    graph = plan.steps.graph
    second = 1_000_000_000
    steps = tuple((n, 1, n * second, (n + 1) * second) for n in range(len(graph.nodes)))
    (row,) = exchange_times([(graph, Timings(0, len(steps) * second, steps))])
    launches = [n for n, node in enumerate(graph.nodes) if node.op in LAUNCHES]
    waits = [n for n, node in enumerate(graph.nodes) if node.op == WAIT]
    assert len(launches) == len(waits) == len(plan.collectives) > 0
    assert row == ExchangeTime(
        "all_reduce", "data", len(launches), sum(c.nbytes for c in plan.collectives),
        float(len(launches) + len(waits)), float(sum(waits) - sum(launches) - len(launches)),
    )  # fmt: skip


def test_runs_of_several_ranks_are_added_up() -> None:
    graph = planned().steps.graph
    steps = tuple((n, 1, n, n + 1) for n in range(len(graph.nodes)))
    once = exchange_times([(graph, Timings(0, len(steps), steps))])
    thrice = exchange_times([(graph, Timings(0, len(steps), steps))] * 3)
    assert [row.times for row in thrice] == [3 * row.times for row in once]
    assert [row.nbytes for row in thrice] == [3 * row.nbytes for row in once]
    assert exchange_times([]) == []


def test_a_profile_of_two_workers_has_their_collectives() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        train(1)
        s.synchronize()
        with lazygt.profile(s) as timeline:
            train(2)
        plans = [plan for plan in s.plans() if plan.collectives]
    (row,) = timeline.collectives()
    assert (row.kind, row.axis) == ("all_reduce", "data")
    assert row.times == 2 * 2 * len(plans[-1].collectives)
    assert row.exposed > 0
