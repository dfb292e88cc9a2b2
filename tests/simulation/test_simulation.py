"""Runs of plans, simulated: by hand where hands can, and against what is known of schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.graph.mesh import Mesh
from lazygt.machine import Machine, default_machine
from lazygt.machine.prices import axis_group_seconds, collective_seconds
from lazygt.runtime.plan import Plan
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, Prediction, Rehearsal, predict
from lazygt.simulation.program import repeated

pytestmark = pytest.mark.timeout(120)

#: A byte takes a nanosecond, a launch a microsecond, arithmetic nothing to speak of.
PLAIN = default_machine("cpu").with_values({
    "memory.bandwidth": 1e9, "memory.cache": 1e3, "memory.cache_bandwidth": 1e9,
    "host.launch": 1e-6, "host.record": 0.0, "host.message": 0.0, "matmul.rate.f32": 1e17,
    **{f"pointwise.{kind}": 1e15 for kind in default_machine("cpu").pointwise},
})  # fmt: skip
WIDTH = 64


def predicted(
    program: Callable[[], object], mesh: dict[str, int] | None = None, machine: Machine = PLAIN
) -> tuple[Prediction, lazygt.Session]:
    more = {"mesh": mesh} if mesh else {}
    with lazygt.session(**grouped({**DRY, **more})) as s:
        living = LiveValue(s)
        program()
    return predict(s, machine, living), s


def train(
    wrap: Callable[[nn.Module], object] = lambda model: None, rows: int = 8, cut: bool = True
) -> None:
    """Three steps of four layers."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    wrap(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(rows, WIDTH)
    x = lazygt.distribute(x, {"data": Shard(0)}) if cut else x
    for _ in range(3):
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()


def test_ops_follow_each_other() -> None:
    """Two launches; 4 KiB are read and written by each."""

    def program() -> None:
        x = torch.empty(1024)
        for _ in range(3):
            x = x.neg().flip(0)
            lazygt.current().flush()

    prediction, _ = predicted(program)
    assert prediction.step_seconds == pytest.approx(2 * (1e-6 + 8192e-9))
    assert prediction.looped
    assert not prediction.waits
    lines = prediction.by_line()
    assert [line.rpartition(":")[0] for line, _ in lines] == [__file__]
    assert sum(seconds for _, seconds in lines) == pytest.approx(prediction.computing)


def test_reading_in_every_step_serializes_recording_and_computing() -> None:
    slow = PLAIN.with_values({"host.record": 1e-3})

    def program(read: bool) -> None:
        x = torch.empty(1024)
        for _ in range(3):
            x = x.neg()
            _ = x.sum().item() if read else lazygt.current().flush()

    reads, _ = predicted(lambda: program(True), machine=slow)
    goes_on, _ = predicted(lambda: program(False), machine=slow)
    assert reads.waits
    assert reads.step_seconds == pytest.approx(reads.recording + reads.computing)
    assert goes_on.host_bound
    assert goes_on.step_seconds == goes_on.recording == pytest.approx(1e-3)


def test_predicted_collectives_match_plan_and_prices() -> None:
    prediction, session = predicted(lambda: train(lazygt.data_parallel), {"data": 2})
    plan = max(session.plans(), key=lambda plan: len(plan.collectives))
    assert sum(row.times for row in prediction.collectives) == len(plan.collectives) > 0
    assert sum(row.nbytes for row in prediction.collectives) == sum(
        sent.nbytes for sent in plan.collectives
    )
    assert sum(row.seconds for row in prediction.collectives) == pytest.approx(
        sum(collective_seconds(PLAIN, c.kind, c.nbytes, 2) for c in plan.collectives)
    )
    assert all(0 <= row.exposed <= row.seconds for row in prediction.collectives)
    assert sum(row.ring for row in prediction.collectives) == sum(
        sent.ring_bytes for sent in plan.collectives
    )


