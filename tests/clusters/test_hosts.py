"""The hosts of tests do what tests of clusters rely on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.hosts import Hosts, hosts_or_skip, missing

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(120),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PING = ["ping", "-c", "20", "-i", "0.01", "-W", "5"]
SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print("listens", flush=True)
peer, _ = listener.accept()
count = 0
while block := peer.recv(1 << 20):
    count += len(block)
print(count)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000))
peer.sendall(bytes(int(sys.argv[2])))
peer.close()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(3) as hosts:
        yield hosts


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def test_a_host_reaches_others_by_name_and_itself(hosts: Hosts) -> None:
    for target in (hosts.names[1], hosts.addresses[2], "127.0.0.1", hosts.names[0]):
        done = hosts.run(0, ["ping", "-c", "1", "-W", "10", target])
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_host_knows_its_name(hosts: Hosts) -> None:
    done = hosts.run(1, python("import socket; print(socket.gethostname())"))
    assert done.stdout.strip() == hosts.names[1]
    assert os.uname().nodename != hosts.names[1]


def test_a_round_trip_takes_twice_the_delay_at_least() -> None:
    with Hosts(2, delay=5e-3) as hosts:
        done = hosts.run(0, [*PING, hosts.addresses[1]])
    match = re.search(r"= ([\d.]+)/([\d.]+)/", done.stdout)
    assert match is not None, done.stdout + done.stderr
    assert float(match[1]) >= 10


def test_nothing_but_the_hosts_is_reached(hosts: Hosts) -> None:
    done = hosts.run(0, ["ip", "route"])
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["10.77.0.0/24"]


def test_bytes_arrive_whole_also_over_a_cut(hosts: Hosts) -> None:
    size = 20_000_000
    server = hosts.start(1, python(SERVE, hosts.addresses[1]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listens\n"
    hosts.cut(1)
    client = hosts.start(0, python(SEND, hosts.addresses[1], str(size)))
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.5)
    hosts.mend(1)
    assert server.communicate(timeout=100)[0] == f"{size}\n"
    assert client.wait(100) == 0
    assert size < hosts.sent(0) < 1.1 * size
    assert hosts.sent(2) < 1_000


def test_a_host_that_is_killed_has_no_processes(hosts: Hosts) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    started = hosts.start(2, python(program), stdin=subprocess.PIPE)
    other = hosts.start(1, python("input()"), stdin=subprocess.PIPE)
    hosts.kill(2)
    assert hosts.processes(2) == []
    assert started.wait(10) == -signal.SIGKILL
    assert other.poll() is None


def test_closed_hosts_leave_no_namespaces(hosts: Hosts) -> None:
    hosts.start(0, python("input()"), stdin=subprocess.PIPE)
    hosts.close()
    for name in hosts.names:
        assert not Path(f"/run/netns/{name}").exists()
        assert not Path(f"/etc/netns/{name}").exists()
