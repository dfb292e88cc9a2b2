"""What status pages cost a training step, and `lazygt top` itself.

An MLP with Adam on one worker, in a session that is watched and is not, in turn; the viewer's own
time is apart. What the threads that write pages use is counted by the kernel, to the nanosecond,
and what a worker's main thread notes of a message is timed by itself. Then the same in a pool: a
viewer asks that, and it asks the client; what the pool uses more while it is watched counts.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import lazygt
from benchmarks.harness import Measured, Report, interleave, parser, ratio
from benchmarks.pool import served
from lazygt.runtime.launch.activity import Activity

_WIDTH, _BATCH = 256, 64
_LEASE_SECONDS = 4.0  # somebody who has gone counts as watching for less
_VIEWER = """
import sys, time
from lazygt.observe.top.sources import PoolSource
source = PoolSource(sys.argv[1], sys.argv[2])
source.settled(10.0)
print("sees", flush=True)
while True:
    source.snapshot()
    time.sleep(0.25)
"""
_COMMAND = "import sys; sys.argv[0] = 'lazygt'; from lazygt.cli.__main__ import main; main()"


def step_of_training() -> Callable[[], object]:
    """One step; the loss is read, so the client waits for its worker."""
    layers = [nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(_BATCH, _WIDTH)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def used(pid: int, but: int) -> float:
    """Seconds that a process's threads have had a core, but for one of them."""
    threads = (int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(of_thread(thread, pid) for thread in threads if thread != but)


def of_thread(thread: int, pid: int | str = "self") -> float:
    """Seconds that a thread of a process has had a core; none where it has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def measured(rounds: int, seconds: float) -> dict[str, Measured]:
    """Milliseconds a step, and the shares of a core that pages took, in percent."""
    with lazygt.session(
        workers=lazygt.Workers(threads=1), compile="off", recovery="off"
    ) as session:
        step, (worker,) = step_of_training(), session.worker_pids
        pages, writer = session._link.status, session._status
        assert pages is not None
        assert writer is not None
        assert writer.native_id is not None
        thread, shares = writer.native_id, dict[str, list[float]]()

        def watched(case: str, lease: float) -> float:
            pages.watch(lease)
            client, others, begin = of_thread(thread), used(worker, worker), time.perf_counter()
            steps = 0
            while time.perf_counter() < begin + seconds:
                step()
                steps += 1
            took = time.perf_counter() - begin
            for who, was, now in (("client", client, of_thread(thread)),
                                  ("worker", others, used(worker, worker))):  # fmt: skip
                shares.setdefault(f"{case}, {who}", []).append(100 * (now - was) / took)
            return 1e3 * took / steps

        watched("warm", -1.0)
        steps = interleave({
            "unwatched": lambda: watched("unwatched", -1.0),
            "watched": lambda: watched("watched", 3_600.0),
        }, rounds)  # fmt: skip
        paint = Measured(tuple(first_paint(session._link.name) for _ in range(rounds)))
    return {**steps, "paint": paint, **{who: Measured(tuple(all_)) for who, all_ in shares.items()}}


def in_a_pool(rounds: int, seconds: float) -> dict[str, Measured]:
    """Milliseconds a step of a session whose worker is a pool's; the share of a core in percent
    that the client's thread takes; and microseconds a step of the pool's own process."""
    shares = dict[str, list[float]]()
    with served(1, 1) as pool:
        key = pool.key("watched")
        with lazygt.session(
            pool=lazygt.PoolAccess(pool.on, key=key),
            workers=lazygt.Workers(threads=1),
            compile="off",
        ) as session:
            step, writer = step_of_training(), session._status
            assert writer is not None
            assert writer.native_id is not None
            thread = writer.native_id

            def took(case: str) -> float:
                client, serving = of_thread(thread), used(pool.process.pid, -1)
                begin, steps = time.perf_counter(), 0
                while time.perf_counter() < begin + seconds:
                    step()
                    steps += 1
                passed = time.perf_counter() - begin
                client, serving = of_thread(thread) - client, used(pool.process.pid, -1) - serving
                shares.setdefault(f"{case}, client", []).append(100 * client / passed)
                shares.setdefault(f"{case}, pool", []).append(1e6 * serving / steps)
                return 1e3 * passed / steps

            def watched() -> float:
                words = [sys.executable, "-c", _VIEWER, pool.on, str(key)]
                with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as viewer:
                    assert viewer.stdout is not None
                    viewer.stdout.readline()
                    try:
                        return took("watched")
                    finally:
                        viewer.kill()

            def unwatched() -> float:
                until = time.perf_counter() + _LEASE_SECONDS
                while time.perf_counter() < until:
                    step()
                return took("unwatched")

            took("warm")
            steps = interleave({"unwatched": unwatched, "watched": watched}, rounds)
    return {**steps, **{who: Measured(tuple(all_)) for who, all_ in shares.items()}}


def first_paint(name: str) -> float:
    """Milliseconds from the start of the command's process to a session drawn in a terminal."""
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    command = [sys.executable, "-c", _COMMAND, "top", name]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as viewer:
        drawn = b""
        while b"living" not in drawn:  # in the header of the ranks' table, which comes last
            drawn += os.read(ours, 65_536)
        took = time.perf_counter() - begin
        viewer.terminate()
    os.close(ours)
    os.close(theirs)
    return took * 1e3


def noted(times: int = 100_000) -> float:
    """Microseconds that a worker's main thread takes to note that a message came and is done."""
    activity, frames = Activity(), [b"run"]
    begin = time.perf_counter()
    for _ in range(times):
        activity.begin(frames)
        activity.end(frames)
    return (time.perf_counter() - begin) / times * 1e6


def measure(args: argparse.Namespace) -> Report:
    figures = measured(args.rounds, args.seconds)
    columns = ["what", "median", "least", "most", "aim"]
    report = Report("top", "Status pages: what they cost a step, and `lazygt top`", columns)

    def add(what: str, of: Measured, aim: str = "", unit: str = "") -> None:
        report.add(what, *(f"{value:.3g}{unit}" for value in (of.median, of.low, of.high)), aim)

    add("a step unwatched, ms", figures["unwatched"])
    add("a step watched at 4 Hz, ms", figures["watched"])
    for case, aim in (("unwatched", "<= 0.3 %"), ("watched", "<= 1 %")):
        for who in ("client", "worker"):
            add(f"of a core, {case}, by the {who}'s thread", figures[f"{case}, {who}"], aim, " %")
    note = Measured(tuple(noted() for _ in range(args.rounds)))
    add("noted of a message by the worker's main thread, us", note)
    add("`lazygt top` to its first picture, ms", figures["paint"], "< 300")
    pool = in_a_pool(args.rounds, args.seconds)
    add("a step in a pool unwatched, ms", pool["unwatched"])
    add("a step in a pool watched at 4 Hz, ms", pool["watched"])
    for case, aim in (("unwatched", "<= 0.3 %"), ("watched", "<= 1 %")):
        add(f"of a core, in a pool, {case}, by the client's thread", pool[f"{case}, client"], aim,
            " %")  # fmt: skip
        add(f"a step {case}, of the pool's own process, us", pool[f"{case}, pool"])
    steps = ratio(figures["watched"], figures["unwatched"])
    report.remarks.append(f"watched / unwatched, median of neighbouring rounds: {steps:.4f}")
    steps = ratio(pool["watched"], pool["unwatched"])
    report.remarks.append(f"the same in a pool: {steps:.4f}")
    report.remarks.append("shares are of the time that passes: a bound of what a step can lose")
    return report


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of a round of one case")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
