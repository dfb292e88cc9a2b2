"""Programs that torchrun has started on two hosts, unchanged: one session, and the bits of one
host; and what happens to it when the network goes, or a host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.clusters.hosts import Hosts
from tests.clusters.running import PROGRAM, Running, alone, same, start, torchrun, worker

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]


def test_torchrun_on_two_hosts_is_one_session_and_the_client_uploads_once_a_host(
    hosts: Hosts,
) -> None:
    """64 MiB to four workers, two of which are on the other host, cross the link once."""
    before = hosts.sent(0)
    run = torchrun(hosts, 2, 5, 64)
    told = run.told()
    sent = hosts.sent(0) - before
    assert same(told, alone(5, 64, 4))
    assert told["launcher"] == "environment"
    assert told["again"] == 3
    assert told["recoveries"] == []
    assert 64 << 20 <= sent < 1.1 * (64 << 20)
    for process in run.processes:
        assert process.wait(60) == 0


def test_a_link_that_is_down_for_a_while_loses_nothing(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 300, 1)
    run.until("step 100")
    hosts.cut(1)
    with pytest.raises(subprocess.TimeoutExpired):
        run.processes[0].wait(5)
    hosts.mend(1)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    assert told["recoveries"] == []


def test_a_lost_host_is_recovery_on_the_other(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 300, 1)
    run.until("step 100")
    for pid in hosts.processes(1):
        os.kill(pid, 9)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    (record,) = told["recoveries"]
    assert "is lost" in record


def test_without_a_token_nothing_listens(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 5, 1, given={"LAZYGT_TOKEN": ""})
    output, _ = run.processes[0].communicate(timeout=100)
    assert "LAZYGT_TOKEN is not set" in output
    assert "lazygt keys token" in output


def test_a_host_may_be_added_by_hand(hosts: Hosts) -> None:
    """`lazygt worker` takes the place of the program there."""
    engine = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0]}
    client = start(hosts, 0, [sys.executable, str(PROGRAM), "5", "1"], engine)
    agent = start(hosts, 1, worker(hosts), {})
    run = Running(hosts, [client, agent])
    assert same(run.told(), alone(5, 1, 2))
    run.ended()
    assert agent.returncode == 0
