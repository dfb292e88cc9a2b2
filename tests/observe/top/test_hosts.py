"""Ranks on other hosts, behind agents: who is asked for their pages, and what is made of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import torch

import lazygt
from lazygt.net import status_file
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import ClientPage, Page, StatusFile, WorkerPage, read_pages
from lazygt.observe.top.sources import LocalStatus, open_source
from lazygt.observe.top.status import SessionStatus, session_status
from lazygt.runtime.cluster import opening
from lazygt.runtime.cluster.protocol import Look, Seen
from lazygt.runtime.cluster.remote import Relay, RemoteHost
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import encode
from tests.runtime.cluster.agents import Hosts

pytestmark = pytest.mark.timeout(180)
DEADLINE = 60.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.fixture
def session(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[lazygt.Session]:
    """A session whose only worker is on another host."""
    monkeypatch.setitem(opening.LAUNCHERS, "agents", hosts.open([0, 1]))
    with lazygt.session(
        launcher="agents", workers=lazygt.Workers(1, frozen_after=100.0)
    ) as session:
        assert torch.ones(3).sum().item() == 3
        yield session


def seen(source: LocalStatus, what: Callable[[SessionStatus], bool]) -> SessionStatus:
    """A status that is so; it is looked for until then."""
    until = time.monotonic() + DEADLINE
    while not what(status := source.snapshot()):
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return status


def written(session: lazygt.Session, times: int) -> None:
    """Wait until the client has written its page so often."""
    pages = session._link.status
    assert pages is not None
    until = time.monotonic() + DEADLINE
    last = pages.read(0)
    while times:
        assert time.monotonic() < until
        time.sleep(0.02)
        if (now := pages.read(0)) != last:
            last, times = now, times - 1


def test_unwatched_session_polls_no_host(session: lazygt.Session, hosts: Hosts) -> None:
    session.synchronize()
    (agent,) = hosts.agents
    sent = agent.end.messages_sent
    written(session, 4)
    assert agent.end.messages_sent == sent
    source = open_source(session._link.name)
    written(session, 4)
    source.close()
    assert sent + 3 <= agent.end.messages_sent <= sent + 5


def test_a_rank_elsewhere_is_seen_while_the_client_does_nothing(session: lazygt.Session) -> None:
    session.synchronize()
    source = open_source(session._link.name)
    status = seen(source, lambda status: status.ranks[0].state == "idle")
    assert [rank.host for rank in status.ranks] == ["host1"]
    assert [rank.pid for rank in status.ranks] == session.worker_pids
    seen(source, lambda status: status.ranks[0].run == status.session.runs)
    seen(source, lambda status: status.ranks[0].resident > 0)
    pid = session.worker_pids[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        status = seen(source, lambda status: status.stuck == (0,))
        assert status.ranks[0].state == "frozen"
    finally:
        os.kill(pid, signal.SIGCONT)
    seen(source, lambda status: not status.stuck)
    source.close()


def test_ranks_of_a_lost_host_are_gone_until_they_are_elsewhere(
    session: lazygt.Session, hosts: Hosts
) -> None:
    source = open_source(session._link.name)
    seen(source, lambda status: status.ranks[0].state == "idle")
    hosts.lose(0)
    status = seen(source, lambda status: status.stuck == (0,))
    assert status.ranks[0].state == "gone"
    assert torch.ones(4).sum().item() == 4
    status = seen(source, lambda status: status.ranks[0].pid == session.worker_pids[0])
    assert status.ranks[0].host == os.uname().nodename
    seen(source, lambda status: status.session.recoveries == 1)
    seen(source, lambda status: not status.stuck)
    source.close()


class Silent:
    """A connection at whose other end nobody speaks, but for what a test does."""

    closed: str | None = None
    fd = -1

    def __init__(self) -> None:
        self.sent: list[Sequence[Frame]] = []
        self.answers: list[list[memoryview]] = []

    def send(self, frames: Sequence[Frame]) -> None:
        self.sent.append(frames)

    def take(self) -> list[memoryview] | None:
        return self.answers.pop(0) if self.answers else None

    def close(self, reason: str = "done") -> None:
        self.closed = reason


def page(message: WorkerPage, age: float) -> Page:
    """A page of another host, whose clock is anywhere."""
    return Page(5_000_000_000, age, "S", msgspec.msgpack.encode(message))


class Far:
    """Ranks 0 and 1 on a host that is silent, and the client's pages of them."""

    def __init__(self) -> None:
        self.connection = Silent()
        self.host = RemoteHost("far", self.connection)
        self.host.open(7, LinkSpec(world_size=2, ranks=(0, 1)))
        self.connection.sent.clear()
        self._fd = StatusFile.create(2)
        self.file = StatusFile(self._fd)
        self.file.write(0, ClientPage("lazygt-x", os.getpid(), 2, "cpu", "data=2", 0.0))
        self.relay = Relay(self.file)

    def close(self) -> None:
        self.file.close()
        os.close(self._fd)

    def look(self) -> SessionStatus:
        self.host.pump()
        self.relay.look([self.host], dict.fromkeys(range(2), self.host))
        return session_status([read_pages(self.file)])

    def answer(self, *pages: Page | None) -> None:
        frames = encode(Seen(7), [msgspec.msgpack.encode(pages)])
        self.connection.answers.append([memoryview(bytes(frame)) for frame in frames])


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far()
    yield far
    far.close()


