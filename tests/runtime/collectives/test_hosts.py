"""Groups over several hosts: on the loopback interface, and in namespaces with a wire between."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from lazygt.runtime.collectives.rendezvous_store import StoreServer
from tests.clusters.hosts import Hosts, hosts_or_skip

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("rank_that_goes_on.py")
SMALL, LARGE = 100, 5_000_000  # elements: what sockets carry at once, and what goes piece by piece
SERVE = """
import sys
from lazygt.runtime.collectives.rendezvous_store import StoreServer
server = StoreServer(sys.argv[1], bytes.fromhex(sys.argv[2]))
print(server.endpoint, flush=True)
sys.stdin.read()
"""


class Ranks:
    """Processes of a group, each on one of two hosts.

    Args:
        mesh: of the group.
        hosts: where the ranks are to be; None: on the loopback interface, with two addresses.
    """

    def __init__(self, mesh: str, place: Path, hosts: Hosts | None) -> None:
        self._mesh, self._place, self._hosts = mesh, place, hosts
        self._token = secrets.token_bytes(32)
        self._stack = ExitStack()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._endpoint = self._serve()

    def _serve(self) -> str:
        if self._hosts is None:
            return self._stack.enter_context(
                closing(StoreServer("127.0.0.1", self._token))
            ).endpoint
        address = self._hosts.addresses[0]
        server = self._started(0, ["-c", SERVE, address, self._token.hex()])
        return line_of(server)

    def _started(self, host: int, command: Sequence[str]) -> subprocess.Popen[str]:
        options: dict[str, Any] = {
            "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True,
            "stdin": subprocess.PIPE, "stdout": subprocess.PIPE,
        }  # fmt: skip
        whole = [sys.executable, *command]
        if self._hosts is not None:
            return self._hosts.start(host, whole, **options)
        process = subprocess.Popen(whole, **options)
        self._stack.callback(end, process)
        return process

    def start(self, rank: int, host: int, number: int = 0) -> None:
        """Start a rank on a host, in the group of that number; does not wait for it."""
        directory = self._place / f"host{host}"
        directory.mkdir(exist_ok=True)
        address = f"127.0.0.{host + 1}" if self._hosts is None else self._hosts.addresses[host]
        self.processes[rank] = self._started(
            host,
            [str(SCRIPT), str(rank), self._mesh, str(directory), str(number), self._endpoint,
             f"host{host}", address, self._token.hex()],
        )  # fmt: skip

    def tell(self, line: str, ranks: Sequence[int]) -> None:
        """Tell some ranks what to do; does not wait for them."""
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(line + "\n")
            stdin.flush()

    def heard(self, ranks: Sequence[int]) -> list[str]:
        """What each says next."""
        return [line_of(self.processes[rank]) for rank in ranks]

    def close(self) -> None:
        self._stack.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts | None]:
    if request.param == "loopback":
        yield None
    else:
        with hosts_or_skip(2) as there:
            yield there


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        ("loopback", "01"),
        ("loopback", "0011"),
        ("loopback", "0001"),
        pytest.param("namespaces", "0011", marks=pytest.mark.clusters),
    ],
    indirect=["hosts"],
)
def test_a_rank_that_dies_is_missed_by_all_and_may_come_back_elsewhere(
    layout: str, hosts: Hosts | None, tmp_path: Path
) -> None:
    """In the middle of a large collective and of a small one; then it is on the other host."""
    world = range(len(layout))
    last, *others = reversed(world)
    with closing(Ranks(f"x={len(layout)}", tmp_path, hosts)) as ranks:
        for rank in world:
            ranks.start(rank, int(layout[rank]))
        assert ranks.heard(world) == [f"joined {rank}" for rank in world]
        sums = f"{sum(range(1, len(layout) + 1))} {10 * len(layout)}"
        for number, count in enumerate((LARGE, SMALL)):
            for there in (SMALL, LARGE):
                ranks.tell(f"add {there}", world)
                assert set(ranks.heard(world)) == {sums}
            ranks.tell(f"add {count}", others)
            ranks.processes[last].kill()
            for said in ranks.heard(others):
                assert said.startswith("lost rank")
                assert said.endswith("has left: the connection to it is closed")
            ranks.tell(f"renew {number + 1}", others)
            ranks.start(last, number % 2, number + 1)
            assert ranks.heard(world) == [f"joined {rank}" for rank in world]


@pytest.fixture
def far() -> Iterator[Hosts]:
    with hosts_or_skip(2) as there:
        yield there


@pytest.mark.slow
@pytest.mark.clusters
def test_a_network_that_fails_for_five_seconds_loses_nothing(far: Hosts, tmp_path: Path) -> None:
    with closing(Ranks("x=2", tmp_path, far)) as ranks:
        for rank in range(2):
            ranks.start(rank, rank)
        ranks.heard(range(2))
        for count in (SMALL, LARGE):
            far.cut(1)
            ranks.tell(f"add {count}", range(2))
            threading.Event().wait(5)
            far.mend(1)
            assert ranks.heard(range(2)) == ["3 20", "3 20"]


@pytest.mark.slow
@pytest.mark.clusters
def test_a_host_without_power_is_missed(far: Hosts, tmp_path: Path) -> None:
    """Nothing says that its ranks have gone but that nothing comes from there."""
    with closing(Ranks("x=2", tmp_path, far)) as ranks:
        for rank in range(2):
            ranks.start(rank, rank)
        ranks.heard(range(2))
        ranks.tell(f"add {LARGE}", [0])
        far.kill(1)
        assert ranks.heard([0]) == ["lost rank 1 has left: the connection to it is closed"]


@pytest.mark.clusters
def test_traffic_between_hosts_is_that_of_ring(far: Hosts, tmp_path: Path) -> None:
    """Of an all-reduce by two ranks as much as its payload, with what encryption and TCP add."""
    with closing(Ranks("x=2", tmp_path, far)) as ranks:
        for rank in range(2):
            ranks.start(rank, rank)
        ranks.heard(range(2))
        before = [far.sent(host) for host in range(2)]
        ranks.tell(f"add {LARGE}", range(2))
        ranks.heard(range(2))
        for host in range(2):
            assert LARGE * 4 <= far.sent(host) - before[host] <= LARGE * 4 * 1.05


@pytest.mark.parametrize("layout", ["0000", "0011", "0001"])
def test_ranks_listen_for_those_of_other_hosts_alone(layout: str, tmp_path: Path) -> None:
    """At one address, with a seat for each connection to a rank of another host that comes."""
    world = range(len(layout))
    with closing(Ranks("x=4", tmp_path, None)) as ranks:
        for rank in world:
            ranks.start(rank, int(layout[rank]))
        ranks.heard(world)
        ranks.tell(f"add {SMALL}", world)
        ranks.heard(world)
        for rank in world:
            there = psutil.Process(ranks.processes[rank].pid).net_connections("inet")
            listens = [each.laddr.ip for each in there if each.status == psutil.CONN_LISTEN]
            seats = sum(layout[other] != layout[rank] for other in world if other > rank)
            assert listens == [f"127.0.0.{int(layout[rank]) + 1}"] * 3 * seats
