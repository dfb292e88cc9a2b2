"""Sweeps of programs: rows, tables and verdicts."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.mesh import Mesh
from lazygt.machine import Machine, machine_of
from lazygt.sweeps import Combination, Row, Shares, Sweep, verdict
from lazygt.sweeps.steps import latency_share, union_length

pytestmark = pytest.mark.timeout(120)

WORDS, WIDTH, ROWS, LENGTH = 64, 32, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(rows: str = str(ROWS), fail: str = "") -> None:
    """A small model with embedding, blocks and head; ``fail`` is what it raises."""
    if fail:
        raise RuntimeError(f"{fail}\nwith a second line")
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))
    lazygt.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        tokens = lazygt.distribute(torch.randint(WORDS, (int(rows), LENGTH)), {"data": Shard(0)})
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def told() -> Sweep:
    return lazygt.sweep(train, {"wrap": "auto,one", "reshard": [True, False]}, gpus="8xb200")


def test_each_combination_is_a_step_of_its_own(told: Sweep) -> None:
    assert [row.how for row in told.rows] == 4 * ["simulated"]
    assert [row.tokens for row in told.rows] == 4 * [ROWS * LENGTH]
    shares = [row.shares for row in told.rows]
    counts = [one.collectives for one in shares if one is not None]
    again, kept, one_unit, one_kept = counts
    assert again > kept >= one_unit > 0  # gathered again; kept; in fewer collectives
    assert again > one_unit >= one_kept
    for one in shares:
        assert one is not None
        assert 0 < one.exposed <= one.in_collectives <= 1
        whole = one.compute + one.bandwidth + one.latency + one.host
        assert whole == pytest.approx(1, abs=0.05)


def test_sweep_row_matches_separate_simulation(told: Sweep) -> None:
    def forced() -> None:
        with lazygt.parallel.fsdp_overrides.forced_knobs(wrap="one", reshard_after_forward=False):
            train()

    prediction = lazygt.simulate(forced, gpus="8xb200")
    assert told.rows[3].step_seconds == pytest.approx(prediction.step_seconds)
    assert told.rows[3].peak_bytes == prediction.peak_bytes


def test_sweep_table(told: Sweep) -> None:
    head, columns, *rows = str(told).splitlines()
    assert head == "train on data=8, b200: 4 combinations, simulated"
    assert columns.split() == ["wrap", "reshard", "tokens/s", "against", "step", "peak", "in",
                               "collectives", "exposed", "how", "note"]  # fmt: skip
    pattern = r"(auto|one)\s+[01]\s+[\d,]+\s+[+-]\d.*simulated"
    assert [bool(re.match(pattern, row)) for row in rows[:4]] == 4 * [True]
    assert rows[5].startswith("Best: wrap=")


def test_csv_and_json_have_the_same(told: Sweep, tmp_path: Path) -> None:
    told.save_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["wrap", "reshard", "tokens_per_second", "step_seconds", "peak_bytes",
                             "in_collectives", "exposed", "how", "status", "note"]  # fmt: skip
    data = json.loads(json.dumps(told.as_json()))
    assert [float(row["step_seconds"]) for row in rows] == [
        row["step_seconds"] for row in data["rows"]
    ]
    assert data["verdict"] == told.verdict


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_sweep_plot(told: Sweep, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told.plot(tmp_path / name)
    begin = (tmp_path / name).read_bytes()[:300]
    assert (b"PNG" if name.endswith("png") else b"svg") in begin
    with pytest.raises(ValueError, match="must end in one of"):
        told.plot(tmp_path / "plot.pdf")


def test_a_combination_that_fails_is_a_row() -> None:
    told = lazygt.sweep(train, {"fail": ["no luck", "none again"]}, gpus="8xb200")
    assert [row.status for row in told.rows] == ["failed", "failed"]
    assert told.rows[0].note == "RuntimeError: no luck"
    assert "failed: RuntimeError: none again" in str(told)
    assert told.verdict == "No combination has figures: 0 skipped, 2 failed."
    with pytest.raises(ValueError, match="nothing to draw"):
        told.plot("plot.png")


def test_the_script_gets_other_knobs() -> None:
    told = lazygt.sweep(train, {"rows": [8, 16]}, gpus="8xb200", baseline="rows=16")
    assert [row.tokens for row in told.rows] == [8 * LENGTH, 16 * LENGTH]
    assert told.baseline == 1


def test_combination_over_memory_limit_is_skipped(told: Sweep) -> None:
    least, *_, most = sorted(row.peak_bytes or 0 for row in told.rows)
    knobs = {"wrap": "auto,one", "reshard": "1,0"}
    skipping = lazygt.sweep(train, knobs, gpus="8xb200", memory=(least + most) / 2)
    for row, before in zip(skipping.rows, told.rows, strict=True):
        assert row.peak_bytes == before.peak_bytes
        assert row.done == ((row.peak_bytes or 0) <= (least + most) / 2)
    skipped = next(row for row in skipping.rows if not row.done)
    assert re.fullmatch(r"a rank would need .*B, and .*B are safe", skipped.note)


def test_a_measured_sweep_skips_before_anything_is_computed() -> None:
    told = lazygt.sweep(train, {"wrap": "auto"}, mesh="data=2", memory=1e3)
    assert [(row.how, row.status) for row in told.rows] == [("measured", "skipped")]


def test_a_program_without_fully_shard_or_without_steps() -> None:
    def plain() -> None:
        weight = torch.ones(8, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()

    def still() -> None:
        torch.ones(8).sum().item()

    for mesh in ({"gpus": "2xb200"}, {"mesh": "data=2"}):
        (row,) = lazygt.sweep(plain, {"wrap": "one"}, **mesh).rows  # type: ignore[arg-type]
        assert row.note.startswith("wrap: the script never calls lazygt.fully_shard")
    (row,) = lazygt.sweep(lambda depth: still(), {"depth": "1"}, gpus="2xb200").rows
    assert row.note.startswith("no torch optimizer stepped in a session")


def test_hosts_without_gpus() -> None:
    with pytest.raises(ValueError, match="give gpus, too"):
        lazygt.sweep(train, {"wrap": "one"}, hosts=2)


# -- verdicts --------------------------------------------------------------------------------------


def row(wrap: str, seconds: float, shares: Shares | None = None, **more: Any) -> Row:
    return Row(Combination({"wrap": wrap}), "measured", "done", seconds, 1000, 1, shares, **more)


def shares(
    compute: float = 0.0, bandwidth: float = 0.0, latency: float = 0.0, host: float = 0.0
) -> Shares:
    return Shares(bandwidth + latency, compute, bandwidth, latency, host, 412)


def test_a_target_that_is_reached() -> None:
    assert verdict([row("auto", 0.1), row("one", 0.08)], 0, 15) == (
        "Best: wrap=one with 12,500 tokens/s, +25.0% against the baseline wrap=auto (10,000 "
        "tokens/s), measured: the target of +15% is reached."
    )


@pytest.mark.parametrize(
    ("least", "told"),
    [
        (shares(0.9, 0.1), "bound by compute (90% of the 100 ms of a step; only 10 ms of waiting"),
        (shares(0.3, 0.6, 0.1), "bound by exposed bandwidth (60% of the 100 ms of a step is"),
        (shares(0.3, 0.1, 0.6), "bound by latency x count (412 collectives a step; 60% of"),
        (shares(0.6, 0.1, 0.1, 0.2), "bound by the host (20% of the 100 ms of a step the ranks"),
    ],
)
def test_verdict_names_bottleneck(least: Shares, told: str) -> None:
    sentence = verdict([row("auto", 0.105, shares()), row("one", 0.1, least)], 0, 15)
    assert "+5.0% against the baseline wrap=auto" in sentence
    assert told in sentence


def test_a_baseline_that_is_the_best_and_one_without_figures() -> None:
    best = verdict([row("auto", 0.1, shares(1)), row("one", 0.2)], 0, 15)
    assert "wrap=auto with 10,000 tokens/s, the baseline itself, measured: below" in best
    failed = Row(Combination({"wrap": "auto"}), "measured", "failed", note="no")
    none = verdict([failed, row("one", 0.2)], 0, 15)
    assert none == (
        "Best: wrap=one with 5,000 tokens/s (measured). The baseline wrap=auto failed, so there is "
        "nothing to compare it with."
    )


def test_without_tokens_steps_are_compared() -> None:
    row = Row(Combination({"wrap": "one"}), "measured", step_seconds=0.5)
    assert row.speed == "2 steps/s"


def test_length_of_covered_time() -> None:
    assert union_length([]) == 0
    assert union_length([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_latency_and_bytes_are_told_apart_by_the_machine() -> None:
    machine: Machine = machine_of("b200")
    link, mesh = machine.collectives.local[0], Mesh.of({"data": 8})
    balanced = link.latency * link.bandwidth * 8 / 7  # bytes that take as long as the latency
    share = latency_share(machine, mesh, "data", "all_gather", 3, round(3 * balanced))
    assert share == pytest.approx(0.5, rel=1e-3)
    assert latency_share(machine, mesh, "data", "all_reduce sum", 1, 0) == 1
    assert 0 < latency_share(machine, mesh, "data", "send", 1, 1 << 30) < 0.1
