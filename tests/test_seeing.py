"""Seeing it work: counts, log, texts, settings and the command line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lazygt
from lazygt import cli
from lazygt.graph.text import parse_graph

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(executor="inline") as session:
        yield session


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


# -- counts ----------------------------------------------------------------------------------


def test_stats_has_the_promised_keys_and_is_plain_data(s: lazygt.Session) -> None:
    stats = s.stats()
    assert set(stats) >= {
        "ops_recorded", "flushes", "plans_built", "plan_hits", "plan_misses", "messages_sent",
        "messages_received", "bytes_sent", "bytes_received", "fetches",
    }  # fmt: skip
    assert json.loads(json.dumps(stats)) == stats
    assert s.stats()["messages_sent"] == 0


def test_stats_count_what_happens(s: lazygt.Session) -> None:
    x = torch.ones(4)
    for _ in range(3):
        y = x * 2
        y.tolist()
        del y
    stats = s.stats()
    assert stats["fetches"] == 3
    assert stats["flushes"] == {"to cpu": 3}
    assert stats["plan_hits"] >= 1
    assert stats["messages_sent"] == stats["messages_received"] + stats["plans_built"]
    assert stats["ops_recorded"] == 5  # empty, fill_, and three times mul


def test_a_miss_says_why_and_where(s: lazygt.Session) -> None:
    for size in (3, 4):
        x = torch.zeros(size)
        here = sys._getframe().f_lineno + 1
        (x + 1).tolist()
    misses = s.stats()["plan_misses"]
    assert len(misses) == 2
    assert misses[0]["reason"] == "a new sequence of ops"
    assert all(miss["flush"] == "to cpu" for miss in misses)
    assert "other arguments or shapes" in misses[1]["reason"]
    assert re.fullmatch(rf"{re.escape(__file__)}:{here - 2}", misses[1]["line"])


def test_worker_pids() -> None:
    with lazygt.session(workers=2) as s:
        assert len(set(s.worker_pids)) == 2
        assert {psutil.Process(pid).ppid() for pid in s.worker_pids} == {os.getpid()}
    with lazygt.session(executor="inline") as s:
        assert s.worker_pids == [os.getpid()] or s.worker_pids == []


def test_repr(s: lazygt.Session) -> None:
    (torch.ones(3) + 1).tolist()
    assert repr(s) == (
        "<lazygt.session open: 1 cpu worker(s), inline; 3 ops recorded, 1 flushes, 1 plans, 0 hits>"
    )
    s.close()
    assert repr(s).startswith("<lazygt.session closed")


# -- the log ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"executor": "inline"}, {"workers": 1}], ids=["i", "w"])
def test_the_log_has_a_line_a_message(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    monkeypatch.setenv("LAZYGT_LOG", str(path))
    with lazygt.session(**settings) as s:
        (torch.ones(3) + 1).tolist()
        s.synchronize()
        stats = s.stats()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(line) == {"t", "direction", "kind", "rank", "run", "bytes", "why"}
               for line in lines)  # fmt: skip
    sent = [line for line in lines if line["direction"] == "send"]
    received = [line for line in lines if line["direction"] == "receive"]
    assert (len(sent), len(received)) == (stats["messages_sent"], stats["messages_received"])
    assert sum(line["bytes"] for line in sent) == stats["bytes_sent"]
    assert [(line["kind"], line["why"]) for line in sent[:2]] == [
        ("plan", "to cpu"),
        ("run", "to cpu"),
    ]


# -- texts -----------------------------------------------------------------------------------


def test_a_graph_parses_back_and_a_plan_prints_with_lines(s: lazygt.Session) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    _step(model, torch.randn(2, 3))
    plan = s.plans()[-1]
    text = str(plan.graph)
    assert text.startswith("graph {")
    assert parse_graph(text) == plan.graph
    assert str(parse_graph(text)) == text
    assert str(plan).startswith(f"plan {plan.digest.hex()[:12]} {{")
    for row in str(plan).splitlines():
        if " = aten." in row:
            assert re.search(rf"# {re.escape(__file__)}:\d+", row), row


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"worker": 1}, TypeError, r"unexpected keyword 'worker'; it takes: workers"),
        ({"workers": 0}, ValueError, r"workers=0\): expected an integer >= 1"),
        ({"workers": 1.5}, ValueError, r"workers=1.5"),
        ({"executor": "magic"}, ValueError, r"executor='magic'\): expected 'process' or 'inline'"),
        ({"executor": "inline", "workers": 2}, ValueError, r"one worker"),
        ({"device": "tpu"}, ValueError, r"expected auto, cpu or cuda"),
        ({"threads": 0}, ValueError, r"threads=0"),
        ({"transport": "pigeon"}, ValueError, r"pigeon"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        lazygt.session(**settings)


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_EXECUTOR", "inline")
    monkeypatch.setenv("LAZYGT_DEFAULT_DEVICE", "off")
    with lazygt.session() as s:
        assert torch.zeros(1).device.type == "cpu"
        assert s.config.executor == "inline"
    with lazygt.session(default_device=True):
        assert torch.zeros(1).device.type == "lazygt"
    monkeypatch.setenv("LAZYGT_MAX_GRAPH_NODES", "many")
    with pytest.raises(ValueError, match="LAZYGT_MAX_GRAPH_NODES='many'"):
        lazygt.session()


# -- the command line ----------------------------------------------------------------------------

PLAIN = """\
import sys
import torch

