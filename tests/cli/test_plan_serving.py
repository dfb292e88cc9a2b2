"""``lazygt plan-serving``: what it prints and draws, and what it says where it is asked wrongly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazygt.cli.app import app
from lazygt.printing import plots

QUICK = ["--qps", "600", "--seconds", "5", "--stage", "rank:batch=50,infer=80ms"]


def lazygt(*args: object) -> Any:
    result = CliRunner().invoke(app, ["plan-serving", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_command_prints_tables() -> None:
    result = lazygt(*QUICK, "--slo", 200, "--claim", "rank:qps=306")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "600 requests a second, 99 of 100 within 200 ms"
    marks = lines[lines.index("to mind") + 1 :]
    assert marks[0].startswith("- mistake 1: rank: qps=306 counts the wait as work; it is 625")
    assert marks[1].startswith("- rank: a load of 96% on 1 GPU, more than 85%")
    assert result.stdout == lazygt(*QUICK, "--slo", "0.2s", "--claim", "rank:qps=306").stdout


def test_json() -> None:
    result = lazygt(*QUICK, "--slo", 200, "--json", "--seed", 3)
    numbers = json.loads(result.stdout)
    assert numbers["seed"] == 3
    assert numbers["slo"] == 0.2
    assert numbers["formulas"]["stages"][0]["qps_of_gpu"] == 625
    other = json.loads(lazygt(*QUICK, "--slo", 200, "--json", "--seed", 4).stdout)
    assert other["choices"][0]["p99"] != numbers["choices"][0]["p99"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(("name", "head"), [("c.png", b"\x89PNG"), ("c.svg", b"<?xml")])
def test_plot_is_written_as_image(tmp_path: Path, name: str, head: bytes) -> None:
    path = tmp_path / name
    result = lazygt(*QUICK, "--slo", 200, "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(head)
    assert result.stdout.endswith(f"latency against throughput drawn to {path}\n")


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    result = lazygt(*QUICK, "--plot", tmp_path / "c.png")
    assert (result.exit_code, result.stderr) == (
        2, "lazygt plan-serving: --plot needs matplotlib, which is not installed: "
        "pip install matplotlib\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--qps", "0", "--stage", "r:infer=9ms"], "0 requests a second: expected more than 0"),
        (["--qps", "9", "--stage", "r:batch=0,infer=9ms"], "batch=0: expected a whole number"),
        (["--qps", "9", "--stage", "r:infer=9h"], "there is no unit 'h', only us, ms, s, min"),
        (["--qps", "9", "--stage", "r:size=4,infer=9ms"], "has no 'size': it takes batch, infer"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--slo", "9"], "an SLO of 9 ms can't be held"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--slo", "9h"], "--slo 9h: there is no unit 'h'"),
        (["--stage", "r:infer=9ms"], "how many requests a second?"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--arrivals", "no.txt"], "'no.txt' can't be"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--claim", "q:qps=1"], "the stages with GPUs"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--plot", "c.pdf"], "end in one of .png, .svg"),
        (["--qps", "9", "--stage", "r:infer=9ms", "--plot", "no/c.png"], "there is no folder no"),
        (["--qps", "9"], "Missing option '--stage'"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(args: list[str], message: str) -> None:
    result = lazygt(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not result.stdout
