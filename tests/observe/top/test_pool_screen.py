"""A pool in 80 columns and 24 rows, and what is not believed of what its clients write."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from lazygt.net.status_file import ClientPage, Page, Pages, WorkerPage
from lazygt.observe.top.screen import PoolScreen, page_of
from lazygt.observe.top.sources import as_json
from lazygt.observe.top.status import PoolStatus, pool_status
from tests.observe.top.statuses import CLIENT, status


def row(number: int, workers: int, **other: Any) -> dict[str, Any]:
    return {
        "session": f"alice-{number}", "client": "alice", "state": "runs", "workers": workers,
        "cores": workers, "places": list(range(workers)), "pids": [], "run_seconds": 1234.5,
        "memory": 3 << 29, "seconds": 60.0, "expires_in": None, "before": None, "unheard": 0.0,
        "quota": {"sessions": None, "workers": 8, "cores": None, "memory": 3 << 30}, **other,
    }  # fmt: skip


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    others = {"sessions": 3, "workers": 7, "waiting": 2}
    return {"workers": 80, "free": 9, "at_once": 8, "queue_limit": 64, "draining": False,
            "sessions": list(rows), "others": others, "published": []}  # fmt: skip


def shown(of: PoolStatus, width: int = 80, height: int = 24) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    with console.capture() as captured:
        console.print(PoolScreen(of), height=height)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).rstrip("\n").split("\n")


@pytest.mark.parametrize("count", [0, 1, 2, 12, 16, 40])
def test_any_number_of_sessions_fits(count: int) -> None:
    rows = [row(number, 4) for number in range(count)]
    sessions = {one["session"]: status(4, frozen=(1,)) for one in rows[:2]}
    lines = shown(PoolStatus(0.0, "tcp://10.0.0.1:7000", report(*rows), sessions))
    assert len(lines) <= 24, "\n".join(lines)
    assert max(map(len, lines)) <= 80, "\n".join(lines)
    assert "71 of 80 workers taken, 8 run at once  queue 2 of 64" in lines[0]
    assert lines[1] == "besides, other keys have 3 sessions with 7 workers, and 2 that wait"


def test_a_session_of_64_ranks_has_its_own_screen_below() -> None:
    one = status(64, frozen=(5,), waiting=(1, 2))
    rows = [row(1, 64), row(2, 3, state="waits", places=[], before=0)]
    lines = shown(PoolStatus(0.0, "tcp://10.0.0.1:7000", report(*rows), {"alice-1": one}))
    assert len(lines) <= 24, "\n".join(lines)
    text = "\n".join(lines)
    assert "alice-1: rank 5 (process 1005) is frozen; it blocks ranks 1-2" in text
    assert re.search(r"alice-1 +runs +F1 W2 B61 +1234 +1.6 GB +50 %", text)
    assert re.search(r"alice-2 +waits \(0\) +3 ", text)
    assert "WW" in text


def page(message: ClientPage | WorkerPage | bytes) -> Page:
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return Page(10**9, 0.1, "S", data)


def test_control_characters_of_client_do_not_reach_terminal() -> None:
    evil = "\x1b]0;owned\x07\r\n"
    client = replace(CLIENT, name="of-somebody-else", workers=10**12, line=evil, miss=evil,
                     kinds=((evil, 3),))  # fmt: skip
    rank = WorkerPage(0, 7, evil, doing=evil, plan=evil)
    told = pool_status("tcp://h:1", report(row(1, 2)), {
        "alice-1": Pages(page(client), (page(rank), page(b"nonsense"))),
    })  # fmt: skip
    session = told.sessions["alice-1"]
    assert (session.session.name, len(session.ranks)) == ("alice-1", 2)
    assert [rank.state for rank in session.ranks] == ["starting", "starting"]
    assert all(c.isprintable() for line in shown(told) for c in line)
    assert "owned" in session.session.line
    assert json.loads(as_json(told))["sessions"][0]["status"]["session"]["name"] == "alice-1"


def test_a_session_without_its_client_shows_its_ranks() -> None:
    rank = page(WorkerPage(0, 7, "idle"))
    rows = [row(1, 1, state="alone", expires_in=28.0), row(2, 1, unheard=5.0)]
    told = pool_status("tcp://h:1", report(*rows), {
        "alice-1": Pages(None, (rank,)), "alice-2": Pages(None, (rank,)),
    })  # fmt: skip
    assert [session.client for session in told.sessions.values()] == ["gone", "silent"]
    assert all(session.ranks[0].state == "idle" for session in told.sessions.values())
    text = "\n".join(shown(told))
    assert re.search(r"alice-1 +alone 28 s +i1", text)
    assert "alice-2: the client is silent" in text


def test_nonsense_of_a_client_hides_its_session_alone() -> None:
    told = pool_status("tcp://h:1", report(row(1, 1), row(2, 1)), {
        "alice-1": Pages(page(b"nonsense"), (None,)), "alice-2": Pages(page(CLIENT), (None,)),
    })  # fmt: skip
    assert list(told.sessions) == ["alice-2"]


def test_page_has_the_ranks_of_a_session_as_squares() -> None:
    one = status(4, frozen=(2,))
    rows = [row(1, 4), row(2, 3, state="waits", places=[], before=0)]
    page = page_of(PoolStatus(0.0, "tcp://10.0.0.1:7000", report(*rows), {"alice-1": one}))
    assert page["title"] == (
        "tcp://10.0.0.1:7000  71 of 80 workers taken, 8 run at once  queue 3 of 64"
    )
    assert page["alerts"] == [("alice-1: rank 2 (process 1002) is frozen", "problem")]
    assert page["columns"][:4] == ("session", "key", "state", "ranks")
    first, second = page["rows"]
    assert (first[:3], first[3][2]) == (("alice-1", "alice", "runs"), (2, "frozen", ""))
    assert second[:4] == ("alice-2", "alice", "waits (0)", "3")


def test_page_tells_problems_from_notices() -> None:
    waiting = status(64, waiting=(1, 2))
    page = page_of(PoolStatus(0.0, "tcp://h:1", report(row(1, 64)), {"alice-1": waiting}))
    assert page["alerts"] == [("alice-1: rank 5 keeps ranks 1-2 waiting", "notice")]
    activities = [line for line in page["lines"] if line.startswith("alice-1 ")]
    assert len(activities) == 4
    assert CLIENT.line in activities[0]
