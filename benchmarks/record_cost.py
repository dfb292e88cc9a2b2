"""Time to record one op, against the time of the same op in eager torch.

A trace of ops on four floats is recorded again and again (so that its plan is known). Only the
recording is timed: the flush and the worker's run come after the clock has stopped.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lazygt
from benchmarks.harness import Report, interleave, parser, pin, ratio

Operation = Callable[[Tensor, Tensor, int], Tensor]

# name, the op, whether its input needs a gradient, the aim in us and in multiples of eager
CASES: tuple[tuple[str, Operation, bool, str], ...] = (
    ("a + b", lambda x, y, _: x + y, False, "6 us, 5x"),
    ("a + Python number", lambda x, _, i: x + 0.5 * i, False, ""),
    ("a + b with grad", lambda x, y, _: x + y, True, "8 us, 6.5x"),
    ("a * b, in place", lambda x, y, _: x.mul_(y), False, ""),
    ("view", lambda x, _, __: x.view(2, 2), False, ""),
)


def record(
    operation: Operation, device: str, needs_grad: bool, ops: int, settle: Callable[[], object]
) -> Callable[[], float]:
    """A case: us an op over one trace of `ops` ops whose results die at once."""
    x = torch.ones(4, device=device, requires_grad=needs_grad)
    y = torch.ones(4, device=device)

    def trace() -> float:
        settle()
        start = time.perf_counter()
        for index in range(ops):
            operation(x, y, index)
        took = time.perf_counter() - start
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


def measure(args: argparse.Namespace) -> Report:
    columns = ["op", "lazygt us", "eager us", "ratio", "aim"]
    report = Report("record_cost", "Time to record one op (median of rounds)", columns)
    with lazygt.session(workers=1, threads=1) as s:
        s.synchronize()
        if args.pin:
            pin(s.worker_pids)
        pairs = [
            (
                name,
                aim,
                record(operation, "lazygt", grad, args.ops, s.synchronize),
                record(operation, "cpu", grad, args.ops, lambda: None),
            )
            for name, operation, grad, aim in CASES
        ]
        whole = "chain of x * a + b, run and fetched"
        pairs.append((whole, "", chain("lazygt", args.ops), chain("cpu", args.ops)))
        for name, aim, ours, eager in pairs:
            interleave({"warm-up": ours, "eager": eager}, rounds=3)
            found = interleave({"ours": ours, "eager": eager}, args.rounds)
            mine, peer = found["ours"], found["eager"]
            times = f"{ratio(mine, peer):.1f}x"
            report.add(name, f"{mine.median:.2f}", f"{peer.median:.2f}", times, aim)
    report.remarks.append(f"{args.ops} ops a trace, {args.rounds} rounds, results die at once")
    return report


def main() -> None:
    options = parser(__doc__, rounds=21)
    options.add_argument("--ops", type=int, default=1_000, help="ops in a trace")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