w = torch.ones(3, 2, requires_grad=True)
for _ in range(3):
    w.grad = None
    loss = (torch.ones(4, 3) @ w).sum()
    loss.backward()
print(sys.argv[1:], __name__, loss.item())
"""

GOLDEN = """\
['--lr', '0.1'] __main__ 24.0
# plan 0: shipped 1 time(s), N bytes; run 1 time(s)
plan DIGEST {
  $0: float = param
  $1: float = param
  %0: f32[3, 2] = aten.empty_strided.default([3, 2], [2, 1], dtype=torch.float32, device=device)  # plain.py:4
  %1: f32[3, 2] = aten.fill_.Scalar(%0, $0) writes %0  # plain.py:4  [in place; free %0]
  %2: f32[4, 3] = aten.empty_strided.default([4, 3], [3, 1], dtype=torch.float32, device=device)  # plain.py:7
  %3: f32[4, 3] = aten.fill_.Scalar(%2, $1) writes %2  # plain.py:7  [in place; free %2]
  %4: f32[4, 2] = aten.mm.default(%3, %1)  # plain.py:7
  %5: f32[] = aten.sum.default(%4)  # plain.py:7  [free %4]
  %6: f32[] = aten.ones_like.default(%5, pin_memory=False, memory_format=torch.preserve_format)  # plain.py:8
  %7: f32[4, 2]@(0, 0) = aten.expand.default(%6, [4, 2])  # plain.py:7
  %8: f32[3, 4]@(1, 3) = aten.t.default(%3)  # plain.py:7  [free %3]
  %9: f32[3, 2] = aten.mm.default(%8, %7)  # plain.py:7  [free %7 %8]
  return %1, %5, %6, %9
}
"""  # noqa: E501


def _dump(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["dump", *args])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return path


def test_dump_of_a_script_without_a_session(plain: Path) -> None:
    result = _dump("--inline", str(plain), "--lr", "0.1")
    assert result.exit_code == 0, result.output
    text = result.output.replace(f"{plain.parent}/", "")
    text = re.sub(r"plan [0-9a-f]{12} ", "plan DIGEST ", text)
    text = re.sub(r"\d+ bytes; run", "N bytes; run", text)
    assert text.startswith(GOLDEN), text
    assert "# plan 1: shipped 1 time(s), N bytes; run 2 time(s)" in text
    assert "flushes: backward 3" in text
    assert re.search(r"# \d+ messages sent, \d+ bytes\n# \d+ messages received, \d+ bytes\n$", text)


def test_dump_of_one_plan(plain: Path) -> None:
    result = _dump("--inline", "--plan", "1", str(plain))
    assert result.output.count("# plan ") == 1
    assert "# plan 1:" in result.output
    result = _dump("--inline", "--plan", "7", str(plain))
    assert result.exit_code == 2
    assert "there is no plan 7, only 0 to" in result.output


def test_dump_leaves_a_script_its_own_sessions(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import lazygt, torch\n"
        "for size in (2, 3):\n"
        "    with lazygt.session(executor='inline'):\n"
        "        print((torch.ones(size) + 1).tolist())\n"
    )
    result = _dump(str(path))
    assert result.exit_code == 0, result.output
    assert "# plan 0: shipped 1" in result.output
    assert "# plan 1: shipped 1" in result.output
    assert result.output.count("ops recorded") == 2


def test_dump_of_a_missing_script() -> None:
    result = _dump("nowhere.py")
    assert result.exit_code == 2
    assert "there is no file nowhere.py" in result.output


def test_dump_of_a_script_that_raises(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch\n\ndef f():\n    raise KeyError('mine')\n\nf()\n")
    out = subprocess.run(
        [sys.executable, "-m", "lazygt.cli", "dump", "--inline", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert out.returncode == 1
    assert out.stderr.startswith("Traceback (most recent call last):\n  File ")
    assert "cli.py" not in out.stderr
    assert "runpy" not in out.stderr
    assert out.stderr.endswith("KeyError: 'mine'\n")


def test_dump_of_a_script_that_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('hello')\n")
    result = _dump("--inline", str(path))
    assert result.exit_code == 0
    assert "the script recorded nothing" in result.output


def test_doctor_reports_and_fails_on_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "one worker started" in result.output
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "failed: torch" in result.output
