"""What `lazygt top` sees of ranks on another host: through the client's pages alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lazygt.observe.top.sources import LocalStatus, open_source
from lazygt.observe.top.status import STUCK, SessionStatus
from tests.clusters.hosts import Hosts
from tests.clusters.running import torchrun

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("watched.py")
DEADLINE = 100.0  # seconds; on a machine that has other things to do


def seen(source: LocalStatus, what: Callable[[SessionStatus], bool]) -> SessionStatus:
    """A status that is so; it is looked for until then."""
    until = time.monotonic() + DEADLINE
    while not what(status := source.snapshot()):
        assert time.monotonic() < until, status
        time.sleep(0.05)
    return status


def all_work(status: SessionStatus) -> bool:
    return not {rank.state for rank in status.ranks} & {*STUCK, "starting"}


def all_wait_for(rank: int, status: SessionStatus) -> bool:
    return status.ranks[rank].blocks == tuple(r.rank for r in status.ranks if r.rank != rank)


def test_ranks_of_another_host_are_seen_also_frozen_and_cut_off(
    hosts: Hosts, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    run = torchrun(hosts, 2, ended, program=PROGRAM)
    source = open_source(run.until("client ").split()[1])
    try:
        status = seen(source, all_work)
        assert [rank.host == "" for rank in status.ranks] == [True, True, False, False]
        assert len({rank.pid for rank in status.ranks}) == 4
        status = seen(source, lambda status: all(rank.peak > 0 for rank in status.ranks))
        there = status.ranks[2].host

        os.kill(status.ranks[3].pid, signal.SIGSTOP)
        try:
            # Others wait for a rank now and then that is not stuck: for this one they go on to.
            status = seen(source, lambda status: status.stuck == (3,) and all_wait_for(3, status))
        finally:
            os.kill(status.ranks[3].pid, signal.SIGCONT)
        assert status.ranks[3].state == "frozen"
        seen(source, all_work)

        hosts.cut(1)
        status = seen(source, lambda status: status.stuck == (2, 3))
        assert {rank.state for rank in status.ranks[2:]} == {"unreachable"}
        assert {rank.host for rank in status.ranks[2:]} == {there}
        assert all(rank.unheard > 1 for rank in status.ranks[2:])
        assert all(rank.unheard == 0 for rank in status.ranks[:2])
        seen(source, lambda status: {0, 1} >= set(status.ranks[2].blocks) != set())
        hosts.mend(1)
        seen(source, all_work)
    finally:
        source.close()
        ended.touch()
    run.ended()
    assert [process.returncode for process in run.processes] == [0, 0]
