"""``lazygt.profile(session)``: a timeline that costs nothing when it is off."""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazygt
from lazygt.observe import timeline as timelines
from lazygt.runtime import wire
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.runtime.messages import TO_CLIENT, TO_WORKER, Done, Run, Timings
from lazygt.runtime.wire import decode, encode

pytestmark = pytest.mark.timeout(120)


def _train(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 8)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def _boxes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def _steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "step" in event.get("args", {})]


@pytest.mark.parametrize("workers", [0, 1, 2], ids=["inline", "one", "two"])
def test_a_profile_shows_client_and_workers(workers: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": workers} if workers else {"launcher": "inline"}
    path = tmp_path / "trace.json"
    with lazygt.session(**settings) as s:
        pids = s.worker_pids
        with lazygt.profile(s) as p:
            _train(3)
        before = s.stats()
    p.save(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert trace["otherData"] == {"dropped_events": 0}
    for rank, pid in enumerate(pids):
        ops = Counter(e["name"] for e in _steps(events) if (e["pid"], e["tid"]) == (pid, 3 + rank))
        assert ops["aten.addmm.default"] == 3
    assert Counter(e["name"] for e in _boxes(events) if e["pid"] == os.getpid()) >= Counter(
        {"flush: backward": 3, "flush: item": 3, "wait for the answer": 3}
    )
    messages = Counter(e["name"].split()[0] for e in events if e["ph"] == "i")
    assert messages["send"] == before["messages_sent"]
    assert messages["receive"] == before["messages_received"]
    built = [e for e in _boxes(events) if e["name"] == "build plan"]
    assert len(built) == len(before["plan_misses"])
    assert built[0]["args"]["reason"] == "a new sequence of ops"


def test_a_step_names_op_line_and_results() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(3)
        s.flush()
        with lazygt.profile(s) as p:
            x.log()  # never looked at: the plan lacks it
            x.exp().tolist()
            line = f"{__file__}:{sys._getframe().f_lineno - 1}"
        (step,) = _steps(p.events())
    assert step["name"] == "aten.exp.default"
    assert step["args"] == {
        "op": "aten.exp.default", "line": line, "step": 0, "results": ["f32[3]"],
    }  # fmt: skip
    assert p.by_line() == [(line, 1, pytest.approx(step["dur"] / 1e6))]


def test_each_worker_shows_the_steps_of_its_own_plan() -> None:
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1), compile="off") as s:
        first, last = nn.Linear(4, 4), nn.Linear(4, 2)
        lazygt.stage(first, 0)
        lazygt.stage(last, 1)
        x = torch.ones(3, 4)
        s.flush()
        with lazygt.profile(s) as p:
            h = first(x).tanh()
            y = last(h).sigmoid()
            line = sys._getframe().f_lineno - 1
            s.flush()
        pids = s.worker_pids
        del y
    lines: dict[str, set[tuple[int, str]]] = {}
    for step in _steps(p.events()):
        op = step["name"].rpartition(".")[0].rstrip("_")
        lines.setdefault(op, set()).add((step["pid"], step["args"]["line"]))
    assert lines["aten.tanh"] == {(pids[0], f"{__file__}:{line - 1}")}
    assert lines["aten.sigmoid"] == {(pids[1], f"{__file__}:{line}")}
    assert f"{__file__}:{line}" in {where for where, _, _ in p.by_line()}


def test_a_replayed_plan_has_the_lines_of_this_time() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(3)
        s.flush()
        x.exp().tolist()
        with lazygt.profile(s) as p:
            x.exp().tolist()
            line = f"{__file__}:{sys._getframe().f_lineno - 1}"
        assert s.stats()["plan_hits"] == 1
    assert [step["args"]["line"] for step in _steps(p.events())] == [line]


def test_steps_lie_in_their_run_and_runs_after_their_flush() -> None:
    with lazygt.session(workers=1) as s:
        with lazygt.profile(s) as p:
            _train(2)
        (pid,) = s.worker_pids
    boxes = _boxes(p.events())
    flushes = {e["args"]["run"]: e for e in boxes if e["name"].startswith("flush")}
    runs = {e["args"]["run"]: e for e in boxes if e["pid"] == pid and "steps" in e["args"]}
    assert set(runs) == set(flushes)
    assert len(runs) > 3
    for number, run in runs.items():
        assert run["ts"] >= flushes[number]["ts"]
    last = [e for e in boxes if e["pid"] == pid]
    inside = 0
    for box in last:
        if "steps" in box["args"]:
            begin, end = box["ts"], box["ts"] + box["dur"]
        else:
            assert begin <= box["ts"] <= box["ts"] + box["dur"] <= end + 1e-3
            inside += 1
    assert inside == sum(run["args"]["steps"] for run in runs.values())
    arrows = Counter((e["ph"], e["id"]) for e in p.events() if e["ph"] in "sf")
    assert arrows == Counter({(ph, number): 1 for number in runs for ph in "sf"})


def test_a_profile_changes_no_number() -> None:
    with lazygt.session(launcher="inline"):
        plain = _train(4)
    with lazygt.session(launcher="inline") as s, lazygt.profile(s):
        profiled = _train(4)
    assert profiled == plain


