"""Memory, descriptors and shared memory after many sessions, processes, threads and shapes: flat.

Sessions one after another, processes side by side, threads that record into one session, and one
program in as many shapes as it has steps. Each case runs a part of its rounds first, is read, runs
all of them, and is read again. The shapes are read first when the caches that are bounded by a
number of shapes have been filled twice: what the second filling pushes out leaves the last holes
between tensors. They are read again after as many new ones as are asked for, in the same session.
"""

import argparse
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import lazygt
from benchmarks.harness import ROOT, Report, parser, resident_mb

COLUMNS = ["case", "client MB", "worker MB", "descriptors", "shared memory files", "processes"]
#: Growth of memory that counts as flat, in MB; of what is counted, none does.
ALLOWED = 16.0
#: Steps of each training.
STEPS = 20
#: Shapes of that program that fill the caches twice: 2 x 65,536 metas and a few more.
CACHED = 140_000


class Reading(NamedTuple):
    """Resources that a case holds."""

    client: float
    worker: float
    descriptors: int
    shared: int
    processes: int


def read(workers: list[int]) -> Reading:
    """Read the resources of this process and of its workers."""
    me = psutil.Process()
    return Reading(
        resident_mb(me.pid), max(map(resident_mb, workers), default=0.0), me.num_fds(),
        shared_files(), len(me.children(recursive=True)),
    )  # fmt: skip


def shared_files() -> int:
    """Count the anonymous files of shared memory (memfd) that this process holds open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this listing
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    return count


def training(steps: int = STEPS) -> None:
    """Train a small network, each loss read."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to("lazygt")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def sessions(count: int) -> Reading:
    """Open, use and close sessions one after another."""
    for _ in range(count):
        with lazygt.session(workers=lazygt.Workers(1, threads=1), compile="off"):
            training()
    return read([])


def processes(count: int) -> Reading:
    """Run programs side by side, each with a session of its own."""
    command = [sys.executable, "-m", "benchmarks.soak", "--program"]
    started = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
    if failed := [each.returncode for each in started if each.wait()]:
        raise SystemExit(f"{len(failed)} of {count} programs failed: {failed}")
    return read([])


def threads(count: int) -> Callable[[int], Reading]:
    """Return a case of so many threads that record into one session at once."""

    def case(rounds: int) -> Reading:
        with lazygt.session(workers=lazygt.Workers(1, threads=1), compile="off") as session:
            for _ in range(rounds):
                started = [threading.Thread(target=chain, args=(n,)) for n in range(count)]
                for thread in started:
                    thread.start()
                for thread in started:
                    thread.join()
            session.synchronize()
            return read(session.worker_pids)

    return case


def chain(seed: int) -> None:
    """Compute without draws, whose order is up to the threads."""
    x = torch.full((64, 64), 1.0 + seed, device="lazygt")
    for step in range(STEPS):
        x = (x * 0.5 + step).tanh()
        x.sum().item()


def shapes(session: lazygt.Session) -> Callable[[int], Reading]:
    """Return a case of one program in as many shapes, all new to the session: the digits of a
    number, so that no tensor has more than 8**6 elements.
    """
    numbers = itertools.count()

    def case(count: int) -> Reading:
        for number in itertools.islice(numbers, count):
            x = torch.ones([1 + number // 8**place % 8 for place in range(6)])
            (x * 2 + number).sum().item()
        session.synchronize()
        return read(session.worker_pids)

    return case


def add(
    report: Report, name: str, case: Callable[[int], Reading], few: int, many: int, allowed: float
) -> None:
    """Run a case with few rounds, then with many; its row, and a remark where it grew."""
    before, after = case(few), case(many)
    pairs = zip(before, after, strict=True)
    cells = [f"{a:.0f} -> {b:.0f}" for a, b in pairs]
    report.add(f"{name}: {few:,}, then {many:,}", *cells)
    grown = [
        field for field, a, b in zip(Reading._fields, before, after, strict=True)
        if b - a > (allowed if field in ("client", "worker") else 0)
    ]  # fmt: skip
    if grown:
        report.remarks.append(f"NOT FLAT: {name}: {', '.join(grown)}")


def measure(args: argparse.Namespace) -> Report:
    report = Report("soak", "What is held after few rounds and after many", COLUMNS)
    add_case = partial(add, report, allowed=args.allowed)
    add_case("sessions", sessions, max(args.sessions // 5, 2), args.sessions)
    add_case("processes at once", processes, 2, args.processes)
    case = threads(args.threads)
    add_case(f"rounds of {args.threads} threads", case, args.rounds, 5 * args.rounds)
    with lazygt.session(workers=lazygt.Workers(1, threads=1), compile="off") as session:
        add_case("shapes", shapes(session), args.fill, args.shapes)
    return report


def main() -> None:
    options = parser(__doc__, rounds=4)
    options.add_argument("--sessions", type=int, default=50)
    options.add_argument("--processes", type=int, default=16)
    options.add_argument("--threads", type=int, default=8)
    options.add_argument("--shapes", type=int, default=100_000)
    options.add_argument("--fill", type=int, default=CACHED, help="shapes before the first reading")
    options.add_argument("--allowed", type=float, default=ALLOWED, help="growth in MB that is flat")
    options.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    torch.set_num_threads(1)
    if args.program:
        sessions(1)
        return
    report = measure(args)
    report.finish(save=args.save)
    if any(remark.startswith("NOT FLAT") for remark in report.remarks):
        sys.exit(1)


if __name__ == "__main__":
    main()
