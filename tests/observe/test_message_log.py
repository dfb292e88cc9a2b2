"""``lazygt log``: an instruction log added up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.observe.traffic import LogSummary, read_log

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, lazygt.Session]:
    """The log of a session that has read three sums, and that session."""
    path = tmp_path / "log"
    monkeypatch.setenv("LAZYGT_LOG", str(path))
    with lazygt.session(workers=lazygt.Workers(1, threads=1), recovery="off") as s:
        x = torch.ones(8)
        for number in range(3):
            (x + number).sum().item()
    return path, s


def test_the_sums_are_the_sessions_counts(logged: tuple[Path, lazygt.Session]) -> None:
    path, session = logged
    stats, summary = session.stats(), LogSummary(read_log(path))
    assert summary.messages == stats["messages_sent"] + stats["messages_received"]
    assert summary.nbytes == stats["bytes_sent"] + stats["bytes_received"]
    kinds = {total.name: total for total in summary.by_kind()}
    assert kinds["send run"].count == kinds["receive done"].count == sum(stats["flushes"].values())
    assert kinds["send plan"].count == stats["plans_sent"]
    assert 0 < kinds["send run"].milliseconds < summary.seconds * 1e3
    assert kinds["send plan"].milliseconds == kinds["receive done"].milliseconds == 0
    reasons = {total.name: total.count for total in summary.by_reason()}
    assert reasons["item"] == 3 + stats["plans_sent"]
    assert sum(reasons.values()) == stats["messages_sent"]
    lines = summary.by_line()
    assert all(total.name.startswith(f"{__file__}:") for total in lines)
    assert lines[0].count == reasons["item"]
    assert sum(total.nbytes for total in lines) == stats["bytes_sent"]


def test_a_log_of_two_sessions(logged: tuple[Path, lazygt.Session]) -> None:
    """Runs are numbered anew in each."""
    path, _ = logged
    once = LogSummary(read_log(path))
    path.write_text(path.read_text() * 2)
    twice = LogSummary(read_log(path))
    assert twice.seconds == pytest.approx(2 * once.seconds)
    for one, two in zip(once.by_kind(), twice.by_kind(), strict=True):
        assert (two.name, two.count, two.nbytes) == (one.name, 2 * one.count, 2 * one.nbytes)
        assert two.milliseconds == pytest.approx(2 * one.milliseconds)


def test_log_command_prints_message_counts(logged: tuple[Path, lazygt.Session]) -> None:
    path, session = logged
    stats = session.stats()
    shown = CliRunner().invoke(app, ["log", str(path)])
    assert shown.exit_code == 0, shown.output
    count = stats["messages_sent"] + stats["messages_received"]
    assert shown.output.startswith(f"{count} messages, ")
    assert all(f"by {name}" in shown.output for name in ("kind", "reason", "line"))
    told = json.loads(CliRunner().invoke(app, ["log", str(path), "--json"]).output)
    assert told["messages"] == count
    assert {row["name"] for row in told["kind"]} == {"send plan", "send run", "receive done"}
    one = CliRunner().invoke(app, ["log", str(path), "--by", "kind", "--most", "1"]).output
    assert "and 2 more" in one
    assert "by reason" not in one


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", ":1: this is no line of a log: "),
        ("[1, 2]", "expected an object with t, direction"),
        ('{"t": "now"}', "'t' is 'now'"),
    ],
)
def test_a_file_that_is_no_log(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text + "\n")
    shown = CliRunner().invoke(app, ["log", str(path)])
    assert shown.exit_code == 2
    assert told in shown.output


def test_no_such_file_and_no_such_table(logged: tuple[Path, lazygt.Session]) -> None:
    path, _ = logged
    for arguments, told in (
        (["log", str(path) + "x"], "No such file"),
        (["log", str(path), "--by", "size"], "--by is one of kind, reason, line, not 'size'"),
    ):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 2
        assert told in shown.output
