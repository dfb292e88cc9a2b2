"""``invariant=``: the same bits on any number of workers, with plans that are merged from those of
virtual ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.config import Config
from lazygt.graph.collectives import communications
from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Mesh, Sharding, VirtualMesh
from lazygt.graph.placement import Replicate, Shard
from lazygt.graph.text import parse_graph
from tests.models import zoo
from tests.sharding.merged import SEED, run_merged, worker_graphs
from tests.sharding.models import Program, placed_at_random, program
from tests.sharding.training import MEGATRON
from tests.sharding.world import run_whole

__all__ = ["program"]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINES = ["data=1", "data=2", "data=4"]
GRIDS = ["data=1,model=1", "data=2,model=1", "data=1,model=2", "data=2,model=2", "data=4,model=1"]


# -- who stands for whom ------------------------------------------------------------------------


def test_a_worker_stands_for_neighbours_on_every_axis() -> None:
    mesh = VirtualMesh.of(Mesh.parse("data=2,model=1"), {"data": 4, "model": 2})
    assert str(mesh) == "data=4,model=2 on data=2,model=1"
    assert [mesh.of_worker(worker) for worker in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [mesh.worker(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.holders(1, (R, R)) == (4,)
    assert mesh.holders(1, (S0, R)) == (4, 6)
    assert mesh.holders(1, (R, S0)) == (4, 5)
    assert mesh.holders(1, (S0, S1)) == (4, 5, 6, 7)
    assert mesh.holder(7, (S0, R)) == 6
    assert mesh.slots([None, Sharding((S0, R)), Sharding((S0, S0))]) == (
        range(1), range(1, 3), range(3, 7)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "invariant", "says"),
    [
        ("data=3", True, "3 workers on axis 'data' can't share 4 virtual ranks evenly; take a "
                         "multiple of 3"),
        ("data=8", 4, "8 workers on axis 'data'"),
        ("data=2", {"dada": 4}, "the mesh data=2 has no axis 'dada'"),
        ("data=2", 0, "can't share 0 virtual ranks"),
    ],
)  # fmt: skip
def test_virtual_ranks_that_can_not_be_are_refused(workers: str, invariant: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VirtualMesh.of(Mesh.parse(workers), invariant)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("1", True),
        ("on", True),
        ("8", 8),
        ("data=8,model=2", {"data": 8, "model": 2}),
        ("0", False),
    ],
)
def test_invariant_is_read_from_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, means: Any
) -> None:
    monkeypatch.setenv("LAZYGT_INVARIANT", text)
    monkeypatch.delenv("LAZYGT_COMPILE", raising=False)
    config = Config.load()
    assert config.invariant == means
    assert type(config.invariant) is type(means)
    assert (config.threads, config.compile) == ((1, "off") if means else (None, "auto"))


def test_compiled_code_is_refused() -> None:
    with pytest.raises(ValueError, match="leave compile= out"):
        lazygt.session(launcher="inline", invariant=True, compile="now")


# -- merged programs, in one process ------------------------------------------------------------


def graph_of(text: str) -> Program:
    graph = parse_graph(text)
    torch.manual_seed(0)
    inputs = [torch.randn(meta.shape, dtype=meta.dtype) for meta in graph.inputs]
    return Program(graph, inputs, [])


SUM = """graph {
  %0: f32[4] = input
  %1: f32[] = aten.sum.default(%0)
  return %1
}"""


@pytest.mark.parametrize("workers", LINES)
def test_sums_are_added_pairwise_in_the_order_of_the_virtual_ranks(workers: str) -> None:
    graph, _, _ = graph_of(SUM)
    a, b, c, d = values = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])
    (made,) = run_merged(graph, [Sharding((S0,))], [values], [], workers, 4)
    assert torch.equal(made, (a + b) + (c + d))
    assert not torch.equal(made, ((a + b) + c) + d)


@pytest.mark.parametrize("workers", ["data=1", "data=2", "data=3", "data=6"])
def test_any_number_of_ranks_a_worker_gives_the_same_tree(workers: str) -> None:
    graph, _, _ = graph_of(SUM.replace("[4]", "[6]"))
    a, b, c, d, e, f = values = torch.randn(6) * 10.0 ** torch.arange(6)
    (made,) = run_merged(graph, [Sharding((S0,))], [values], [], workers, 6)
    assert torch.equal(made, ((a + b) + (c + d)) + (e + f))


MOVES = """graph {
  %0: f32[5, 7] = input
  %1: f32[7, 5] = input
  %2: f32[5, 5] = aten.mm.default(%0, %1)
  %3: f32[5, 5] = lazygt.place(%2, ["S(1)"], False)
  %4: f32[5, 5] = lazygt.place(%3, ["S(0)"], False)
  %5: f32[5, 5] = lazygt.place(%4, ["R"], False)
  return %3, %4, %5
}"""


@pytest.mark.parametrize("workers", LINES)
def test_uneven_and_empty_blocks_move_and_are_put_together(workers: str) -> None:
    graph, inputs, _ = graph_of(MOVES)
    stored = [Sharding((S1,)), Sharding((S0,))]
    made = run_merged(graph, stored, inputs, [], workers, 4)
    once = run_merged(graph, stored, inputs, [], "data=1", 4)
    for got, first in zip(made, once, strict=True):
        assert torch.equal(got, first)
        torch.testing.assert_close(got, inputs[0] @ inputs[1])


ROLLED = """graph {
  %0: f32[9, 5] = input
  %1: f32[9, 5] = aten.roll.default(%0, [2], [0])
  %2: f32[9, 5] = aten.mul.Tensor(%0, %1)
  %3: f32[9, 5] = lazygt.place(%2, ["S(0)"], False)
  return %3
}"""


@pytest.mark.parametrize("workers", LINES)
def test_rows_go_to_other_virtual_ranks(workers: str) -> None:
    graph, (value,), _ = graph_of(ROLLED)
    (made,) = run_merged(graph, [Sharding((S0,))], [value], [], workers, 4)
    assert torch.equal(made, value * value.roll(2, 0))


DROPPED = """graph {
  %0: f32[6, 4] = input
  %1: f32[4, 4] = input
  %2: f32[6, 4] = aten.empty_like.default(%0)
  %3: f32[6, 4] = aten.bernoulli_.float(%2, 0.5) writes %2
  %4: f32[6, 4] = aten.mul.Tensor(%0, %3)
  %5: f32[6, 4] = aten.mm.default(%4, %1)
  %6: f32[4, 4] = aten.add_.Scalar(%1, 1.0) writes %1
  return %5, %6
}"""


@pytest.mark.parametrize("workers", LINES)
def test_draws_and_updates_of_whole_values_happen_once_a_worker(workers: str) -> None:
    graph, inputs, _ = graph_of(DROPPED)
    stored = [Sharding((S0,)), Sharding((R,))]
    for local in worker_graphs(graph, stored, workers, 4):
        count = Counter(node.op for node in expand_fused(local).nodes)
        assert count["aten.bernoulli_.float"] == 1
        assert count["aten.add_.Scalar"] == 1
        assert count["aten.mm.default"] == 4 // Mesh.parse(workers).world_size
    made = run_merged(graph, stored, inputs, [], workers, 4)
    torch.manual_seed(SEED)
    kept = torch.empty(6, 4).bernoulli_(0.5)
    torch.testing.assert_close(made[0], (inputs[0] * kept) @ inputs[1])
    assert torch.equal(made[1], inputs[1] + 1)


# -- what it costs ------------------------------------------------------------------------------


def payloads(program: Program, workers: str, stored: list[Sharding]) -> list[tuple[str, int]]:
    local = worker_graphs(program.graph, stored, workers, 4)[0]
    return [(one.kind, one.nbytes) for one in communications(expand_fused(local))]


def product(n: int) -> Program:
    return graph_of(f"""graph {{
      %0: f32[8, {n}] = input
      %1: f32[8, {n}] = input
      %2: f32[{n}, 8] = aten.t.default(%0)
      %3: f32[{n}, {n}] = aten.mm.default(%2, %1)
      return %3
    }}""")


def test_sums_travel_unreduced() -> None:
    stored = [Sharding((S0,), fixed=True)] * 2
    small, large = 64 * 64 * 4, 256 * 256 * 4
    assert payloads(product(64), "data=1", stored) == []
    assert payloads(product(64), "data=2", stored) == [("all_gather", 2 * small)]
    assert payloads(product(64), "data=4", stored) == [("all_gather", 4 * small)]
    assert payloads(product(256), "data=2", stored) == [("all_gather", 2 * large)]
    # a large one is cut first, so that 4 workers send no more than for an all-reduce
    assert payloads(product(256), "data=4", stored) == [
        ("all_to_all", large), ("all_gather", large)
    ]  # fmt: skip


# -- training steps -----------------------------------------------------------------------------


def check_step(program: Program, worlds: list[str], ranks: Any, seed: int) -> None:
    """One step with its inputs cut at random: the same bits in all worlds, and right ones."""
    draw = random.Random(seed)
    stored = [placed_at_random(t, Mesh.parse(worlds[0]), draw) for t in program.inputs]
    torch.manual_seed(SEED)
    expected = run_whole(*program)
    graph, inputs, params = program
    first = run_merged(graph, stored, inputs, params, worlds[0], ranks)
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for workers in worlds[1:]:
        made = run_merged(graph, stored, inputs, params, workers, ranks)
        assert all(map(torch.equal, made, first)), workers


@pytest.mark.parametrize("program", ["mlp"], indirect=True)
@pytest.mark.parametrize(("worlds", "ranks"), [(LINES, 4), (GRIDS, {"data": 4, "model": 2})])
def test_a_step_has_the_same_bits_on_any_number_of_workers(
    program: Program, worlds: list[str], ranks: Any
) -> None:
    check_step(program, worlds, ranks, seed=0)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("program", ["gpt", "bilstm", "cnn"], indirect=True)
@pytest.mark.parametrize(
    ("worlds", "ranks"),
    [(LINES, 4), (["data=1", "data=3", "data=6"], 6), (GRIDS, {"data": 4, "model": 2})],
)
def test_larger_steps_have_the_same_bits_on_any_number_of_workers(
    program: Program, worlds: list[str], ranks: Any, seed: int
) -> None:
    check_step(program, worlds, ranks, seed)


# -- sessions -----------------------------------------------------------------------------------

State = list[torch.Tensor]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, 7))


PLANS: dict[str, Mapping[str, Any]] = {
    "batch": {},
    "weights": {"0.*": [TorchShard(0)], "3.weight": [TorchShard(1)]},
}


def mlp(cut: str, steps: int) -> State:
    """An MLP with dropout in the session that is open: a batch of 10, which 4 does not divide."""
    torch.manual_seed(5)
    model = dropping()
    if PLANS[cut]:
        lazygt.parallelize_module(model, None, PLANS[cut])
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(10, 12, generator=draw, device="cpu").to("lazygt")
        y = torch.randint(7, (10,), generator=draw, device="cpu").to("lazygt")
        if cut == "batch":
            x, y = lazygt.distribute(x, [TorchShard(0)]), lazygt.distribute(y, [TorchShard(0)])
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def gpt(cut: str, steps: int) -> State:
    """A GPT: its batch cut, or its weights along the last axis of the mesh, or both, or FSDP."""
    torch.manual_seed(3)
    model = zoo.MODELS["gpt"][0]()
    *_, axis = lazygt.current().mesh.names
    if cut in ("weights", "both"):
        lazygt.parallelize_module(
            model,
            None,
            {name: {axis: to["model"]} for name, to in MEGATRON["gpt"].items()},
        )
    if cut == "fsdp":
        lazygt.fully_shard(model, mesh_dim="data")
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in zoo.batches("gpt", steps):
        x, y = x.to("lazygt"), y.to("lazygt")
        if cut != "weights":
            x, y = (lazygt.distribute(t, {"data": TorchShard(0)}) for t in (x, y))
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_one_worker_runs_all_virtual_ranks() -> None:
    whole = torch.randn(5, 3)
    with lazygt.session(launcher="inline", mesh={"data": 1}, invariant=True) as s:
        x = lazygt.distribute(whole.to("lazygt"), [TorchShard(0)])
        y = (x * 2).relu()
        assert y.placements == (TorchShard(0),)
        assert torch.equal(y.cpu(), (whole * 2).relu())
        assert torch.equal(
            lazygt.distribute(x, [TorchShard(0)]).cpu(), whole
        )  # a plan without a node
        y.add_(x)  # blocks are written in place, and read again in the next run
        s.flush()
        assert torch.equal(y.cpu(), (whole * 2).relu() + whole)
        assert torch.equal(lazygt.redistribute(y, [TorchShard(1)]).t().cpu(), y.cpu().t())
        assert x.nonzero().shape == (15, 2)
        assert s.last_plan is not None
        assert s.last_plan.collectives == ()
        assert "for data=4 (sums travel unreduced, nothing is compiled)" in repr(s)
        del x, y
        s.synchronize()
        assert len(s._link._worker.store) == 0  # type: ignore[attr-defined]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", PLANS)
def test_weights_after_100_steps_are_the_same_bits_on_1_2_and_4_workers(cut: str) -> None:
    states = []
    for workers in (1, 2, 4):
        with lazygt.session(mesh={"data": workers}, invariant=True):
            states.append(mlp(cut, 100))
    for state in states[1:]:
        assert all(map(torch.equal, state, states[0]))
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        plain = mlp(cut, 100)
    assert not all(map(torch.equal, plain, states[0]))  # what invariant= is for
    for got, want in zip(plain, states[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def check_gpt(cut: str, meshes: list[dict[str, int]], invariant: Any) -> None:
    states = []
    for mesh in meshes:
        with lazygt.session(mesh=mesh, invariant=invariant):
            states.append(gpt(cut, 5))
    for mesh, state in zip(meshes[1:], states[1:], strict=True):
        assert all(map(torch.equal, state, states[0])), mesh


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", ["batch", "weights", "fsdp"])
def test_a_gpt_has_the_same_bits_on_1_2_and_4_workers(cut: str) -> None:
    check_gpt(cut, [{"data": workers} for workers in (1, 2, 4)], True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gpt_on_a_grid_has_the_same_bits_however_it_is_shared() -> None:
    shapes = [(1, 1), (2, 1), (1, 2), (2, 2)]
    meshes = [{"data": data, "model": model} for data, model in shapes]
    check_gpt("both", meshes, {"data": 4, "model": 2})


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("invariant", [4, 8, {"data": 2}], ids=str)
def test_uneven_blocks_are_fetched_from_their_owners(invariant: Any) -> None:
    whole = torch.randn(5, 300)
    mesh = {"data": 2}
    with lazygt.session(
        mesh=mesh, invariant=invariant, workers=lazygt.Workers(shm_threshold=2000)
    ) as s:
        x = lazygt.distribute(whole.to("lazygt"), [TorchShard(0)])
        for turn in range(3):
            assert torch.equal((x + turn).cpu(), whole + turn)
        assert torch.equal(lazygt.redistribute(x, [TorchShard(1)]).cpu(), whole)
        assert s.stats()["bytes_fetched"] == 4 * whole.nbytes
