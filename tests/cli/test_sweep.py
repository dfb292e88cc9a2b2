"""The command ``lazygt sweep``, and ranks that ``--gpus`` names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from lazygt.cli.app import app

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import argparse, sys
import torch, lazygt
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--mesh", default="data=2")
args = parser.parse_args()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

print("begins")
try:
    with lazygt.session(mesh=args.mesh):
        model = nn.Sequential(nn.Embedding(32, 16), *(Block() for _ in range(args.depth)))
        lazygt.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(args.steps):
            tokens = torch.randint(32, (8, 4))
            tokens = lazygt.distribute(tokens, {"data": lazygt.Shard(0)})
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
except KeyboardInterrupt:
    print("goes on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: object) -> tuple[int, str]:
    shown = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return shown.exit_code, shown.output


def test_knobs_stand_between_the_script_and_its_arguments(script: Path) -> None:
    code, text = run(
        "sweep", script, "wrap=auto,one", "depth=1,3", "--gpus", "8xb200", "--json",
        "--", "--mesh", "data=4",
    )  # fmt: skip
    assert code == 0, text
    told = json.loads(text)
    assert told["title"] == "train.py on data=8, b200: 4 combinations, simulated"
    assert [(row["wrap"], row["depth"]) for row in told["rows"]] == [
        ("auto", "1"), ("auto", "3"), ("one", "1"), ("one", "3"),
    ]  # fmt: skip
    peaks = [row["peak_bytes"] for row in told["rows"]]
    assert peaks[0] < peaks[1] and peaks[2] < peaks[3]  # noqa: PT018


def test_files_beside_the_table(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    code, text = run(
        "sweep", script, "reshard=1,0", "--gpus", "8xb200", "--csv", table, "--plot", plot,
        "--baseline", "reshard=0", "--target", "300",
    )  # fmt: skip
    assert code == 0, text
    assert len(table.read_text().splitlines()) == 3
    assert "svg" in plot.read_text()[:300]
    assert "below the target of +300%, bound by " in text


def test_a_script_that_fails_is_told_by_its_last_line(script: Path) -> None:
    code, text = run("sweep", script, "deep=1", "wrap=one", "--gpus", "2xb200")
    assert code == 1
    assert "unrecognized arguments: --deep 1" in text
    assert "begins" not in text


def test_a_run_that_is_too_short_says_so(script: Path) -> None:
    code, text = run("sweep", script, "wrap=one", "--gpus", "2xb200", "--", "--mesh", "model=2")
    assert code == 1
    assert "the script's own mesh is model=2" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing is to be swept: name knobs with their values"),
        (["wrap=outer"], "wrap=outer: expected auto, block or one"),
        (["wrap=one", "--baseline", "wrap=auto"], "'wrap=auto' is no combination of this sweep"),
        (["wrap=one", "--gpus", "8xb200", "--mesh", "data=4"], "have to multiply to 8"),
        (["wrap=one", "--gpus", "8xtpu"], "machine tpu is no machine"),
        (["wrap=one", "--hosts", "2"], "give --gpus, too"),
        (["wrap=one", "--mesh", "data"], "--mesh: 'data' is not a mesh"),
        (["wrap=one", "--plot", "plot.pdf"], "must end in one of .png, .svg"),
        (["wrap=one", "--csv", "no/where.csv"], "there is no folder no to write"),
    ],
)
def test_invalid_input_is_refused(arguments: list[str], told: str, script: Path) -> None:
    code, text = run("sweep", script, *arguments)
    assert code == 2
    assert text.startswith("lazygt sweep: ")
    assert told in text


def test_missing_script_is_refused(tmp_path: Path) -> None:
    assert run("sweep", tmp_path / "no.py", "wrap=one")[0] == 2


def test_simulate_accepts_gpus_and_hosts(script: Path) -> None:
    code, text = run("simulate", "--gpus", "16xh100", "--hosts", "4", script, "--steps", "4")
    assert code == 0, text
    assert "A step on data=16, h100@4: " in text
    code, text = run("simulate", "--gpus", "16xh100", "--mesh", "data=3", script)
    assert code == 2
    assert "lazygt simulate: --gpus 16xh100: the mesh data=3 is of 3 ranks" in text


# -- on real workers -------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_are_measured(script: Path) -> None:
    window = ["--warmup", "3", "--measured", "4", "--profiled", "2"]
    code, text = run("sweep", script, "wrap=auto,one", "steps=9,8,6", "--json", *window)
    assert code == 0, text
    rows = json.loads(text)["rows"]
    assert [row["how"] for row in rows] == 6 * ["measured"]
    assert [row["status"] for row in rows] == 2 * ["done", "done", "failed"]
    for row in rows[:2] + rows[3:5]:
        assert row["tokens_per_second"] == pytest.approx(8 * 4 / row["step_seconds"])
        assert row["peak_bytes"] > 0
    for row in (rows[0], rows[3]):
        assert 0 < row["exposed"] <= row["in_collectives"] <= 1
    assert rows[1]["note"] == "ended after 8 steps: shares are not known"
    assert rows[2]["note"].startswith("the program ended after 6 steps of 9: let it do more")


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_though_the_script_goes_on(script: Path) -> None:
    """It comes in the first measured run; the script catches it."""
    script.write_text(SCRIPT.replace("range(args.steps)", "range(1_000_000)"))
    command = [sys.executable, "-m", "lazygt.cli", "sweep", str(script), "wrap=auto,one"]
    with subprocess.Popen(
        [*command, "--measured", "100000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while len(family.children(recursive=True)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        children = family.children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=20)
    assert process.returncode == 1
    assert "interrupted after 0 of 2 combinations" in errors
    assert not alive
