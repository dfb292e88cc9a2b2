"""Peak memory of a training step on one worker, against eager torch's.

Two measures. *Living*: bytes that torch's CPU allocator has handed out and not yet taken back,
summed from the profiler's allocation events from the model's first tensor on, so parameters,
optimizer state, gradients and activations all count, and nothing else does. For it a worker's plans
run inline, in the client's process. *Resident*: by how much the largest resident memory (VmHWM) of
a real worker, and of a process with eager torch, exceeds what it was before the model was made.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contestant import (
    EAGER,
    LAZYGT,
    LAZYGT_COMPILED,
    QUICK,
    WORKLOADS,
    Contestant,
    Workload,
    can_compile,
    session,
)
from benchmarks.harness import Report, parser

#: name in the table, workload
CASES = (
    ("MLP 784-2048-2048-10, batch 256, SGD with momentum", "wide MLP, SGD"),
    ("the same, AdamW", "wide MLP, AdamW"),
    ("GPT d=256, batch 8, AdamW", "W4"),
)
WARM_UP, MEASURED = 3, "measured step"
AIM = 1.05


def living_peak(kind: str, workload: Workload) -> int:
    """Bytes of CPU tensors alive at the peak of a steady step; lazygt's plans run inline."""
    lazy = kind == LAZYGT
    opened = session(kind, launcher="inline") if lazy else nullcontext()
    with opened, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = workload.make("lazygt" if lazy else "cpu")
        for _ in range(WARM_UP):
            step().tolist()
        with record_function(MEASURED):
            step().tolist()
    return peak_of(seen)


def peak_of(seen: profile) -> int:
    """The largest running sum of the memory events within the measured step."""
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    marks = [event for event in events if event.name() == MEASURED]
    begin, end = marks[0].start_ns(), marks[0].end_ns()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    alive = peak = 0
    for when, change in sorted(changes, key=lambda pair: pair[0]):
        if when > end:
            break
        if when >= begin:
            peak = max(peak, alive, alive + change)
        alive += change
    return peak


def living(kind: str, workload: Workload) -> float:
    """MB alive at the peak, in a new process: there nothing is freed that was not seen made."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        return apart.submit(living_peak, kind, workload).result() / 1e6


def resident(kind: str, workload: str, args: argparse.Namespace) -> float:
    """MB by which a process of its own grew for training."""
    with Contestant(kind, workload, args) as contestant:
        for request in ("forget", "make", "settle"):
            contestant.ask(request)
        return contestant.ask("peak")


def measure(args: argparse.Namespace) -> Report:
    kinds = [EAGER, LAZYGT, *([LAZYGT_COMPILED] if can_compile() else [])]
    columns = ["training step", "living MB: eager", "lazygt", "ratio"]
    columns += [f"resident MB: {kind}" for kind in kinds]
    report = Report("peak_memory", "Peak memory of a training step", columns)
    worst = 0.0
    for name, workload in (case for case in CASES if args.only in case[1]):
        made = (QUICK if args.quick else WORKLOADS)[workload]
        eager, ours = living(EAGER, made), living(LAZYGT, made)
        share = ours / eager
        worst = max(worst, share)
        grown = [f"{resident(kind, workload, args):.1f}" for kind in kinds]
        report.add(name, f"{eager:.1f}", f"{ours:.1f}", f"{share:.3f}x", *grown)
    met = "met" if worst <= AIM else "MISSED"
    report.remarks.append(f"aim: living bytes at most {AIM}x eager's; {worst:.3f}x here: {met}")
    report.remarks.append(
        "a worker keeps freed memory for its next step, so its resident memory is not living memory"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    options.add_argument("--only", default="", help="only the models whose name contains this")
    args = options.parse_args()
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
