"""Sessions on another host: what a step takes there, and what a lost link or host costs.

Hosts are network namespaces (``tests.clusters.hosts``), between which a Python process holds each
packet, so that a round trip takes 0.2 ms: this kernel may have no netem. It takes part of a core.
Needs root. W3 is the MLP 784-512-512-10 of `workloads`, 40 steps and then the loss, or the loss of
each step; the worker is on this host, or one of a pool's on the other host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Report, interleave, parser, ratio
from lazygt.net.keys import Keyring
from lazygt.settings import grouped
from tests.clusters.hosts import Hosts

LOCAL, THERE = "local", "another host"
STEPS = 40
TOKEN = "of-a-benchmark-and-long-enough-to-be-secret"
PROGRAM = ROOT / "tests" / "clusters" / "program.py"
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class Client:
    """A process on the first host with a session, which does steps when it is told to."""

    def __init__(self, hosts: Hosts, on: str, key: str) -> None:
        command = [sys.executable, "-m", "benchmarks.clusters", "--client", f"{on} {key}"]
        self._process = hosts.start(
            0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **QUIET},
        )  # fmt: skip
        self._ask("warm")

    def each(self) -> float:
        """Seconds of a step whose loss is fetched."""
        return self._ask("each")

    def last(self) -> float:
        """Seconds of a step of those of which the last loss is fetched."""
        return self._ask("last")

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


def serve_client(on: str, key: str) -> None:
    """What a `Client`'s process does."""
    # why: the benchmark itself needs no session
    import lazygt
    from benchmarks.models import mlp_step

    settings = {"pool": on, "key": key} if on else {}
    with lazygt.session(**grouped({"workers": 1, "threads": 1, **settings})) as session:
        step = mlp_step("lazygt")
        for line in sys.stdin:
            if line == "warm\n":
                for _ in range(3 * STEPS):
                    step().item()
                session.compiled()
            begin = time.perf_counter()
            for _ in range(STEPS):
                loss = step()
                if line == "each\n":
                    loss.item()
            loss.item()
            print((time.perf_counter() - begin) / STEPS, flush=True)


def steps(hosts: Hosts, rounds: int, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ring = Keyring(folder / "keys")
        served = hosts.start(
            1,
            [sys.executable, "-m", "lazygt.cli", "serve", "--keys", str(folder / "keys"),
             "--bind", f"tcp://{hosts.addresses[1]}:0", "--workers", "1", "--device", "cpu"],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET},
        )  # fmt: skip
        assert served.stdout is not None
        match = re.search(r"tcp://[\d.]+:\d+", served.stdout.readline())
        assert match is not None
        ring.new("client", match[0]).write(folder / "client.key")
        here, there = Client(hosts, "", ""), Client(hosts, match[0], str(folder / "client.key"))
        for what, way in (("W3, the last loss of 40", "last"), ("W3, each loss", "each")):
            measured = interleave({LOCAL: getattr(here, way), THERE: getattr(there, way)}, rounds)
            local, far = measured[LOCAL], measured[THERE]
            trip = _round_trip(hosts) if way == "each" else _round_trip(hosts) / STEPS
            bound = 1.1 * local.median + trip
            report.add(
                what, f"{1e3 * local.median:.2f} ms", f"{1e3 * far.median:.2f} ms",
                f"{ratio(far, local):.2f}x", f"<= {1e3 * bound:.2f} ms",
            )  # fmt: skip
        here.close()
        there.close()


def _round_trip(hosts: Hosts) -> float:
    """Seconds, by ping."""
    said = hosts.run(0, ["ping", "-c", "50", "-i", "0.01", "-q", hosts.addresses[1]]).stdout
    match = re.search(r"= [\d.]+/([\d.]+)/", said)
    assert match is not None, said
    return float(match[1]) / 1e3


def _torchrun(hosts: Hosts, arguments: Sequence[object]) -> subprocess.Popen[str]:
    """The program of tests on all hosts, a process on each; that of the client."""
    started = [
        hosts.start(
            host,
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(len(hosts.names)),
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(host),
                "--master-addr",
                hosts.addresses[0],
                "--master-port",
                "29500",
                str(PROGRAM),
                *map(str, arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **QUIET, "LAZYGT_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
        )
        for host in range(len(hosts.names))
    ]
    return started[0]


def _until(process: subprocess.Popen[str], begin: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin):
            return line
    raise SystemExit(f"the program ended before it said {begin!r}")


def replicated(report: Report) -> None:
    """64 MiB on four hosts; how many times that each has sent."""
    with Hosts(4) as hosts:
        client = _torchrun(hosts, (5, 64))
        _until(client, "{")
        sent = [hosts.sent(host) / (64 << 20) for host in range(4)]
    report.add(
        "64 MiB to a worker on each of 4 hosts: what the client's host sends", "", "",
        f"{sent[0]:.3f}x", "<= 1.1x",
    )  # fmt: skip
    others = ", ".join(f"{times:.3f}x" for times in sent[1:])
    report.remarks.append(f"The other three hosts sent {others}: each passes it on to the next.")


def lost(rounds: int, report: Report) -> None:
    """All processes of the other host are killed; how long until the next step is done."""
    seconds, records = [], []
    for _ in range(rounds):
        with Hosts(2) as hosts:
            client = _torchrun(hosts, (600, 1))
            _until(client, "step 300")
            for pid in hosts.processes(1):
                os.kill(pid, 9)
            begin = time.perf_counter()
            pause, last = 0.0, begin
            for line in iter(client.stdout.readline, ""):  # type: ignore[union-attr]
                pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
                if line.startswith("{"):
                    told: dict[str, Any] = json.loads(line)
                    break
            seconds.append(pause)
            records += told["recoveries"]
    report.add(
        "a host's processes are killed: the longest pause of the program", "", "",
        f"{statistics.median(seconds):.2f} s", "",
    )  # fmt: skip
    report.remarks.append(f"What the last session said of it: {records[-1]}.")


def down(rounds: int, report: Report) -> None:
    """The link is down for five seconds; how long the program pauses."""
    seconds = []
    for _ in range(rounds):
        with Hosts(2) as hosts:
            client = _torchrun(hosts, (600, 1))
            _until(client, "step 300")
            hosts.cut(1)
            begin = time.perf_counter()
            while time.perf_counter() < begin + 5:
                time.sleep(0.01)  # the outage itself
            hosts.mend(1)
            pause, last = 0.0, begin
            for line in iter(client.stdout.readline, ""):  # type: ignore[union-attr]
                pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
                if line.startswith("{"):
                    assert json.loads(line)["recoveries"] == []
                    break
            seconds.append(pause)
    report.add(
        "the link is down for 5 s: the longest pause of the program", "", "",
        f"{statistics.median(seconds):.2f} s", "",
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--client", help=argparse.SUPPRESS)
    options.add_argument("--losses", type=int, default=3, help="rounds of lost links and hosts")
    given = options.parse_args()
    if given.client is not None:
        on, _, key = given.client.partition(" ")
        serve_client(on, key)
        return
    columns = ["what", LOCAL, THERE, "ratio or seconds", "aim"]
    report = Report("clusters", "Sessions on two hosts", columns)
    with Hosts(2) as hosts:
        report.remarks.append(
            f"Hosts are network namespaces; a round trip between them took "
            f"{1e3 * _round_trip(hosts):.2f} ms."
        )
        steps(hosts, given.rounds, report)
    replicated(report)
    lost(given.losses, report)
    down(given.losses, report)
    report.finish(save=given.save)


if __name__ == "__main__":
    main()
