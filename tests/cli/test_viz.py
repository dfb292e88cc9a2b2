"""viz: a plan of a script as a picture; and the pictures that graphs draw of themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lazygt
import lazygt.observe.explain
from lazygt.cli.app import app
from lazygt.observe import picture

pytestmark = pytest.mark.timeout(120)
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz on PATH")

SCRIPT = """\
import torch

w = torch.ones(3, 2, requires_grad=True)
loss = (torch.ones(4, 3) @ w).exp().sum()
loss.backward()
w.log_()
print(loss.item())
"""


def _viz(*args: object) -> Any:
    return CliRunner().invoke(app, ["viz", "--inline", *map(str, args)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("w.log_()", "w.detach().log_()"))
    return path


def test_viz_draws_the_plan_that_ran_most_ops(script: Path) -> None:
    output = script.parent / "graph.dot"
    result = _viz(script, "-o", output)
    assert result.exit_code == 0, result.output
    found = re.search(r"plan 0 of 2 \((\d+) ops\) drawn to (.*)\n$", result.stdout)
    assert found is not None, result.stdout
    assert found[2] == str(output)
    source = output.read_text()
    assert source.startswith("digraph")
    assert source.count("mm\\n") == 2
    assert "log" not in source


def test_viz_of_one_plan(script: Path) -> None:
    output = script.parent / "graph.dot"
    result = _viz(script, "-o", output, "--plan", 1)
    assert result.exit_code == 0, result.output
    assert "plan 1 of 2 (1 op) drawn to" in result.stdout
    assert "log\\n" in output.read_text()


def test_viz_of_a_stage(script: Path) -> None:
    output = script.parent / "graph.dot"
    assert _viz(script, "-o", output, "--stage", "recorded").exit_code == 0
    recorded = output.read_text()
    assert _viz(script, "-o", output).exit_code == 0
    assert recorded.count("->") >= output.read_text().count("->") > 0


@pytest.mark.parametrize(("collapse", "by_line"), [("always", True), ("never", False)])
def test_viz_may_draw_one_box_a_line(collapse: str, by_line: bool, script: Path) -> None:
    output = script.parent / "graph.dot"
    assert _viz(script, "-o", output, "--collapse", collapse).exit_code == 0
    assert ("script.py:4" in output.read_text().replace("tooltip", "\n")) or not by_line
    assert ('label="mm\\n' in output.read_text()) == (not by_line)


@needs_dot
@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_viz_with_graphviz(suffix: str, begins: bytes, script: Path) -> None:
    output = script.parent / f"graph{suffix}"
    assert _viz(script, "-o", output).exit_code == 0
    assert output.read_bytes().startswith(begins)


def test_viz_writes_a_page_by_default(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    result = _viz(script)
    assert result.stdout.endswith(" drawn to graph.html\n")
    assert (script.parent / "graph.html").read_text().startswith("<!")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("-o", "x.gif"), "'x.gif' must end in one of .dot, .svg, .png, .html"),
        (("-o", "no/x.svg"), "there is no folder no to write x.svg into"),
        (("--stage", "magic"), "there is no stage 'magic', only recorded, "),
        (("--collapse", "maybe"), "--collapse is one of auto, always, never, not 'maybe'"),
        (("--plan", "7"), "there is no plan 7, only 0 to 1"),
        (("--plan", "-1"), "there is no plan -1, only 0 to 1"),
    ],
)
def test_invalid_input_is_refused(
    args: tuple[str, ...], text: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    result = _viz(script, *args)
    assert result.exit_code == 2
    assert f"lazygt viz: {text}" in result.stderr
    assert ("--plan" in args) == bool(result.stdout)  # else it is said before the script runs
    assert sorted(path.name for path in script.parent.iterdir()) == ["script.py"]


def test_help_names_every_ending() -> None:
    shown = _viz("--help").stdout
    assert all(suffix in shown for suffix in picture.SUFFIXES)


def test_a_missing_script_and_one_that_records_nothing(tmp_path: Path) -> None:
    result = _viz(tmp_path / "nowhere.py")
    assert result.exit_code == 2
    assert result.stderr == f"lazygt viz: there is no file {tmp_path}/nowhere.py\n"
    idle = tmp_path / "idle.py"
    idle.write_text("print('hello')\n")
    result = _viz(idle, "-o", tmp_path / "x.html")
    assert result.exit_code == 2
    assert "the script recorded nothing" in result.stderr


def test_without_graphviz_it_says_so_before_the_script_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(script.parent))
    result = _viz(script, "-o", script.parent / "x.png")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert ".png needs Graphviz's program 'dot', which is not on PATH" in result.stderr
    assert _viz(script, "-o", script.parent / "x.html").exit_code == 0


def test_a_picture_that_cannot_be_written(script: Path) -> None:
    folder = script.parent / "graph.html"
    folder.mkdir()
    result = _viz(script, "-o", folder)
    assert (result.exit_code, result.stdout) == (2, "")  # it is said before the script runs
    assert result.stderr == f"lazygt viz: {folder} is a folder; name a file in it\n"
    full = script.parent / "full.html"
    full.symlink_to("/dev/full")
    result = _viz(script, "-o", full)
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr


def test_a_graph_draws_itself(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with lazygt.session(launcher="inline") as s:
        model.to("lazygt")(torch.ones(4, 3)).sum().backward()
        graph = s.plans()[-1].graph
    assert nx.utils.graphs_equal(lazygt.to_networkx(graph), picture.to_networkx(graph))
    path = lazygt.render(graph, tmp_path / "a.dot", collapse=True)
    assert path == tmp_path / "a.dot"
    assert path.read_text() == picture.to_dot(graph, True)
    with pytest.raises(ValueError, match="must end in one of"):
        lazygt.render(graph, tmp_path / "a.jpg")


@pytest.mark.anew  # a fork has more loaded
@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("lazygt", ["networkx", "graphviz", "rich", "typer", "zmq", "lazygt.graph.cost",
                    "lazygt.runtime.worker.worker",
                    "lazygt.passes.sharding.rules", "lazygt.runtime.compiling.service",
                    "lazygt.observe"]),
        ("lazygt.observe.explain", ["networkx", "graphviz", "lazygt.passes.sharding.rules"]),
        ("lazygt.cli.app", ["networkx", "graphviz", "lazygt.passes.sharding.rules"]),
    ],
)  # fmt: skip
def test_optional_modules_are_imported_lazily(module: str, not_loaded: list[str]) -> None:
    """Importing lazygt loads what every session needs, and no more."""
    code = f"import sys, {module}; print(set({not_loaded}) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "set()\n"