def test_a_host_that_does_not_answer_is_asked_once_and_unreachable(
    monkeypatch: pytest.MonkeyPatch, far: Far
) -> None:
    assert [rank.state for rank in far.look().ranks] == ["starting"] * 2
    far.answer(page(WorkerPage(0, 70, "idle"), 0.1), page(WorkerPage(1, 71, "busy"), 0.1))
    assert [rank.state for rank in far.look().ranks] == ["idle", "busy"]
    monkeypatch.setattr("lazygt.runtime.cluster.remote._UNHEARD_AFTER", 0)
    for _ in range(5):
        status = far.look()
    assert len(far.connection.sent) == 2
    assert all(Look.begins(frames[0]) for frames in far.connection.sent)
    assert [rank.state for rank in status.ranks] == ["unreachable"] * 2
    assert status.stuck == (0, 1)
    assert all(rank.unheard > 0 for rank in status.ranks)
    assert [rank.pid for rank in status.ranks] == [70, 71]


def test_times_of_another_host_are_told_by_this_ones_clock(far: Far) -> None:
    far.look()
    begun = 5_000_000_000 - 2_000_000_000
    far.answer(page(WorkerPage(0, 70, "busy", begun=begun), 0.5), None)
    status = far.look()
    assert 2.5 <= status.ranks[0].seconds < 2.5 + DEADLINE
    assert 0.5 <= status.ranks[0].age < 0.5 + DEADLINE
    assert status.ranks[1].state == "starting"


def test_a_rank_that_has_been_silent_there_is_silent(far: Far) -> None:
    far.look()
    far.answer(page(WorkerPage(0, 70, "busy"), 3.0), None)
    assert far.look().ranks[0].state == "silent"


def test_nothing_is_said_of_ranks_from_a_client_that_is_frozen(
    monkeypatch: pytest.MonkeyPatch, far: Far
) -> None:
    far.look()
    far.answer(page(WorkerPage(0, 70, "busy"), 0.1), page(WorkerPage(1, 71, "idle"), 0.1))
    far.look()
    monkeypatch.setattr("lazygt.host.processes.state", lambda pid: "T")
    status = session_status([read_pages(far.file)])
    assert status.client == "frozen"
    assert [rank.state for rank in status.ranks] == ["unreachable"] * 2


def test_largest_page_fits_its_slot() -> None:
    ranks = tuple(range(2**20, 2**20 + status_file.MOST_RANKS))
    most = WorkerPage(
        2**30, 2**30, "starting", 2**60, "f" * 32, 2**30, "\u00e4" * 200, 2**60, ranks,
        *[2**60] * 6, status_file.Elsewhere("h" * 64, "S", 2**60, 2**60),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(most)) <= status_file.CAPACITY
