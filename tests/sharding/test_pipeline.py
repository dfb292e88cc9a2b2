"""Programs with pipeline stages, all ranks in one process: the numbers are those of one device,
each boundary is crossed once a microbatch and direction, and the order is 1F1B."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.node import Graph
from lazygt.graph.placement import RECV, SEND
from lazygt.graph.text import parse_graph
from lazygt.passes.pipeline.stages import Unit, assign, one_f_one_b, ordered
from lazygt.passes.sharding.marks import MARKS, without_places
from lazygt.passes.sharding.programs import programs
from tests.sharding.staged import BATCH, MLP, WIDTH, Program, StagedGPT, put_on_stages, recorded
from tests.sharding.world import run_sharded, run_whole

pytestmark = pytest.mark.timeout(120)


def agree(program: Program) -> None:
    expected = run_whole(
        without_places(program.graph, MARKS), [t.clone() for t in program.inputs], program.params
    )
    made = run_sharded(
        program.graph, program.mesh, program.stored, program.inputs, program.params
    )  # fmt: skip
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def cut(program: Program) -> tuple[Graph, ...]:
    return programs(program.graph, program.mesh, program.stored, check=True).graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=4"])
@pytest.mark.parametrize("make", [MLP, StagedGPT])
def test_a_step_in_stages_is_the_step(
    make: Callable[[], Any], mesh: str, microbatches: int
) -> None:
    agree(recorded(make, mesh, microbatches))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pipe=2,data=2", "data=2,pipe=2", "data=2,pipe=4"])
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (MLP, torch.optim.AdamW),
        (StagedGPT, torch.optim.SGD),
        # a key's bias has no gradient but rounding, which Adam would make a whole step of
        (StagedGPT, partial(torch.optim.AdamW, eps=1e-3)),
    ],
)
def test_stages_beside_data_parallelism(
    make: Callable[[], Any], optimizer: Callable[..., torch.optim.Optimizer], mesh: str
) -> None:
    program = recorded(make, mesh, 2, optimizer)
    agree(program)
    reduced = [c for c in communications(cut(program)[0]) if c.kind != "send_recv"]
    assert {c.mesh_dim for c in reduced} == {"data"}


def test_clipping_needs_all_stages() -> None:
    agree(recorded(MLP, "pipe=4", 4, clip=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_horizontal_steps_of_optimizers(foreach: bool) -> None:
    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, foreach=foreach)

    agree(recorded(MLP, "pipe=2", 2, optimizer=sgd))


def test_module_without_stage_is_on_all_stages() -> None:
    agree(recorded(StagedGPT, "pipe=2", 2, skip=lambda model: [model.norm]))


def test_dropout_draws_the_same_on_all_ranks() -> None:
    program = recorded(lambda: MLP(dropout=0.5), "pipe=2", 2)
    drawn = [[n.op for n in graph.nodes if "bernoulli" in n.op] for graph in cut(program)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 16


# -- what is sent ------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
def test_each_boundary_is_crossed_once_a_microbatch_and_direction(
    stages: int, microbatches: int
) -> None:
    graphs = cut(recorded(MLP, f"pipe={stages}", microbatches))
    activation = BATCH // microbatches * WIDTH * 4
    for stage, graph in enumerate(graphs):
        neighbours = (stage > 0) + (stage < stages - 1)
        found = communications(graph)
        assert [(c.kind, c.nbytes, c.mesh_dim, c.reduce_op) for c in found] == [
            ("send_recv", activation, "pipe", None)
        ] * (2 * microbatches * neighbours)
        assert all(c.source.startswith(__file__.replace("test_pipeline", "staged")) for c in found)


def test_a_shared_weight_is_sent_once_and_its_gradient_a_microbatch() -> None:
    sent = Counter(
        (rank, node.args[1], graph.values[node.args[0].index].nbytes)  # type: ignore[union-attr]
        for rank, graph in enumerate(cut(recorded(StagedGPT, "pipe=2", 2)))
        for node in graph.nodes
        if node.op == SEND
    )
    activation, weight = BATCH // 2 * 6 * 16 * 4, 20 * 16 * 4
    assert sent == {
        (0, 1, activation): 2, (1, 0, activation): 2, (0, 1, weight): 1, (1, 0, weight): 2,
    }  # fmt: skip


# -- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4])
def test_checkpoint_recomputation_begins_no_microbatch(stages: int) -> None:
    program = recorded(lambda: MLP(checkpointed=True), f"pipe={stages}", 4)
    agree(program)
    made = programs(program.graph, program.mesh, program.stored, check=True)
    assert not made.why_in_turn
    plain = cut(recorded(MLP, f"pipe={stages}", 4))
    assert [len(communications(graph)) for graph in made.graphs] == [
        len(communications(graph)) for graph in plain
    ]


def test_one_f_one_b_schedule_matches_literature() -> None:
    def drawn(stage: int) -> str:
        return " ".join("FB"[u.backward] + str(u.microbatch) for u in one_f_one_b(stage, 4, 5))

    assert drawn(0) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert drawn(2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert drawn(3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


@pytest.mark.parametrize("microbatches", range(1, 9))
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_no_stage_waits_for_ever(stages: int, microbatches: int) -> None:
    orders = [one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    done: set[Unit] = set()
    while any(orders):
        ready = [order[0] for order in orders if order and set(_before(order[0], stages)) <= done]
        assert ready, f"all wait: {[order[0] for order in orders if order]}"
        done.update(ready)
        orders = [order[1:] if order and order[0] in done else order for order in orders]
    assert len(done) == 2 * stages * microbatches


def _before(unit: Unit, stages: int) -> Iterator[Unit]:
    stage, backward, microbatch = unit
    if backward:
        yield Unit(stage, False, microbatch)
        if stage < stages - 1:
            yield Unit(stage + 1, True, microbatch)
    elif stage:
        yield Unit(stage - 1, False, microbatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [2, 4])
def test_programs_are_in_that_order(stages: int, microbatches: int) -> None:
    program = recorded(MLP, f"pipe={stages}", microbatches)
    for stage, graph in enumerate(cut(program)[:-1]):
        order = [unit.backward for unit in one_f_one_b(stage, stages, microbatches)]
        # a forward pass ends with a send to the next stage, a backward pass begins with its answer
        assert list(_exchanged(graph, stage + 1)) == order
        live = most = 0
        for backward in order:
            live += -1 if backward else 1
            most = max(most, live)
        assert most == min(stages - stage, microbatches)


def test_dropout_changes_neither_order_nor_traffic() -> None:
    plain, dropping = (
        cut(recorded(lambda p=p: MLP(dropout=p), "pipe=2", 4))[0] for p in (0.0, 0.5)
    )  # fmt: skip
    assert list(_exchanged(dropping, 1)) == list(_exchanged(plain, 1))
    assert [c.nbytes for c in communications(dropping)] == [c.nbytes for c in communications(plain)]


def _exchanged(graph: Graph, peer: int) -> Iterator[bool]:
    """For each send to a rank and receipt from it, whether it was a receipt."""
    for node in graph.nodes:
        if node.op == RECV and node.args[0] == peer:
            yield True
        elif node.op == SEND and node.args[1] == peer:
            yield False


TWO_MICROBATCHES = """graph {
  %0: f32[2] = input
  %1: f32[2] = lazygt.enter_stage(%0, 0, "pipe")
  %2: f32[2] = aten.exp.default(%1)
  %3: f32[2] = lazygt.enter_stage(%2, 1, "pipe")
  %4: f32[2] = aten.exp.default(%3)
  %5: f32[2] = lazygt.leave_stage(%4, %2, "pipe")
  %6: f32[2] = aten.mul.Tensor(%5, %2)
  %7: f32[2] = lazygt.enter_stage(%SECOND, 0, "pipe")
  %8: f32[2] = aten.exp.default(%7)
  %9: f32[2] = lazygt.enter_stage(%8, 1, "pipe")
  %10: f32[2] = aten.exp.default(%9)
  %11: f32[2] = lazygt.leave_stage(%10, %8, "pipe")
  %12: f32[2] = aten.mul.Tensor(%11, %8)
  return %6, %12
}"""


@pytest.mark.parametrize(
    ("second", "first_stage", "why"),
    [
        ("0", [1, 7, 5, 11], ""),
        ("6", [1, 5, 7, 11], "the forward pass of microbatch 1 on stage 0 needs what the backward "
                             "pass of microbatch 0 on stage 0 makes"),
    ],
    ids=["apart", "chained"],
)  # fmt: skip
def test_a_microbatch_that_needs_the_one_before_waits_for_it(
    second: str, first_stage: list[int], why: str
) -> None:
    graph = parse_graph(TWO_MICROBATCHES.replace("SECOND", second))
    found = assign(graph, [None])
    order, told = ordered(graph, found, 2)
    assert told == why
    assert [number for number in order if found.nodes[number] == 0] == first_stage
    assert [number for number in order if found.nodes[number] == 1] == [3, 9]


def test_stages_that_wait_for_each_other_are_told_of_once() -> None:
    why = rf"since every rank runs aten\.add_\.Tensor \({__file__}:\d+\): do that after the last"
    with (
        warnings.catch_warnings(),
        lazygt.session(
            launcher="dry", mesh={"pipe": 2}, tracing=lazygt.Tracing(flush_on_backward=False)
        ) as s,
    ):
        warnings.simplefilter("error", lazygt.PipelineWarning)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        put_on_stages([[model[0]], [model[1]]])
        total = torch.zeros(4).sum()
        s.flush()

        def step(rows: int, total: torch.Tensor) -> None:
            for micro in torch.ones(rows, WIDTH).chunk(4):
                loss = model(micro).square().mean()
                loss.backward()
                total.add_(loss.detach())
            s.flush()

        step(8, torch.zeros(4).sum())  # of this step alone, so the last stage has it
        with pytest.warns(lazygt.PipelineWarning, match=why):
            step(8, total)
        step(16, total)
