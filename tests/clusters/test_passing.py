"""What a client uploads to many hosts crosses its own link once, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.clusters.hosts import Hosts, hosts_or_skip
from tests.clusters.running import alone, same, torchrun
from tests.runtime.cluster.agents import wait_for

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

MEGABYTES = 64
UPLOAD = MEGABYTES << 20


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """The client's, and three others."""
    with hosts_or_skip(4) as hosts:
        yield hosts


def in_the_midst(hosts: Hosts) -> None:
    """Wait until a part of the upload has left the client's host."""
    wait_for(lambda: hosts.sent(0) >= UPLOAD // 4, 200)


def test_an_upload_leaves_the_clients_host_once(hosts: Hosts) -> None:
    """64 MiB to four workers on four hosts: the first three send it once, the last one does not."""
    run = torchrun(hosts, 1, 5, MEGABYTES)
    told = run.told()
    sent = [hosts.sent(host) for host in range(4)]
    assert same(told, alone(5, MEGABYTES, 4))
    assert told["recoveries"] == []
    assert told["again"] == 3
    for nbytes in sent[:3]:
        assert UPLOAD <= nbytes < 1.1 * UPLOAD, sent
    assert sent[3] < 0.1 * UPLOAD
    for process in run.processes:
        assert process.wait(60) == 0


def test_a_host_that_is_cut_off_in_the_midst_of_an_upload_has_the_rest_later(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 5, MEGABYTES)
    in_the_midst(hosts)
    hosts.cut(2)
    with pytest.raises(subprocess.TimeoutExpired):
        run.processes[0].wait(5)
    hosts.mend(2)
    told = run.told()
    assert same(told, alone(5, MEGABYTES, 4))
    assert told["recoveries"] == []
    assert hosts.sent(0) < 1.1 * UPLOAD


def test_a_host_that_is_lost_in_the_midst_of_an_upload_is_left_out(hosts: Hosts) -> None:
    run = torchrun(hosts, 1, 5, MEGABYTES)
    in_the_midst(hosts)
    for pid in hosts.processes(2):
        os.kill(pid, signal.SIGKILL)
    told = run.told()
    assert same(told, alone(5, MEGABYTES, 4))
    (record,) = told["recoveries"]
    assert "is lost" in record
