"""Time to record one op, by each recorder, against the time of the same op in eager torch.

A trace of ops on four floats is recorded again and again (so that its plan is known). Only the
recording is timed, by the thread's own CPU clock: the flush and the worker's run come after the
clock has stopped. A process has one recorder, so each has a process, with eager torch beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lazygt
from benchmarks.harness import ROOT, Measured, Report, interleave, parser, pin, ratio
from lazygt import native

Operation = Callable[[Tensor, Tensor, int], Tensor]
Rounds = dict[str, dict[str, Measured]]

# name, the op, whether its input needs a gradient, the aim of the native recorder
CASES: tuple[tuple[str, Operation, bool, str], ...] = (
    ("a + b", lambda x, y, _: x + y, False, "1.0x"),
    ("a + Python number", lambda x, _, i: x + 0.5 * i, False, "1.0x"),
    ("a + b with grad", lambda x, y, _: x + y, True, "1.0x"),
    ("a * b, in place", lambda x, y, _: x.mul_(y), False, "1.0x"),
    ("view", lambda x, _, __: x.view(2, 2), False, "1.1x"),
    ("detach", lambda x, _, __: x.detach(), False, ""),
    ("sum", lambda x, _, __: x.sum(), False, ""),
    ("zeros", lambda x, _, __: torch.zeros(4, device=x.device), False, ""),
    ("uniform random numbers", lambda x, _, __: torch.rand(4, device=x.device), False, ""),
)
WHOLE = "chain of x * a + b, run and fetched"


def record(
    operation: Operation, device: str, needs_grad: bool, ops: int, settle: Callable[[], object]
) -> Callable[[], float]:
    """A case: us an op over one trace of `ops` ops whose results die at once."""
    x = torch.ones(4, device=device, requires_grad=needs_grad)
    y = torch.ones(4, device=device)

    def trace() -> float:
        settle()
        start = time.thread_time()
        for index in range(ops):
            operation(x, y, index)
        took = time.thread_time() - start
        settle()
        return took / ops * 1e6

    return trace


def chain(device: str, ops: int) -> Callable[[], float]:
    """us an op of a chain `x = x * a + b` with one fetch at its end, everything counted."""
    x, a, b = (torch.full((4,), value, device=device) for value in (1.0, 0.5, 0.25))

    def trace() -> float:
        start, result = time.perf_counter(), x
        for _ in range(ops // 2):
            result = result * a + b
        result.tolist()
        return (time.perf_counter() - start) / ops * 1e6

    return trace


# -- with the recorder of this process -----------------------------------------------------------


def rounds_here(args: argparse.Namespace) -> Rounds:
    """The rounds of every case, lazygt's and eager torch's in turn."""
    found = {}
    with lazygt.session(workers=lazygt.Workers(1, threads=1)) as s:
        s.synchronize()
        if args.pin:
            pin(s.worker_pids)
        for name, operation, grad, _ in CASES:
            ours = record(operation, "lazygt", grad, args.ops, s.synchronize)
            found[name] = _in_turn(ours, record(operation, "cpu", grad, args.ops, _nothing), args)
        found[WHOLE] = _in_turn(chain("lazygt", args.ops), chain("cpu", args.ops), args)
    return found


def _in_turn(
    ours: Callable[[], float], eager: Callable[[], float], args: argparse.Namespace
) -> dict[str, Measured]:
    cases = {"ours": ours, "eager": eager}
    interleave(cases, rounds=3)
    return interleave(cases, args.rounds)


def _nothing() -> None:
    """Eager torch has nothing to settle."""


# -- a process for each --------------------------------------------------------------------------


def rounds_of(recorder: str, args: argparse.Namespace) -> Rounds:
    """The same, in a process that has that recorder."""
    command = [sys.executable, "-m", "benchmarks.record_cost", "--here"]
    command += ["--rounds", str(args.rounds), "--ops", str(args.ops), *(["--pin"] * args.pin)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"LAZYGT_RECORDER": recorder},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return {
        name: {side: Measured(tuple(rounds)) for side, rounds in sides.items()}
        for name, sides in told.items()
    }


def measure(args: argparse.Namespace) -> Report:
    recorders = ["native", "python"] if native.load().module is not None else ["python"]
    found = {recorder: rounds_of(recorder, args) for recorder in recorders}
    columns = ["op", "eager us", *(f"{r} {what}" for r in recorders for what in ("us", "ratio"))]
    report = Report(
        "record_cost", "Time to record one op (median of rounds)", [*columns, "aim of native"]
    )
    aims = {name: aim for name, _, _, aim in CASES}
    for name in [*aims, WHOLE]:
        cells = [f"{found[recorders[0]][name]['eager'].median:.2f}"]
        for recorder in recorders:
            mine, peer = found[recorder][name]["ours"], found[recorder][name]["eager"]
            cells += [f"{mine.median:.2f}", f"{ratio(mine, peer):.2f}x"]
        report.add(name, *cells, aims.get(name, ""))
    report.remarks.append(f"{args.ops} ops a trace, {args.rounds} rounds, results die at once")
    report.remarks.append("CPU time of the client's thread; wall time of the chain that is run")
    return report


def main() -> None:
    options = parser(__doc__, rounds=21)
    options.add_argument("--ops", type=int, default=1_000, help="ops in a trace")
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    torch.set_num_threads(1)
    if args.here:
        sides = rounds_here(args)
        print(json.dumps({n: {k: m.rounds for k, m in s.items()} for n, s in sides.items()}))
        return
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
