"""A pool that many clients want at once: does each get its share, and is a dead one's soon free?

Sixteen clients, each a process with a key of its own and runs of another length, all they can, on a
pool in which two workers run at once; then a client that holds a GiB is killed.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT, Report, parser
from lazygt.net.keys import Keyring
from lazygt.pool.pool_client import Pool

COLUMNS = ["what", "lowest", "median", "highest", "all", "aim"]
CLIENT = """
import sys, torch, lazygt
on, key, size, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with lazygt.session(pool=lazygt.PoolAccess(on, key=key),
                    workers=lazygt.Workers(1, threads=1, start_timeout=600)) as s:
    x = torch.randn(size, size) / size
    s.synchronize()
    print(*s.worker_pids, flush=True)
    sys.stdin.readline()
    while True:
        y = x
        for _ in range(count):
            y = torch.mm(y, x)
        y.sum().item()
"""
HOLDER = """
import sys, torch, lazygt
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]), workers=1) as s:
    kept = torch.ones(1 << 28)
    s.synchronize()
    print(*s.worker_pids, flush=True)
    while True:
        kept.add_(1.0).sum().item()
"""
#: Seconds until all clients have workers.
_START_SECONDS = 600.0


class Served:
    """A pool in a process of its own."""

    def __init__(self, folder: Path, workers: int, at_once: int) -> None:
        self._folder, self._ring = folder, Keyring(folder / "keys")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lazygt.cli", "serve", "--keys", str(folder / "keys"),
             "--bind", "tcp://127.0.0.1:0", "--workers", str(workers), "--at-once", str(at_once)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.on = next(word for word in line.replace(";", "").split() if word.startswith("tcp://"))
        self._pool = Pool(self.on, self._ring.own(), _START_SECONDS)

    def client(self, name: str, program: str, *arguments: object) -> "subprocess.Popen[str]":
        """Start a program with the pool's address and a key of its own."""
        key = self.key(name)
        return subprocess.Popen(
            [sys.executable, "-c", program, self.on, str(key), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def key(self, name: str) -> Path:
        """A new key file of a client."""
        key = self._folder / f"{name}.key"
        self._ring.new(name).write(key)
        return key

    def run_seconds(self) -> dict[str, float]:
        """Of each client so far."""
        return {row["client"]: row["run_seconds"] for row in self.status()["sessions"]}

    def status(self) -> dict[str, Any]:
        return self._pool.status()

    def close(self) -> None:
        self._pool.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


@contextmanager
def served(workers: int, at_once: int) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        pool = Served(Path(folder), workers, at_once)
        try:
            yield pool
        finally:
            pool.close()


def pids_of(client: "subprocess.Popen[str]") -> list[int]:
    """What a client says when it has its workers."""
    assert client.stdout is not None
    return [int(word) for word in client.stdout.readline().split()]


def end(client: "subprocess.Popen[str]") -> None:
    client.kill()
    client.wait()


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 where all are equal, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def shares(report: Report, args: argparse.Namespace) -> None:
    """Run-seconds of each client in so many seconds."""
    with served(args.clients, 2) as pool, ExitStack() as ends:
        clients = []
        for number in range(args.clients):
            # from about 1 ms to about a second of one core
            count = max(round(2.0 * 1.6**number), 1)
            client = pool.client(f"client{number:02}", CLIENT, 192, count)
            ends.callback(end, client)
            clients.append(client)
        for client in clients:
            pids_of(client)
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
        time.sleep(args.warm)
        before, begin = pool.run_seconds(), time.monotonic()
        time.sleep(args.seconds)
        after, took = pool.run_seconds(), time.monotonic() - begin
    used = sorted(after[name] - before[name] for name in before)
    row = f"run-seconds of {len(used)} clients in {took:.0f} s"
    report.add(
        row, f"{used[0]:.2f}", f"{used[len(used) // 2]:.2f}", f"{used[-1]:.2f}",
        f"{sum(used):.1f}", "",
    )  # fmt: skip
    report.add("their Jain index", "", "", "", f"{jain(used):.4f}", ">= 0.95")


def death(report: Report, args: argparse.Namespace) -> None:
    """From a client's SIGKILL until its workers are gone."""
    took = []
    with served(1, 1) as pool:
        for number in range(args.rounds):
            client = pool.client(f"holder{number}", HOLDER)
            workers = [psutil.Process(pid) for pid in pids_of(client)]
            end(client)
            begin = time.monotonic()
            psutil.wait_procs(workers, 60.0)
            took.append(time.monotonic() - begin)
    took.sort()
    report.add(
        "a client with 1 GiB killed, until it is free, s", f"{took[0]:.2f}",
        f"{took[len(took) // 2]:.2f}", f"{took[-1]:.2f}", "", "<= 2",
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--warm", type=float, default=5.0, help="seconds before the first look")
    args = options.parse_args()
    report = Report("pool", "One pool, many clients", COLUMNS)
    shares(report, args)
    death(report, args)
    report.remarks.append(
        "clients, gateway and workers share the machine's cores; two workers run at once; runs of "
        "about 1 ms to 1 s; run-seconds as the gateway counts them"
    )
    report.finish(save=args.save)


if __name__ == "__main__":
    main()
