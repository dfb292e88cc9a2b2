"""Predictions beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.machine import default_machine
from lazygt.observe.timeline import TimedRun
from lazygt.runtime.messages import Timings
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, check, predict

pytestmark = pytest.mark.timeout(120)
MILLISECOND = 1_000_000

SCRIPT = """
import torch
from torch import nn

model = nn.Linear(256, 256)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    model(torch.ones(32, 256)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


def test_the_mean_of_ranks_and_turns_without_the_first() -> None:
    with lazygt.session(**grouped(DRY)) as s:
        living = LiveValue(s)
        weight = torch.ones(64, 64)
        for _ in range(3):
            weight = weight @ weight
            s.flush()
        plan = s.plans()[-1]
    prediction = predict(s, default_machine("cpu"), living)
    count = len(plan.steps.graph.nodes)
    lines = [f"here.py:{n}" for n in range(count)]

    def run(track: int, milliseconds: int) -> TimedRun:
        """Each of its steps takes so long, and so does all that is not a step."""
        long = milliseconds * MILLISECOND
        steps = tuple((n, 1, n * long, (n + 1) * long) for n in range(count))
        timings = Timings(0, (count + 1) * long, steps)
        return TimedRun(1, track, 0, plan, lambda: lines, timings)

    told = check(prediction, [run(0, 900), run(1, 800), run(0, 2), run(1, 4), run(0, 3)])
    assert told.measured == pytest.approx(0.003 * (count + 1))
    assert told.predicted == prediction.computing
    assert told.error == pytest.approx(told.predicted / told.measured - 1)
    measured = {row.line: row.measured for row in told.lines}
    assert {line: measured[line] for line in lines} == pytest.approx(dict.fromkeys(lines, 0.003))
    assert sum(row.predicted for row in told.lines) == pytest.approx(prediction.computing)
    with pytest.raises(ValueError, match="was not run twice: let the script do more steps"):
        check(prediction, [run(0, 1), run(1, 1)])


@pytest.mark.parametrize(("steps", "code"), [(4, 0), (1, 2)])
def test_check_runs_script_on_this_machine(steps: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(steps)))
    shown = CliRunner().invoke(app, ["simulate", "--check", str(script)])
    assert shown.exit_code == code, shown.output
    assert ("checked: the ranks took" in shown.output) == (code == 0)
    assert ("was not run twice" in shown.output) == (code == 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_here_is_not_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STEPS", "3"))
    shown = CliRunner().invoke(app, ["simulate", "--check", "--machine", "h100", str(script)])
    assert shown.exit_code == 2
    assert "which has no CUDA device" in shown.output


def test_each_session_has_a_check_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text("""
import torch, lazygt

for size in (64, 128):
    with lazygt.session(launcher="inline"):
        x = torch.ones(size, size)
        for _ in range(4):
            x = x @ x
            lazygt.current().flush()
""")
    shown = CliRunner().invoke(app, ["simulate", "--check", str(script)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("A step on") == shown.output.count("checked:") == 2
