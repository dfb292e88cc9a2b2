"""What a step costs a worker: its plans run as native programs and as generated Python.

The plans are those of a steady step, recorded in an inline session; they run again and again on the
values of that step, of which they write in place what the step writes. Eager torch runs the step
itself. Time is processor time of the one thread that runs everything, so that other processes on
the machine disturb it less.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import lazygt
from benchmarks.contestant import QUICK, WORKLOADS
from benchmarks.harness import Measured, Report, interleave, parser, ratio
from benchmarks.models import Step
from lazygt.runtime.executors.eager import EagerExecutor, Outcome, code_of
from lazygt.runtime.executors.native import KnownRuns
from lazygt.runtime.plan import Plan
from lazygt.runtime.store import Value

CASES = ("W1", "W3 SGD", "W3 Adam", "W4-tiny", "W4")
WARM_UP = 3

#: A plan with the values and numbers of one run of it.
Run = tuple[Plan, list[Value], tuple[Any, ...]]


@contextmanager
def noting() -> Iterator[list[Run]]:
    """The plans that inline workers run meanwhile."""
    runs: list[Run] = []
    run = EagerExecutor.run

    def noted(executor: EagerExecutor, inputs: list[Value], params: tuple[Any, ...]) -> Outcome:
        runs.append((executor.plan, list(inputs), params))
        return run(executor, inputs, params)

    with mock.patch.object(EagerExecutor, "run", noted):
        yield runs


def in_python(known: KnownRuns, digest: bytes, lists: object, plan: Plan, code: object) -> None:
    """Leave a known plan to Python, where its runs can be noted."""


def runs_of(make: Callable[[str], Step]) -> list[Run]:
    """What a steady step has a worker run."""
    with (
        mock.patch.object(KnownRuns, "keep", in_python),
        lazygt.session(launcher="inline", compile="off") as s,
    ):
        step = make("lazygt")
        for _ in range(WARM_UP):
            s.synchronize()
            with noting() as runs:
                result = step()  # noqa: F841 - a result that is dead is not computed
                s.flush()
        return runs


def replay(runs: list[Run], executor: str) -> Callable[[], object]:
    """The same runs by executors of one kind, checked and warm."""
    device, code = torch.device("cpu"), code_of(executor)
    executors = [EagerExecutor(plan, device, code=code) for plan, _, _ in runs]

    def step() -> None:
        for each, (_, inputs, params) in zip(executors, runs, strict=True):
            failures = each.run(list(inputs), params).failures
            if failures:
                raise RuntimeError(f"a step failed: {failures[0]}")

    return step


def burst(step: Callable[[], object], steps: int) -> float:
    """Seconds a step."""
    start = time.thread_time()
    for _ in range(steps):
        step()
    return (time.thread_time() - start) / steps


def measure_case(name: str, args: argparse.Namespace) -> tuple[int, dict[str, Measured]]:
    """The nodes of a step, and its seconds by who runs it."""
    workload = (QUICK if args.quick else WORKLOADS)[name]
    runs = runs_of(workload.make)
    kinds = {kind: replay(runs, kind) for kind in ("native", "python")}
    cases = {"eager": workload.make("cpu"), **kinds}
    for step in cases.values():
        burst(step, WARM_UP)
    steps = max(workload.steps // 4, 1)
    bursts = {who: lambda step=step: burst(step, steps) for who, step in cases.items()}
    nodes = sum(len(plan.steps.graph.nodes) for plan, _, _ in runs)
    return nodes, interleave(bursts, args.rounds)


def measure(args: argparse.Namespace) -> Report:
    columns = ["workload", "nodes", "eager ms", "generated ms", "native ms"]
    columns += ["generated / eager", "native / eager", "native us a node"]
    report = Report("worker_step", "A step's plans on a worker, against eager torch", columns)
    for name in (case for case in CASES if args.only in case):
        nodes, found = measure_case(name, args)
        eager, generated, native = found["eager"], found["python"], found["native"]
        milliseconds = [f"{each.median * 1e3:.3f}" for each in (eager, generated, native)]
        ratios = [f"{ratio(each, eager):.2f}x" for each in (generated, native)]
        report.add(name, str(nodes), *milliseconds, *ratios, f"{native.median * 1e6 / nodes:.2f}")
    report.remarks.append("processor time; eager's holds its own Python, which a client has else")
    report.remarks.append("aim: native at most 0.71x of eager on W4-tiny, 0.83x on W3")
    return report


def main() -> None:
    options = parser(__doc__, rounds=15)
    options.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options.add_argument("--only", default="", help="only the workloads whose name contains this")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
