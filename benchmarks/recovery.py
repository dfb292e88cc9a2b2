"""What recovery costs while nobody dies, and how long a death takes.

Undisturbed steps with and without recovery, in turn; then workers are killed: while the client
waits, with a spare process and without one, and where all runs since the session opened are done
again; then memory over many steps.
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil
import torch

import lazygt
from benchmarks.harness import Measured, Report, interleave, parser, ratio
from benchmarks.models import SMALL_GPT, Step, gpt_step, mlp_step

COLUMNS = ["what", "without", "with", "x", "aim"]
MODELS: dict[str, tuple[Callable[[str], Step], int]] = {
    "MLP 784-512-512-10, Adam": (lambda device: mlp_step(device, "adam"), 1_500),
    "MLP 4x1024, Adam": (lambda device: mlp_step(device, "adam", width=1024, hidden=4), 200),
    "GPT d=256, batch 8": (lambda device: gpt_step(device, SMALL_GPT), 25),
}
WARM_STEPS = 5
#: As the share of time for snapshots: none comes after the first.
_SELDOM = 1e-9


class Steps:
    """Steps of one model in sessions of one kind, a new session a round.

    Attributes:
        snapshots, snapshot_bytes, seconds: of all rounds together.
    """

    def __init__(self, make: Callable[[str], Step], steps: int, recover: str) -> None:
        self._make, self._steps, self._recover = make, steps, recover
        self.snapshots, self.snapshot_bytes, self.seconds = 0, 0, 0.0

    def __call__(self) -> float:
        """Milliseconds a step, the last one's loss read."""
        with lazygt.session(
            workers=lazygt.Workers(threads=1), recovery=self._recover, compile="off"
        ) as session:
            step = self._make("lazygt")
            for _ in range(WARM_STEPS):
                step().item()
            step().item()
            before, begin = session.stats(), time.perf_counter()
            for _ in range(self._steps):
                loss = step()
            loss.item()
            took = time.perf_counter() - begin
            self.seconds += took
            after = session.stats()
            self.snapshots += after["snapshots"] - before["snapshots"]
            self.snapshot_bytes += after["snapshot_bytes"] - before["snapshot_bytes"]
        return took * 1e3 / self._steps


def undisturbed(report: Report, args: argparse.Namespace) -> None:
    """A step in a session with recovery beside one without."""
    for name, (make, steps) in MODELS.items():
        runs = {who: Steps(make, args.steps or steps, who) for who in ("off", "auto")}
        took = interleave(runs, args.rounds)
        times = [f"{took[who].median:.2f} ms" for who in ("off", "auto")]
        factor = ratio(took["auto"], took["off"])
        report.add(f"a step of {name}", *times, f"{factor:.3f}x", "<= 1.02")
        kept = runs["auto"]
        copied = kept.snapshot_bytes / 2**20 / max(kept.snapshots, 1)
        report.remarks.append(
            f"{name}: {kept.snapshots} snapshots of {copied:.1f} MiB in {kept.seconds:.1f} s"
        )


def deaths(report: Report, args: argparse.Namespace) -> None:
    """From a SIGKILL to the answer, which needs what the worker held, less the runs done again."""
    took: dict[int, Measured] = {}
    for spares in (0, 1):
        with lazygt.session(
            workers=lazygt.Workers(threads=1), recovery=lazygt.Recovery(spares=spares)
        ) as session:
            step = mlp_step("lazygt", "adam")
            step().item()
            took[spares] = Measured(
                tuple(death(session, step, args.idle) for _ in range(args.rounds))
            )
            runs = [each.runs for each in session.recoveries]
    without, spare = (f"{took[spares].median:.2f} s" for spares in (0, 1))
    what = "killed, until the next answer, less the runs done again: no spare, a spare"
    report.add(what, without, spare, "", "<= 3, 0.5")
    report.remarks.append(f"runs done again a death: {min(runs)} to {max(runs)}")


def death(session: lazygt.Session, step: Step, idle: float) -> float:
    """Seconds that a death costs, but for the runs that are done again.

    Args:
        idle: seconds before it, in which a spare process loads torch.
    """
    idle_until = time.monotonic() + idle
    while time.monotonic() < idle_until:
        step().item()
    loss = step()
    session.synchronize()
    os.kill(session.worker_pids[0], signal.SIGKILL)
    begin = time.perf_counter()
    loss.item()
    return time.perf_counter() - begin - session.recoveries[-1].replay_seconds


