"""Seeing it work: counts, log, texts, settings and the command line."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import lazygt
from lazygt.graph.text import parse_graph
from lazygt.settings import grouped

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


# -- counts ----------------------------------------------------------------------------------


def test_stats_has_the_promised_keys_and_is_plain_data(s: lazygt.Session) -> None:
    stats = s.stats()
    assert set(stats) >= {
        "ops_recorded", "flushes", "plans_built", "plans_resized", "plan_hits", "plan_misses",
        "messages_sent",
        "messages_received", "bytes_sent", "bytes_received", "fetches",
    }  # fmt: skip
    assert json.loads(json.dumps(stats)) == stats
    assert s.stats()["messages_sent"] == 0


def test_stats_count_fetches_flushes_and_messages(s: lazygt.Session) -> None:
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
    for dim in (0, 1):
        x = torch.zeros(3, 4)
        here = sys._getframe().f_lineno + 1
        x.sum(dim).tolist()
    misses = s.stats()["plan_misses"]
    assert len(misses) == 2
    assert misses[0]["reason"] == "a new sequence of ops"
    assert all(miss["flush"] == "to cpu" for miss in misses)
    assert "other arguments or shapes" in misses[1]["reason"]
    assert re.fullmatch(rf"{re.escape(__file__)}:{here}", misses[1]["line"])


def test_other_sizes_are_no_misses(s: lazygt.Session) -> None:
    for size in (3, 4, 5):
        (torch.zeros(size) + 1).tolist()
    stats = s.stats()
    assert (stats["plans_built"], stats["plans_resized"], len(stats["plan_misses"])) == (3, 2, 1)


def test_worker_pids() -> None:
    with lazygt.session(workers=2) as s:
        assert len(set(s.worker_pids)) == 2
        assert {psutil.Process(pid).ppid() for pid in s.worker_pids} == {os.getpid()}
    with lazygt.session(launcher="inline") as s:
        assert s.worker_pids == [os.getpid()] or s.worker_pids == []


def test_repr(s: lazygt.Session) -> None:
    (torch.ones(3) + 1).tolist()
    assert repr(s) == (
        "<lazygt.session open: 1 cpu worker(s), inline; 3 ops recorded, 1 flushes, 1 plans, 0 hits>"
    )
    s.close()
    assert repr(s).startswith("<lazygt.session closed")


# -- the log ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"launcher": "inline"}, {"workers": 1}], ids=["i", "w"])
def test_the_log_has_a_line_a_message(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    monkeypatch.setenv("LAZYGT_LOG", str(path))
    with lazygt.session(**grouped(settings)) as s:
        (torch.ones(3) + 1).tolist()
        s.synchronize()
        stats = s.stats()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(line) == {"t", "direction", "kind", "rank", "run", "bytes", "why", "line"}
               for line in lines)  # fmt: skip
    sent = [line for line in lines if line["direction"] == "send"]
    received = [line for line in lines if line["direction"] == "receive"]
    assert (len(sent), len(received)) == (stats["messages_sent"], stats["messages_received"])
    assert sum(line["bytes"] for line in sent) == stats["bytes_sent"]
    assert [(line["kind"], line["why"]) for line in sent[:2]] == [
        ("plan", "to cpu"),
        ("run", "to cpu"),
    ]
    assert sent[0]["line"].startswith(f"{__file__}:")
    assert not any(line["line"] for line in received)


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
        (
            {"worker": 1},
            TypeError,
            r"unexpected keyword 'worker'; did you mean workers=\.\.\.\? It takes: workers",
        ),
        ({"workers": 0}, ValueError, r"workers=0\): expected an integer >= 1"),
        ({"mesh": (2, 2)}, TypeError, r"mesh=\(2, 2\)\): expected ranks by axis, such as \{'data'"),
        ({"mesh": {1: 2}}, ValueError, r"mesh=\{1: 2\}\): expected names such as 'data'"),
        ({"mesh": {"a b": 2}}, ValueError, "expected names such as 'data' as axes"),
        ({"workers": 1.5}, ValueError, r"workers=1.5"),
        (
            {"launcher": "magic"},
            ValueError,
            r"expected 'process', 'environment', 'ray', 'inline' or 'dry'",
        ),
        ({"launcher": "inline", "workers": 2}, ValueError, r"one worker"),
        ({"device": "tpu"}, ValueError, r"expected auto, cpu or cuda"),
        ({"threads": 0}, ValueError, r"threads=0"),
        ({"transport": "pigeon"}, ValueError, r"pigeon"),
    ],
)
def test_invalid_settings_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        lazygt.session(**grouped(settings))


def test_an_old_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_EXECUTOR", "inline")
    with pytest.raises(ValueError, match="which is LAZYGT_LAUNCHER now: rename it"):
        lazygt.session()


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_LAUNCHER", "inline")
    monkeypatch.setenv("LAZYGT_DEFAULT_DEVICE", "off")
    with lazygt.session() as s:
        assert torch.zeros(1).device.type == "cpu"
        assert s.config.launcher == "inline"
    with lazygt.session(tracing=lazygt.Tracing(default_device=True)):
        assert torch.zeros(1).device.type == "lazygt"
    monkeypatch.setenv("LAZYGT_MAX_GRAPH_NODES", "many")
    with pytest.raises(ValueError, match="LAZYGT_MAX_GRAPH_NODES='many'"):
        lazygt.session()
