"""Programs that torchrun has started on two hosts, unchanged: one session, and the bits of one
host; and what happens to it when the network goes, or a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.hosts import Hosts, hosts_or_skip

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("program.py")
TOKEN = "of-a-test-and-long-enough-to-be-secret"
QUIET = {"LAZYGT_COMPILE": "off", "OMP_NUM_THREADS": "1"}


class Running:
    """A program under torchrun on hosts, with so many processes on each."""

    def __init__(
        self,
        hosts: Hosts,
        processes: int,
        *arguments: object,
        token: str = TOKEN,
        other: str = "",
        program: Path = PROGRAM,
        given: Mapping[str, str] | None = None,
        strange: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """``given`` are variables of all hosts; ``strange`` of the second one, whose command has
        ``before`` in front."""
        self.hosts = hosts
        self.processes: list[subprocess.Popen[Any]] = []
        for host in range(len(hosts.names)):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts.names)),
                "--nproc-per-node", str(processes), "--node-rank", str(host),
                "--master-addr", hosts.addresses[0], "--master-port", "29500",
                str(program), *map(str, arguments),
            ]  # fmt: skip
            environment = {
                **os.environ,
                **QUIET,
                "LAZYGT_TOKEN": (other or token) if host else token,
            }
            environment |= given or {}
            if host == 1:
                command = [*before, *command]
                environment |= strange or {}
            if not token:
                del environment["LAZYGT_TOKEN"]
            self.processes.append(
                hosts.start(
                    host,
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        self.lines: list[str] = []

    def until(self, begin: str) -> str:
        """The first line from now on that begins so, of the client."""
        stream = self.processes[0].stdout
        assert stream is not None
        for line in stream:
            self.lines.append(line)
            if line.startswith(begin):
                return line
        raise AssertionError("".join(self.lines[-60:]))

    def ended(self) -> list[str]:
        """What all have written by their end; nothing is left on any host."""
        outputs = [process.communicate(timeout=200)[0] for process in self.processes]
        for host in range(len(self.hosts.names)):
            until = time.monotonic() + 60
            while left := self.hosts.processes(host):
                assert time.monotonic() < until, (left, outputs)
                time.sleep(0.05)
        return outputs

    def told(self) -> dict[str, Any]:
        """What the program has to say at its end."""
        told: dict[str, Any] = json.loads(self.until("{"))
        return told


def alone(steps: int, megabytes: int, workers: int) -> dict[str, Any]:
    """What the program says on one host."""
    environment = {**os.environ, **QUIET, "LAZYGT_WORKERS": str(workers)}
    command = [sys.executable, str(PROGRAM), str(steps), str(megabytes)]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    told: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return told


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as made:
        yield made


def same(told: dict[str, Any], expected: dict[str, Any]) -> bool:
    keys = ("workers", "bits", "loss", "sum")
    return [told[key] for key in keys] == [expected[key] for key in keys]


def test_torchrun_on_two_hosts_is_one_session_and_the_client_uploads_once_a_host(
    hosts: Hosts,
) -> None:
    """64 MiB to four workers, two of which are on the other host, cross the link once."""
    before = hosts.sent(0)
    run = Running(hosts, 2, 5, 64)
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
    run = Running(hosts, 1, 300, 1)
    run.until("step 100")
    hosts.cut(1)
    with pytest.raises(subprocess.TimeoutExpired):
        run.processes[0].wait(5)
    hosts.mend(1)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    assert told["recoveries"] == []


def test_a_lost_host_is_recovery_on_the_other(hosts: Hosts) -> None:
    run = Running(hosts, 1, 300, 1)
    run.until("step 100")
    for pid in hosts.processes(1):
        os.kill(pid, 9)
    told = run.told()
    assert same(told, alone(300, 1, 2))
    (record,) = told["recoveries"]
    assert "is lost" in record


def test_another_token_is_refused(hosts: Hosts) -> None:
    run = Running(hosts, 1, 5, 1, other="another-token-that-is-as-long-as-it-has-to-be")
    output, _ = run.processes[1].communicate(timeout=100)
    assert "another token" in output
    assert run.processes[1].returncode != 0


def test_without_a_token_nothing_listens(hosts: Hosts) -> None:
    run = Running(hosts, 1, 5, 1, token="")
    output, _ = run.processes[0].communicate(timeout=100)
    assert "LAZYGT_TOKEN is not set" in output
    assert "lazygt keys token" in output


def test_a_host_may_be_added_by_hand(hosts: Hosts) -> None:
    """`lazygt worker` takes the place of the program there."""
    environment = {**os.environ, **QUIET, "LAZYGT_TOKEN": TOKEN}
    engine = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0]}
    output = subprocess.PIPE
    client = hosts.start(
        0, [sys.executable, str(PROGRAM), "5", "1"], env=environment | engine, stdout=output,
        text=True,
    )  # fmt: skip
    where = f"tcp://{hosts.addresses[0]}:29400"
    command = [sys.executable, "-m", "lazygt.cli", "worker", "--connect", where]
    agent = hosts.start(1, command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    said, _ = client.communicate(timeout=200)
    assert same(json.loads(said.splitlines()[-1]), alone(5, 1, 2))
    assert agent.wait(60) == 0
