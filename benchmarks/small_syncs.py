"""Reading one number of a known plan, and one that is there already, against eager torch.

With a worker process on another core and on the client's own, and without one. Programs that read
a number in every step (line searches, metrics, generation) pay this each time.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

import lazygt
from benchmarks.harness import CORES, Measured, Report, interleave, parser, pin_process, ratio
from lazygt.settings import grouped

#: (row, settings of its session, the core of its worker)
SESSIONS: tuple[tuple[str, Mapping[str, Any], int | None], ...] = (
    ("a worker on another core", {"workers": 1}, CORES[-1]),
    ("a worker on the client's core", {"workers": 1}, CORES[0]),
    ("inline", {"launcher": "inline"}, None),
)


def least(act: Callable[[], object], times: int) -> float:
    """The shortest of several times, in microseconds: what others do meanwhile is not counted."""
    shortest = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        act()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest * 1e6


def cases(there: torch.Tensor, times: int) -> dict[str, Callable[[], float]]:
    """A number that has to be computed, and one that only has to be sent."""
    number = there.sum()
    return {
        "known plan": lambda: least(lambda: there.sum().item(), times),
        "held": lambda: least(number.item, times),
    }


def in_session(settings: Mapping[str, Any], core: int | None, rounds: int) -> dict[str, Measured]:
    """Both, and eager's beside them, in one session."""
    eager = cases(torch.ones(4, device="cpu"), 200)
    with ExitStack() as stack:
        session = stack.enter_context(lazygt.session(**grouped({"threads": 1, **settings})))
        lazy = cases(torch.ones(4), 200)
        for case in lazy.values():
            case()
        if core is not None:
            pin_process(os.getpid(), CORES[0])
            stack.callback(os.sched_setaffinity, 0, CORES)
            for pid in session.worker_pids:
                pin_process(pid, core)
        named = {f"eager, {name}": case for name, case in eager.items()}
        return interleave(lazy | named, rounds)


def measure(args: argparse.Namespace) -> Report:
    columns = ["session", "known plan us", "x eager", "held us", "x eager"]
    report = Report("small_syncs", "`.item()`: the least of 200, median of rounds", columns)
    for row, settings, core in SESSIONS:
        took = in_session(settings, core, args.rounds)
        cells = []
        for name in ("known plan", "held"):
            cells += [
                f"{took[name].median:.0f}",
                f"{ratio(took[name], took[f'eager, {name}']):.0f}x",
            ]
        report.add(row, *cells)
    report.remarks.append("known plan: x.sum().item() of 4 floats; held: the sum is there already")
    return report


def main() -> None:
    args = parser(__doc__, rounds=7).parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