def seen(report: Report, args: argparse.Namespace) -> None:
    """From a SIGKILL until the client, which waits for an answer, begins to recover."""
    told = []
    for _ in range(args.rounds):
        with lazygt.session(
            workers=lazygt.Workers(threads=1), recovery=lazygt.Recovery(snapshot_cost=_SELDOM)
        ) as session:
            x = torch.randn(1_000, 1_000)
            torch.mm(x, x).sum().item()
            killed: list[float] = []
            killer = threading.Timer(0.2, _kill, (session.worker_pids[0], killed))
            killer.start()
            for _ in range(100):
                x = torch.mm(x, x).tanh()
            x.sum().item()
            killer.join()
            told.append((session.recoveries[0].at - killed[0]) * 1e3)
    low, median, high = min(told), Measured(tuple(told)).median, max(told)
    report.add("killed, until seen", "", f"{median:.1f} ms", "", "< 100 ms")
    report.remarks.append(f"a death is seen after {low:.1f} to {high:.1f} ms")


def _kill(pid: int, at: list[float]) -> None:
    at.append(time.time())
    os.kill(pid, signal.SIGKILL)


def replay(report: Report, args: argparse.Namespace) -> None:
    """A run that is done again beside the same run as the program had it done."""
    for name, (make, steps) in MODELS.items():
        pairs = [again(make, args.steps or steps) for _ in range(args.rounds)]
        recorded, repeated = (Measured(tuple(took)) for took in zip(*pairs, strict=True))
        times = [f"{took.median:.2f} ms" for took in (recorded, repeated)]
        factor = ratio(repeated, recorded)
        report.add(f"a run of {name}, and again", *times, f"{factor:.2f}x", "<= 1.0")


def again(make: Callable[[str], Step], steps: int) -> tuple[float, float]:
    """Milliseconds a run takes, and a run when all that the session did is done again."""
    with lazygt.session(
        workers=lazygt.Workers(threads=1),
        recovery=lazygt.Recovery(snapshot_cost=_SELDOM),
        compile="off",
    ) as session:
        step = make("lazygt")
        for _ in range(WARM_STEPS):
            step().item()
        before, begin = _runs(session), time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()
        recorded = (time.perf_counter() - begin) / (_runs(session) - before)
        os.kill(session.worker_pids[0], signal.SIGKILL)
        (loss + 1).item()
        (recovery,) = session.recoveries
    return recorded * 1e3, recovery.replay_seconds / recovery.runs * 1e3


def _runs(session: lazygt.Session) -> int:
    return sum(session.stats()["flushes"].values())


def memory(report: Report, args: argparse.Namespace) -> None:
    """Resident memory of client and worker after some steps, and after many more."""
    with lazygt.session(workers=lazygt.Workers(threads=1)) as session:
        step = mlp_step("lazygt", "adam")
        told = []
        for steps in (args.memory_steps // 4, args.memory_steps):
            for _ in range(steps):
                step()
            session.synchronize()
            told.append([psutil.Process(pid).memory_info().rss / 2**20
                         for pid in (os.getpid(), *session.worker_pids)])  # fmt: skip
    few, many = args.memory_steps // 4, args.memory_steps
    for who, early, late in zip(("client", "worker"), *told, strict=True):
        report.add(
            f"resident memory of the {who} after {few}, {many} more steps",
            f"{early:.0f} MiB", f"{late:.0f} MiB", f"{late / early:.2f}x", "flat",
        )  # fmt: skip


def measure(args: argparse.Namespace) -> Report:
    report = Report("recovery", "Recovery: without, with", COLUMNS)
    undisturbed(report, args)
    seen(report, args)
    deaths(report, args)
    replay(report, args)
    memory(report, args)
    return report


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--steps", type=int, default=0, help="steps a round; 0: by the model")
    options.add_argument("--idle", type=float, default=4.0, help="seconds between deaths (4)")
    options.add_argument("--memory-steps", type=int, default=2_000, help="(2000)")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
