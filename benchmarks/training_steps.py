"""Training steps a second on one worker, against eager torch in the same run.

The client and the worker get one thread each (and, with `--pin`, a core each); eager runs on the
client's. A round is a burst of steps that ends with reading the loss.
"""

import argparse
import time
from collections.abc import Callable

import torch

import lazygt
from benchmarks.harness import Measured, Report, interleave, parser, pin, ratio
from benchmarks.models import SMALL_GPT, TINY_GPT, Step, gpt_step, mlp_step

# name, how to make the step on a device, steps in a burst
CASES: tuple[tuple[str, Callable[[str], Step], int], ...] = (
    ("MLP 784-512-512-10, SGD", lambda device: mlp_step(device), 40),
    ("MLP 784-512-512-10, Adam", lambda device: mlp_step(device, "adam"), 40),
    ("GPT d=32, batch 1 (overhead only)", lambda device: gpt_step(device, TINY_GPT), 20),
    ("GPT d=256, batch 8", lambda device: gpt_step(device, SMALL_GPT), 3),
)


def burst(step: Step, steps: int) -> float:
    """Seconds a step."""
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    loss.item()
    return (time.perf_counter() - start) / steps


def first_step(make: Callable[[str], Step], device: str) -> tuple[Step, float]:
    """The step, and the seconds from making the model to the first loss."""
    start = time.perf_counter()
    step = make(device)
    step().item()
    return step, time.perf_counter() - start


def measure_case(
    make: Callable[[str], Step], steps: int, args: argparse.Namespace
) -> tuple[dict[str, Measured], float, float]:
    with lazygt.session(
        workers=lazygt.Workers(1, threads=1),
        launcher=args.launcher,
        tracing=lazygt.Tracing(flush_on_backward=not args.whole_step),
    ) as s:
        s.synchronize()
        torch.ones(1, device="lazygt").item()  # the worker has loaded torch: steps only, below
        if args.pin:
            pin(s.worker_pids)
        eager, eager_first = first_step(make, "cpu")
        ours, ours_first = first_step(make, "lazygt")
        for _ in range(2):
            burst(ours, 3)
            burst(eager, 3)
        cases = {"ours": lambda: burst(ours, steps), "eager": lambda: burst(eager, steps)}
        return interleave(cases, args.rounds), ours_first, eager_first


def measure(args: argparse.Namespace) -> Report:
    columns = ["model", "lazygt ms", "eager ms", "speed", "first step s", "eager first s"]
    title = "A training step, one worker with one thread (speed: eager's time over lazygt's)"
    report = Report("training_steps", title, columns)
    for name, make, steps in CASES:
        if args.only and args.only not in name:
            continue
        found, ours_first, eager_first = measure_case(make, steps, args)
        report.add(
            name,
            f"{found['ours'].median * 1e3:.2f}",
            f"{found['eager'].median * 1e3:.2f}",
            f"{1 / ratio(found['ours'], found['eager']):.2f}x",
            f"{ours_first:.2f}",
            f"{eager_first:.2f}",
        )
    report.remarks.append("aim: at least 0.9x of eager's speed, with no compiler in the worker")
    return report


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--launcher", choices=["process", "inline"], default="process")
    options.add_argument("--whole-step", action="store_true", help="flush_on_backward=False")
    options.add_argument("--only", help="only the models whose name contains this")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
