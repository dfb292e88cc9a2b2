"""Changes that would help, found by simulating a program with each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from lazygt.simulation.suggest import Trial, blocks_checkpointed, run_trials, suggestions, trials

pytestmark = pytest.mark.timeout(300)

WIDTH = 64


@dataclass
class Step:
    step_seconds: float
    peak_bytes: int

    @property
    def machine(self) -> Machine:
        return default_machine("cpu").with_values({"memory.capacity": 1e9})


def best(now: Step, **others: Step | None) -> list[str]:
    return [told.what for told in suggestions(now, [(Trial(k), v) for k, v in others.items()])]


def test_faster_trials_come_first_and_slower_ones_are_dropped() -> None:
    now = Step(1.0, 10**8)
    assert best(now, same=Step(1.0, 10**8), slow=Step(2.0, 10**8), a=Step(0.9, 10**8),
                b=Step(0.8, 10**8), c=Step(0.95, 10**8), d=Step(0.7, 10**8),
                e=None) == ["d", "b", "a"]  # fmt: skip


def test_work_counts_and_not_steps() -> None:
    now, twice = Step(1.0, 10**8), Step(1.6, 10**8)
    (told,) = suggestions(now, [(Trial("--batch 16", work=2.0), twice)])
    assert told.faster == pytest.approx(1.25)
    assert str(told) == "--batch 16: 1.6 s a step (25% more work a second), peak 100 MB (+0%)"


def test_trial_that_does_not_fit_is_not_suggested() -> None:
    now = Step(1.0, 10**8)
    assert best(now, fast=Step(0.1, 2 * 10**9)) == []


def test_fitting_trials_come_first_if_current_one_does_not_fit() -> None:
    now = Step(1.0, 3 * 10**9)
    assert best(now, fast=Step(0.1, 4 * 10**9), less=Step(1.0, 2 * 10**9),
                fits=Step(3.0, 10**8)) == ["fits", "less"]  # fmt: skip


def test_list_of_trials() -> None:
    names = [trial.what for trial in trials(None, False)]
    assert names == ["checkpoint each block"]
    told = trials(Mesh.parse("data=4,model=2"), True, ["--batch", "8", "--lr", "3"])
    assert {trial.what for trial in told} == {
        "--batch 16", "--batch 4", "reshard_after_forward=False", "reshard_after_forward=True",
        "bucket_cap_mb=100", "wrap='one'", "checkpoint each block",
        "mesh data=2,model=4", "mesh data=8,model=1",
    }  # fmt: skip
    assert told[0].arguments == ["--batch", "16", "--lr", "3"]


def test_failing_trial_has_no_result() -> None:
    def run(trial: Trial) -> Step:
        raise ValueError(trial.what)

    assert [other for _, other in run_trials([Trial("a")], run)] == [None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).exp().sin().tanh())
        return y


def train(wrap: bool = True) -> None:
    model = nn.Sequential(*(Layer() for _ in range(6)))
    if wrap:
        lazygt.fully_shard(model)
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        x = lazygt.distribute(torch.randn(4096, WIDTH), {"data": Shard(0)})
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def test_blocks_are_checkpointed_from_outside() -> None:
    told = lazygt.simulate(train, mesh="data=2")
    with blocks_checkpointed():
        less = lazygt.simulate(train, mesh="data=2")
    again = lazygt.simulate(train, mesh="data=2")
    assert less.peak.kinds["activations"] < 0.6 * told.peak.kinds["activations"]
    assert less.flops > told.flops == again.flops
    assert told.peak_bytes == again.peak_bytes


def test_suggestions_of_function() -> None:
    told = lazygt.simulate(train, mesh="data=2", machine="h100")
    assert told.as_json()["suggestions"] == []  # nothing is tried before somebody asks
    assert "what would help" not in str(told)
    for suggestion in told.suggestions:
        worth = suggestion.faster - 1 + 0.25 * (1 - suggestion.smaller)
        assert suggestion.fits
        assert worth > 0.01
    assert len(told.suggestions) in (1, 2, 3)
    assert "what would help most, as simulated" in str(told)
    assert len(told.as_json()["suggestions"]) == len(told.suggestions)


SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
rows = parser.parse_args().batch_size
print("said by the script")
model = nn.Linear(1 << {bits}, 256, bias=False)
opt = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(4):
    if model(torch.ones(rows, 1 << {bits})).sum().item() > 1:
        print("large")
    model(torch.ones(rows, 1 << {bits})).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_simulate_command_prints_suggestions(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(bits=8))
    options = ["simulate", "--suggest", str(script), "--batch-size", "8"]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("said by the script") == 1
    assert "--batch-size 16: " in shown.output
    assert f"reads a value at {script}:11 (item): taken as 0" in shown.output
    told = json.loads(CliRunner().invoke(app, [*options, "--json"]).output.splitlines()[-1])
    assert [row["what"] for row in told["suggestions"]] == ["--batch-size 16"]
    assert told["reads"] == [f"{script}:11 (item)"]


def test_a_model_that_does_not_fit_even_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(bits=28))
    options = ["simulate", "--machine", "h100", str(script), "--batch-size", "1"]
    shown = CliRunner().invoke(app, options)
    assert "more than the 80 GB there are, and so are parameters and optimizer state alone: " in (
        shown.output
    ), shown.output
