"""What `lazygt top` sees of ranks on another host: through the client's pages alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazygt.top.sources import LocalSource, open_source
from lazygt.top.status import STUCK, SessionStatus
from tests.clusters.hosts import Hosts, hosts_or_skip

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("watched.py")
QUIET = {"LAZYGT_COMPILE": "off", "OMP_NUM_THREADS": "1"}
TOKEN = "of-a-test-and-long-enough-to-be-secret"
DEADLINE = 100.0  # seconds; on a machine that has other things to do


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as hosts:
        yield hosts


def torchrun(hosts: Hosts, host: int, *arguments: object) -> subprocess.Popen[Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--node-rank", str(host), "--master-addr", hosts.addresses[0], "--master-port", "29500",
        *map(str, arguments),
    ]  # fmt: skip
    environment = {**os.environ, **QUIET, "LAZYGT_TOKEN": TOKEN}
    return hosts.start(host, command, env=environment, stdout=subprocess.PIPE, text=True)


def seen(source: LocalSource, what: Callable[[SessionStatus], bool]) -> SessionStatus:
    """A status that is so; it is looked for until then."""
    until = time.monotonic() + DEADLINE
    while not what(status := source.snapshot()):
        assert time.monotonic() < until, status
        time.sleep(0.05)
    return status


def all_work(status: SessionStatus) -> bool:
    return not {rank.state for rank in status.ranks} & {*STUCK, "starting"}


def test_ranks_of_another_host_are_seen_also_frozen_and_cut_off(
    hosts: Hosts, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    client, other = (torchrun(hosts, host, PROGRAM, ended) for host in range(2))
    assert client.stdout is not None
    source = open_source(client.stdout.readline().strip())
    try:
        status = seen(source, all_work)
        assert [rank.host == "" for rank in status.ranks] == [True, True, False, False]
        assert len({rank.pid for rank in status.ranks}) == 4
        status = seen(source, lambda status: all(rank.peak > 0 for rank in status.ranks))
        there = status.ranks[2].host

        os.kill(status.ranks[3].pid, signal.SIGSTOP)
        try:
            status = seen(source, lambda status: status.ranks[3].blocks == (0, 1, 2))
        finally:
            os.kill(status.ranks[3].pid, signal.SIGCONT)
        assert status.ranks[3].state == "frozen"
        assert status.stuck == (3,)
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
    assert client.wait(100) == other.wait(100) == 0
