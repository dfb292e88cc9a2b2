"""Programs that run on the hosts of a test, and what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clusters.hosts import Hosts

PROGRAM = Path(__file__).with_name("program.py")
TOKEN = "of-a-test-and-long-enough-to-be-secret"
QUIET = {"LAZYGT_COMPILE": "off", "OMP_NUM_THREADS": "1"}


class Running:
    """Processes on hosts, the first of them with the client.

    Attributes:
        lines: what the client has written so far, as far as it has been read.
    """

    def __init__(self, hosts: Hosts, processes: Sequence[subprocess.Popen[Any]]) -> None:
        self.hosts, self.processes = hosts, list(processes)
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

    def told(self) -> dict[str, Any]:
        """What the program has to say at its end."""
        told: dict[str, Any] = json.loads(self.until("{"))
        return told

    def ended(self) -> list[str]:
        """What all have written by their end; nothing is left on any host."""
        outputs = [process.communicate(timeout=200)[0] for process in self.processes]
        self.nothing_left({})
        return outputs

    def nothing_left(self, besides: Mapping[int, set[int]]) -> None:
        """Wait until nothing runs on any host but these processes."""
        for host in range(len(self.hosts.names)):
            until = time.monotonic() + 60
            while left := {*self.hosts.processes(host)} - besides.get(host, set()):
                assert time.monotonic() < until, left
                time.sleep(0.05)


def start(
    hosts: Hosts, host: int, command: Sequence[str], given: Mapping[str, str]
) -> subprocess.Popen[Any]:
    """A command on a host, with a token, in a process group of its own.

    Args:
        given: variables; an empty one is not set at all.
    """
    environment = {**os.environ, **QUIET, "LAZYGT_TOKEN": TOKEN, **given}
    return hosts.start(
        host,
        command,
        env={name: value for name, value in environment.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(
    hosts: Hosts,
    processes: int,
    *arguments: object,
    program: Path = PROGRAM,
    given: Mapping[str, str] | None = None,
    strange: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Running:
    """A program under torchrun on all hosts, with so many processes on each.

    Args:
        given: variables of all hosts.
        strange, before: variables of the second one, and what its command has in front.
    """

    def on(host: int) -> subprocess.Popen[Any]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts.names)),
            "--nproc-per-node", str(processes), "--node-rank", str(host),
            "--master-addr", hosts.addresses[0], "--master-port", "29500",
            str(program), *map(str, arguments),
        ]  # fmt: skip
        if host != 1:
            return start(hosts, host, command, given or {})
        return start(hosts, host, [*before, *command], {**(given or {}), **(strange or {})})

    return Running(hosts, [on(host) for host in range(len(hosts.names))])


def worker(hosts: Hosts) -> list[str]:
    """The command with which a host joins a program that was started by hand on the first one."""
    where = f"tcp://{hosts.addresses[0]}:29400"
    return [sys.executable, "-m", "lazygt.cli", "worker", "--connect", where]


def alone(
    steps: int, megabytes: int, workers: int, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the program says on one host.

    Args:
        given: variables.
    """
    environment = {**os.environ, **QUIET, "LAZYGT_WORKERS": str(workers), **(given or {})}
    command = [sys.executable, str(PROGRAM), str(steps), str(megabytes)]
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    told: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return told


def same(told: dict[str, Any], expected: dict[str, Any]) -> bool:
    keys = ("workers", "bits", "loss", "sum")
    return [told[key] for key in keys] == [expected[key] for key in keys]
