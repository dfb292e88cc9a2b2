"""What the client's thread pays for a training step: recording it, and the flush that ships it.

Every step is flushed by hand, so that the flush stands alone, and the worker has done it before
the next one begins. Processor time of the client's thread, against eager torch's for the step.
"""

import argparse
import time
from collections.abc import Callable

import torch

import lazygt
from benchmarks.harness import Measured, Report, parser, pin, ratio
from benchmarks.models import TINY_GPT, Step, gpt_step, mlp_step
from lazygt import native

CASES: tuple[tuple[str, Callable[[str], Step]], ...] = (
    ("W4-tiny", lambda device: gpt_step(device, TINY_GPT)),
    ("MLP, Adam", lambda device: mlp_step(device, "adam")),
)


def taken(act: Callable[[], object]) -> float:
    """Microseconds of this thread's processor time."""
    start = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - start) / 1e3


def rounds(make: Callable[[str], Step], count: int) -> tuple[dict[str, Measured], int]:
    """Flush, whole step and eager's step in turn; and how many values the flush hands out."""
    figures: dict[str, list[float]] = {"flush": [], "step": [], "eager": []}
    with lazygt.session(
        workers=lazygt.Workers(1, threads=1),
        tracing=lazygt.Tracing(flush_on_backward=False),
        compile="off",
    ) as session:
        ours, eager = make("lazygt"), make("cpu")
        pin(session.worker_pids)
        for number in range(count + 5):
            found = {"eager": taken(eager)}
            recorded = taken(ours)
            found["flush"] = taken(session.flush)
            found["step"] = recorded + found["flush"]
            session.synchronize()
            for name, figure in found.items() if number >= 5 else ():
                figures[name].append(figure)
        plan = session.last_plan
        assert plan is not None
        outputs = len(plan.outline.outputs)
    return {name: Measured(tuple(values)) for name, values in figures.items()}, outputs


def measure(args: argparse.Namespace) -> Report:
    columns = ["step", "values", "flush us", "at best", "client us", "eager us", "client / eager"]
    recorder = native.choice().recorder
    report = Report("flush_cost", f"The client's thread, recorder in {recorder}", columns)
    for name, make in CASES:
        found, outputs = rounds(make, args.rounds)
        flush, step, eager = found["flush"], found["step"], found["eager"]
        cells = f"{flush.median:.0f}", f"{flush.low:.0f}", f"{step.median:.0f}"
        report.add(name, str(outputs), *cells, f"{eager.median:.0f}", f"{ratio(step, eager):.2f}x")
    report.remarks.append("values: what handles show after the flush; medians, in turn with eager")
    return report


def main() -> None:
    args = parser(__doc__, rounds=100).parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
