"""Collectives under way on real workers: what is computed meanwhile, and what happens when
something fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.graph.text import parse_graph
from lazygt.passes.bucket import Caps
from lazygt.passes.overlap import overlapped
from tests.sharding import training

pytestmark = pytest.mark.timeout(120)

DATA = {"data": 2}
S0 = Shard(0)


def meanwhile(graph: Graph) -> list[list[str]]:
    """For each launch, in order, the ops between it and its wait."""
    found: dict[int, list[str]] = {}
    under_way: set[int] = set()
    for node, results in graph.numbered():
        if node.op == WAIT:
            under_way.remove(node.args[0].index)
            continue
        for flying in under_way:
            found[flying].append(node.op)
        if node.op in (LAUNCH, LAUNCH_):
            found[results[0]] = []
            under_way.add(results[0])
    return list(found.values())


def overlap_of(text: str) -> Graph:
    graph = parse_graph(text)
    return overlapped([graph, graph], Mesh.of(DATA), Caps())[0]


def test_a_sum_is_launched_when_it_is_ready_and_waited_for_when_it_is_used() -> None:
    graph = overlap_of("""graph {
  %0: f32[4] = input
  %1: f32[4] = aten.sin.default(%0)
  %2: f32[4] = aten.cos.default(%0)
  %3: f32[4] = aten.exp.default(%2)
  %4: f32[4] = lazygt.all_reduce(%1, 'sum', 'data')
  %5: f32[4] = aten.add.Tensor(%4, %3)
  return %5
}""")
    assert (
        str(graph)
        == """graph {
  %0: f32[4] = input
  %1: f32[4] = aten.sin.default(%0)
  %2: f32[4] = lazygt.launch_('all_reduce', [%1], [], 'sum', 'data') writes %1
  %3: f32[4] = aten.cos.default(%0)
  %4: f32[4] = aten.exp.default(%3)
  %5: f32[4] = lazygt.wait(%2, [], [], 'data') writes %2
  %6: f32[4] = aten.add.Tensor(%5, %4)
  return %6
}"""
    )


def test_nobody_waits_for_a_loss_to_begin_its_backward() -> None:
    graph = overlap_of("""graph {
  %0: f32[] = input
  %1: f32[] = aten.sin.default(%0)
  %2: f32[] = lazygt.all_reduce(%1, 'sum', 'data')
  %3: f32[] = aten.ones_like.default(%2)
  %4: f32[] = aten.exp.default(%3)
  return %2, %4
}""")
    assert meanwhile(graph) == [["aten.ones_like.default", "aten.exp.default"]]


def test_buffer_being_sent_is_not_overwritten() -> None:
    graph = overlap_of("""graph {
  %0: f32[2] = input
  %1: f32[4] = lazygt.all_gather(%0, 0, 4, 'data')
  %2: f32[2] = aten.neg_.default(%0) writes %0
  %3: f32[4] = aten.exp.default(%1)
  return %2, %3
}""")
    assert [node.op for node in graph.nodes[:3]] == [LAUNCH, WAIT, "aten.neg_.default"]
    assert graph.nodes[1].args[1] == graph.nodes[0].args[1], "held until the wait"


@pytest.mark.slow
def test_gradients_travel_while_the_backward_goes_on() -> None:
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1), compile="off") as s:
        layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
        model = nn.Sequential(*layers)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(8, 512)
        s.flush()
        x = lazygt.distribute(batch, [S0])
        model(x).square().mean().backward()
        opt.step()
        assert s.last_plan is not None
        between = meanwhile(s.last_plan.steps.graph)
        assert [ops.count("aten.mm.default") for ops in between] == [3, 1, 0, 0]


@pytest.mark.parametrize(
    ("lay", "meanwhile_multiplied"),
    # what is scattered is under way alone, until the next one is ready: the last layer's while its
    # input's gradient and the next weight's are computed, that one's while the first weight's is;
    # 3 MiB of weights are scattered after each of the two backwards, all biases once
    [(lazygt.data_parallel, [0, 0, 1, 3]), (lazygt.fully_shard, [0, 0, 0, 1, 1, 2, 2])],
)
def test_gradients_of_several_microbatches_travel_during_a_backward(
    lay: Callable[[nn.Module], nn.Module], meanwhile_multiplied: list[int]
) -> None:
    with lazygt.session(launcher="dry", mesh=DATA, compile="off") as s:
        layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
        model = lay(nn.Sequential(*layers))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        s.flush()
        for _ in range(2):
            x = lazygt.distribute(torch.randn(8, 512), [S0])
            model(x).square().mean().backward()
        opt.step()
        assert s.last_plan is not None
        graph = s.last_plan.steps.graph
        launches = [node for node in graph.nodes if node.op in (LAUNCH, LAUNCH_)]
        between = zip(launches, meanwhile(graph), strict=True)
        reductions = [ops for launch, ops in between if launch.args[0] != "all_gather"]
        # three weights, the first of them after the backward, and all biases
        assert sorted(ops.count("aten.mm.default") for ops in reductions) == meanwhile_multiplied


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_buckets_change_no_bit_of_a_training(optimizer: str) -> None:
    found = []
    for cap in (25.0, 0.01, 0.0):
        with lazygt.session(
            mesh=DATA,
            workers=lazygt.Workers(threads=1),
            planning=lazygt.Planning(bucket_cap_mb=cap),
        ):
            losses, state, s = training.train("gpt", DATA, optimizer)
            most = max(len(plan.collectives) for plan in s.plans())
        found.append((losses + state, most))
    (first, few), (second, some), (third, many) = found
    assert few < some < many
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.slow
@pytest.mark.parametrize("bad_row", [0, 4])
@pytest.mark.parametrize("runs_before", [0, 3])
def test_failure_during_collective_leaves_no_rank_waiting(bad_row: int, runs_before: int) -> None:
    with lazygt.session(
        mesh=DATA, workers=lazygt.Workers(threads=1), planning=lazygt.Planning(bucket_cap_mb=0)
    ) as s:
        table = torch.arange(10.0).reshape(5, 2)
        kept = table + 1
        s.flush()

        def total(rows: list[int]) -> torch.Tensor:
            at = lazygt.distribute(torch.tensor(rows, device="cpu").to("lazygt"), [S0])
            first = at.sum()
            picked = table.index_select(0, at).sum()
            return first + picked

        for _ in range(runs_before):
            assert total([0, 1, 2, 3, 4]).item() == 55.0
        rows = [0, 1, 2, 3, 4]
        rows[bad_row] = 99
        with pytest.raises(lazygt.ExecutionError, match=r"index_select.*out of range") as caught:
            total(rows).item()
        assert caught.value.where.startswith(__file__)
        assert kept.sum().item() == 55.0, "what every rank has is intact"
        assert total([0, 1, 2, 3, 4]).item() == 55.0, "the ranks have a new group"


@pytest.mark.slow
def test_a_profile_shows_launches_and_waits() -> None:
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(torch.ones(6), [S0])
        s.flush()
        with lazygt.profile(s) as timeline:
            assert x.sin().sum().item() == pytest.approx(6 * 0.8414710)
        names = {event["name"] for event in timeline.events()}
        assert {"lazygt.launch_", "lazygt.wait"} <= names
