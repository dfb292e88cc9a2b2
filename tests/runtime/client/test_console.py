"""The waiting line: on a terminal only, after a while, and wiped."""

from __future__ import annotations

import io

import pytest

from lazygt.runtime.client import console
from lazygt.runtime.client.console import WaitLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_shows_after_two_seconds_and_is_wiped(clock: list[float]) -> None:
    stream = Terminal()
    line = WaitLine(stream)
    line.update("2 runs")
    assert stream.getvalue() == ""
    clock[0] += 3
    line.update("2 runs")
    assert stream.getvalue().endswith("lazygt: waiting 3 s for 2 runs")
    line.done()
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_each_wait_counts_from_its_own_beginning(clock: list[float]) -> None:
    stream = Terminal()
    line = WaitLine(stream)
    line.update("a run")
    line.done()
    clock[0] += 60
    line.update("a run")
    assert stream.getvalue() == ""


def test_silent_without_a_terminal(clock: list[float]) -> None:
    stream = io.StringIO()
    line = WaitLine(stream)
    assert line.interval is None
    line.update("a run")
    clock[0] += 60
    line.update("a run")
    line.done()
    assert stream.getvalue() == ""