def test_ended_profile_adds_no_bytes_to_messages() -> None:
    """Not a byte of a message, and not a timed run, once the profile has ended."""
    run = Run(7, b"0" * 16, 3)
    assert wire.unpack(encode(run)[0], list) == [2, 7, b"0" * 16, 3]
    assert wire.unpack(encode(Done(7))[0], list) == [3, 7]
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        before = _messages(s)
        with lazygt.profile(s) as p:
            _train(2)
        runs = p.runs
        assert _messages(s) == before > 0
        assert runs > 0
        assert p.runs == runs


def _messages(s: lazygt.Session) -> int:
    """The bytes of a message that is always the same."""
    x = torch.ones(2)
    s.synchronize()
    for _ in range(3):
        x.add_(1)
        s.synchronize()
    return int(s.stats()["last_run_message"])


def test_timings_round_trip() -> None:
    timings = Timings(5, 9, ((0, 1, 6, 7), (1, 2, 7, 8)))
    done = Done(7, timings=timings)
    assert decode(encode(done), TO_CLIENT) == done
    run = Run(7, timed=True)
    assert decode(encode(run), TO_WORKER) == run


def test_a_node_that_fails_is_timed_and_reported() -> None:
    with lazygt.session(launcher="inline") as s:
        table = torch.ones(3, 2)
        index = torch.tensor([0, 7])
        with lazygt.profile(s) as p, pytest.raises(lazygt.ExecutionError, match="index"):
            table[index].sum().item()
    assert {"aten.index.Tensor"} <= {step["name"] for step in _steps(p.events())}


def test_a_data_dependent_op_is_profiled() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(3)
        with lazygt.profile(s) as p:
            assert torch.nonzero(x).tolist() == [[0], [1], [2]]
    assert "aten.nonzero.default" in {step["name"] for step in _steps(p.events())}


def test_one_profile_at_a_time() -> None:
    with lazygt.session(launcher="inline") as s:
        with (
            lazygt.profile(s),
            pytest.raises(RuntimeError, match="being profiled already"),
            lazygt.profile(s),
        ):
            pass
        with lazygt.profile(s) as again:
            torch.ones(2, 2).mm(torch.ones(2, 2)).tolist()
    assert "aten.mm.default" in {step["name"] for step in _steps(again.events())}
    with pytest.raises(lazygt.NoSession), lazygt.profile(s):
        pass


def test_a_profile_that_ends_with_an_error_is_kept() -> None:
    with lazygt.session(launcher="inline") as s:
        with pytest.raises(KeyError), lazygt.profile(s) as p:  # noqa: PT012 - the error ends both
            torch.ones(2).tolist()
            raise KeyError("mine")
        assert p.runs == 1
        torch.ones(2).tolist()
        assert p.runs == 1


def test_two_sessions_in_one_timeline() -> None:
    timeline = timelines.Timeline()
    for _ in range(2):
        with lazygt.session(launcher="inline") as s, lazygt.profile(s, timeline):
            torch.ones(2).tolist()
    names = [e["args"]["name"] for e in timeline.events() if e["name"] == "thread_name"]
    assert [name for name in names if "worker" in name] == [
        "session 0: worker 0", "session 1: worker 0",
    ]  # fmt: skip
    assert len({step["tid"] for step in _steps(timeline.events())}) == 2


def test_a_long_profile_keeps_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_EVENTS", 60)
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(2)
        with lazygt.profile(s) as p:
            for _ in range(20):
                x = x * 2
                s.flush()
    assert p.dropped > 0
    assert 2 <= p.runs < 20
    assert len(p.events()) < 80
    assert re.fullmatch(r"<lazygt timeline: \d+ runs, \d\d events>", repr(p))


def test_compiles_that_ended_meanwhile_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(second: float) -> CompileRecord:
        return CompileRecord(
            "key", 3, "a.py:1", "compiled", 0.25, 2.0, at=p.begin / 1e9 + second, took=2
        )

    with lazygt.session(launcher="inline") as s:
        with lazygt.profile(s) as p:
            running = CompileRecord("key", 3, "a.py:1", "compiling")
            monkeypatch.setattr(s, "compiles", lambda: [at(-9), at(1), running])
        (box,) = [e for e in _boxes(p.events()) if e["name"] == "compile 3 ops: compiled"]
    assert box["ts"] == pytest.approx(2.75e6, rel=1e-6)
    assert box["dur"] == 250_000.0
    assert (box["args"]["tier"], box["args"]["line"]) == ("compiled", "a.py:1")


@pytest.mark.slow
def test_a_compiled_group_is_one_step() -> None:
    x = torch.rand(256, 256)

    def work() -> list[float]:
        y = x.to("lazygt")
        return [((y * 2 + k).sin() * y).exp().sum().item() for k in range(4)]

    with lazygt.session(workers=1, compile="off"):
        plain = work()
    with lazygt.session(workers=1, compile="now") as s:
        work()
        s.compiled()
        if not any(each.status in ("compiled", "cached") for each in s.compiles()):
            pytest.skip(f"nothing can be compiled here: {s.compiles()}")
        unprofiled = work()
        with lazygt.profile(s) as p:
            assert work() == unprofiled
    assert unprofiled == pytest.approx(plain, rel=1e-4)
    groups = [step for step in _steps(p.events()) if step["name"].startswith("compiled: ")]
    assert len(groups) == 4
    assert "aten.sin" in groups[0]["args"]["op"]
    assert groups[0]["args"]["line"].startswith(f"{__file__}:")
