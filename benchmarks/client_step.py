"""What a step costs the client: its processor time for recording and shipping, by phase.

Nothing is read, and the worker's time does not count: it has a process of its own. Eager torch's
step, which computes what it runs, stands beside it. Backward is flushed apart from its pass, so
that both are seen. The client has the recorder of this process (`LAZYGT_RECORDER`).
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import lazygt
from benchmarks.contestant import QUICK, WORKLOADS, Workload
from benchmarks.harness import Measured, Report, interleave, parser, ratio
from lazygt import native

CASES = ("W1", "W3 SGD", "W3 Adam", "W4-tiny")
PHASES = ("forward", "backward", "optimizer", "flush")
WARM_UP = 5


class Phased:
    """A step whose functions are timed; ms of processor time by phase."""

    def __init__(self, workload: Workload, device: str, flush: Callable[[], object]) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._names = iter(PHASES[::2])
        self._step, self._flush = workload.make(device, wrap=self._timed), flush

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = next(self._names)

        def timed(*args: Any) -> Any:
            start = time.process_time()
            result = function(*args)
            self.spent[name] += time.process_time() - start
            return result

        return timed

    def run(self) -> float:
        """The whole step; ms."""
        before = sum(self.spent.values())
        start = time.process_time()
        result = self._step()  # noqa: F841 - what is dead is not computed
        recorded = time.process_time()
        self._flush()
        end = time.process_time()
        wrapped = sum(self.spent.values()) - before
        self.spent["backward"] += recorded - start - wrapped
        self.spent["flush"] += end - recorded
        return (end - start) * 1e3


def measure_case(name: str, args: argparse.Namespace, s: lazygt.Session) -> list[list[str]]:
    """A row for lazygt's client and one for eager torch."""
    workload = (QUICK if args.quick else WORKLOADS)[name]
    ours = Phased(workload, "lazygt", lambda: s.flush())
    eager = Phased(workload, "cpu", lambda: None)

    def settled() -> float:
        s.synchronize()
        return ours.run()

    cases = {"ours": settled, "eager": eager.run}
    interleave(cases, WARM_UP)
    ours.spent.clear()
    eager.spent.clear()
    found = interleave(cases, args.rounds)
    times = f"{ratio(found['ours'], found['eager']):.2f}x"
    return [
        [name, "lazygt", *_cells(ours, found["ours"], args), times],
        ["", "eager", *_cells(eager, found["eager"], args), ""],
    ]


def _cells(step: Phased, whole: Measured, args: argparse.Namespace) -> list[str]:
    by_phase = [f"{step.spent[phase] / args.rounds * 1e3:.3f}" for phase in PHASES]
    return [f"{whole.median:.3f}", *by_phase]


def measure(args: argparse.Namespace) -> Report:
    columns = ["workload", "who", "step ms", *PHASES, "lazygt / eager"]
    report = Report("client_step", "Processor time of a step's client, by phase", columns)
    with lazygt.session(
        workers=lazygt.Workers(1, threads=1),
        compile="off",
        tracing=lazygt.Tracing(flush_on_backward=False),
    ) as s:
        for name in (case for case in CASES if args.only in case):
            for row in measure_case(name, args, s):
                report.add(*row)
    report.remarks.append(f"the recorder is the {native.choice().recorder} one")
    report.remarks.append("phases are means, the step is a median; zero_grad counts to backward")
    return report


def main() -> None:
    options = parser(__doc__, rounds=41)
    options.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options.add_argument("--only", default="", help="only the workloads whose name contains this")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