def test_traffic_is_reported_by_kind_of_parallelism() -> None:
    """Gradients of four matrices, and what a pipeline sends on."""
    prediction, _ = predicted(lambda: train(lazygt.data_parallel), {"data": 4})
    (row,) = prediction.by_parallelism()
    weights = 4 * WIDTH * WIDTH * 4
    assert (row.parallelism, row.axis, row.ranks, row.kind) == ("data", "data", 4, "all_reduce")
    assert (row.nbytes, row.ring) == (weights, 2 * weights * 3 // 4)
    assert row._asdict() in prediction.as_json()["by_parallelism"]
    assert "sent in a step, by kind of parallelism" in str(prediction)


def test_pipeline_traffic_counts_at_sender() -> None:
    def program() -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        lazygt.stage(model[0], 0)
        lazygt.stage(model[1], 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for x in torch.randn(4 * 8, WIDTH).chunk(4):
                model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()

    prediction, _ = predicted(program, {"pipe": 2})
    rows = {row.kind: row for row in prediction.by_parallelism()}
    assert rows["send"].parallelism == "pipeline"
    assert rows["send"].nbytes == rows["send"].ring == 4 * 8 * WIDTH * 4
    assert rows["receive"].ring == 0 if "receive" in rows else True


def test_a_slow_network_is_exposed_and_a_fast_one_is_hidden() -> None:
    def with_latency(seconds: float) -> Prediction:
        keys = [key for key in PLAIN.figures if key.endswith(".latency")]
        machine = PLAIN.with_values(dict.fromkeys(keys, seconds))
        return predicted(lambda: train(lazygt.fully_shard), {"data": 2}, machine)[0]

    fast, slow = with_latency(1e-9), with_latency(1.0)
    alone, _ = predicted(lambda: train(cut=False, rows=4))
    assert slow.step_seconds == pytest.approx(
        sum(row.exposed for row in slow.collectives) + slow.runs[0].simulated.classes[0].busy
    )
    assert slow.step_seconds > len(slow.collectives)
    assert fast.step_seconds < 3 * alone.step_seconds


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_a_pipeline_has_the_bubble_of_1f1b(microbatches: int) -> None:
    """With two equal stages one of M + 1 microbatches' time (Narayanan et al., 2021)."""
    free = PLAIN.with_values({
        key: 1e-12 if key.endswith(("latency", "each")) else 1e15
        for key in PLAIN.figures
        if key.startswith("collectives.") and key.endswith(("latency", "each", "bandwidth"))
    })  # fmt: skip

    def program() -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
        lazygt.stage(model[:4], 0)
        lazygt.stage(model[4:], 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for x in torch.randn(512 * microbatches, WIDTH).chunk(microbatches):
                model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()

    prediction, _ = predicted(program, {"pipe": 2}, free)
    run = max(prediction.runs, key=lambda run: run.simulated.seconds).simulated
    assert [ranks.count for ranks in run.classes] == [1, 1]
    busiest = max(ranks.busy for ranks in run.classes)
    assert run.seconds / busiest == pytest.approx((microbatches + 1) / microbatches, rel=0.12)


def test_simulation_work_is_independent_of_number_of_ranks() -> None:
    few, _ = predicted(lambda: train(lazygt.data_parallel, 16), {"data": 2})
    many, _ = predicted(lambda: train(lazygt.data_parallel, 64 * 8), {"data": 64})
    (two,), (all_of_them,) = few.runs[-1].simulated.classes, many.runs[-1].simulated.classes
    assert (two.count, all_of_them.count) == (2, 64)
    assert len(two.spans) == len(all_of_them.spans)
    assert two.busy == pytest.approx(all_of_them.busy)
    assert many.flops == 32 * few.flops


def test_blocks_need_less_memory() -> None:
    whole, _ = predicted(lambda: train(lazygt.data_parallel), {"data": 4})
    blocks, _ = predicted(lambda: train(lazygt.fully_shard), {"data": 4})
    assert blocks.peak_bytes < whole.peak_bytes
    assert whole.peak_bytes > 4 * WIDTH * WIDTH * 4
    assert whole.peak_line.startswith(__file__)


def test_values_read_by_no_run_count_for_peak() -> None:
    def program(kept: int) -> list[torch.Tensor]:
        others = [torch.ones(kept // 4)] if kept else []
        x = torch.empty(1024)
        for _ in range(3):
            x = x.neg()
            lazygt.current().flush()
        return others

    alone, _ = predicted(lambda: program(0))
    with_others, _ = predicted(lambda: program(1 << 20))
    assert with_others.peak_bytes - alone.peak_bytes == 1 << 20


def test_mfu_is_of_the_dtype_that_is_multiplied() -> None:
    gpu = default_machine("cuda")

    def program(dtype: torch.dtype) -> None:
        a = torch.empty(4096, 4096, dtype=dtype)
        for _ in range(3):
            a = a @ a
            lazygt.current().flush()

    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        with lazygt.session(**grouped({**DRY, "device": "cuda"})) as s:
            living = LiveValue(s)
            program(dtype)
        prediction = predict(s, gpu, living)
        assert prediction.dtype == name
        flops = 2 * 4096**3
        assert prediction.flops == flops
        peak = gpu.matmul.peak[name]
        assert prediction.mfu == pytest.approx(flops / prediction.step_seconds / peak)
        assert 0.2 < prediction.mfu < 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_tokens_are_those_of_all_ranks_and_microbatches(microbatches: int) -> None:
    def program() -> None:
        words, places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        opt = torch.optim.SGD([*words.parameters(), *places.parameters()], lr=0.1)
        ids = torch.randint(0, 32, (8, 6), device="cpu").to("lazygt")
        ids = lazygt.distribute(ids, {"data": Shard(0)})
        for _ in range(3):
            for part in ids.chunk(microbatches):
                (words(part) + places(torch.arange(6))).square().sum().backward()
            opt.step()
            opt.zero_grad()

    prediction, _ = predicted(program, {"data": 2})
    assert prediction.tokens == 8 * 6
    assert prediction.tokens_per_second == pytest.approx(48 / prediction.step_seconds)
    assert "48 tokens, " in str(prediction)


def test_between_hosts_a_line_goes_by_the_network() -> None:
    gpu = default_machine("cuda")
    here, there = list(range(8)), list(range(0, 64, 8))
    inside = axis_group_seconds(gpu, "all_reduce", 1 << 28, here)
    assert inside == collective_seconds(gpu, "all_reduce", 1 << 28, 8)
    link = gpu.collectives.network[-1]
    sent = 2 * (1 << 28) * 7 / 8
    assert axis_group_seconds(gpu, "all_reduce", 1 << 28, there) == pytest.approx(
        link.latency + 6 * link.each + sent / link.bandwidth
    )
    assert inside < axis_group_seconds(gpu, "all_reduce", 1 << 28, range(64))
    assert axis_group_seconds(gpu, "all_reduce", 1 << 28, range(64)) < 2 * axis_group_seconds(
        gpu, "all_reduce", 1 << 28, there
    )


def test_a_fused_group_is_one_kernel_where_it_is_compiled() -> None:
    def program() -> None:
        x = torch.randn(100, 100)
        lazygt.current().flush()
        y = (x * 2 + 1).relu()  # noqa: F841
        lazygt.current().flush()

    _, session = predicted(program)
    plans = [entry.plan for entry in session.entries()]
    (group,) = (plan for plan in plans if any(node.body for node in plan.graph.nodes))
    once = 2 * 40_000e-9  # all of it is read and written
    took = {
        compiled: Rehearsal([group], Mesh.parse("a=1"), compiled=compiled).on(PLAIN).seconds
        for compiled in (True, False)
    }
    assert took == pytest.approx({True: once + PLAIN.host.call, False: 3 * (once + 1e-6)})


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def program() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        lazygt.stage(model[0], 0)
        lazygt.stage(model[1], 1)
        model(torch.randn(4, WIDTH)).sum().backward()
        lazygt.current().flush()

    _, session = predicted(program, {"pipe": 2})
    entry = max(session.entries(), key=lambda entry: len(entry.plans))
    receiver = entry.plans[1]
    with pytest.raises(lazygt.LazyGTError, match=r"rank 0 at lazygt.recv"):
        Rehearsal([receiver, Plan(receiver.graph, mesh=session.mesh)], Mesh.parse("pipe=2")).on(
            PLAIN
        )


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ("a", (0, 1)),
        ("abc", (0, 3)),
        ("xabababe", (5, 2)),
        ("iaabaabaab", (7, 3)),
        ("waaaa", (4, 1)),
    ],
)
def test_step_is_repeated_period_of_runs(names: str, place: tuple[int, int]) -> None:
    assert repeated(names, [1.0] * len(names)) == place


def test_longer_of_two_loops_is_step() -> None:
    names = "xababyccccccz"
    assert repeated(names, [1.0] * len(names)) == (11, 1)
    assert repeated(names, [9.0 if name in "ab" else 1.0 for name in names]) == (3, 2)


# -- from outside --------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

model = nn.Linear(256, 256)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(32, 256)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_simulate_accepts_function() -> None:
    told = lazygt.simulate(lambda: train(lazygt.data_parallel), mesh="data=2", machine="h100")
    assert told.machine.name == "h100"
    assert told.mesh == Mesh.parse("data=2")
    assert told.step_seconds > 0
    with pytest.raises(ValueError, match="has run no plan"):
        lazygt.simulate(lambda: None)
    with pytest.raises(lazygt.MachineError, match="h1000"):
        lazygt.simulate(train, machine="h1000")


def test_simulate_command_prints_prediction(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    shown = CliRunner().invoke(app, ["simulate", str(script), "-o", str(trace)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("A step on one rank, cpu-generic: ")
    assert "train.py:8" in shown.output
    boxes = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {box["args"]["line"].rpartition(":")[0] for box in boxes} == {str(script)}
    options = ["simulate", "--machine", "b200", "--mesh", "data=4", "--json", str(script)]
    told = json.loads(CliRunner().invoke(app, options).output)
    assert (told["machine"], told["mesh"]) == ("b200", {"data": 4})
    assert told["step_seconds"] >= told["computing_seconds"] > 0
    assert told["peak_bytes"] > 2 * 256 * 256 * 4


def test_a_program_that_places_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["simulate", "--machine", "b200", "--mesh", "data=4", str(script)]
    shown = CliRunner().invoke(app, options)
    assert "nothing is exchanged: every rank does all" in shown.output


def test_a_script_that_records_nothing(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print(1)\n")
    shown = CliRunner().invoke(app, ["simulate", str(script)])
    assert shown.exit_code == 2
    assert "has run no plan on device lazygt" in shown.output
    shown = CliRunner().invoke(app, ["simulate", "--machine", "abacus", str(script)])
    assert shown.exit_code == 2
    assert "abacus" in shown.output


def test_a_rank_computes_or_waits_for_collectives() -> None:
    """Also for those before the one that it waits for: gathers wait behind reductions."""

    def deep() -> None:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(6))
        model = nn.Sequential(*blocks)
        lazygt.fully_shard(model, bucket_cap_mb=0, limit_all_gathers=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x = lazygt.distribute(torch.randn(8, WIDTH), {"data": Shard(0)})
        for _ in range(3):
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()

    prediction, _ = predicted(deep, {"data": 4})
    (run,) = prediction.runs
    (ranks,) = run.simulated.classes
    exposed = sum(span.exposed for span in ranks.spans)
    assert ranks.busy + exposed == pytest.approx(ranks.seconds)
    assert all(0 <= row.exposed <= row.seconds * (1 + 1e-9) for row in prediction.collectives)
