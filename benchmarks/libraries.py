"""Steps of other libraries' programs in a session with one worker, against eager torch.

The programs are those of docs/frameworks.md and `make test-programs`: small models of single
libraries, so what is measured is mostly the cost of recording and of reading each loss. A round is
30 steps, the loss read in every one; eager and the session take turns, with one thread each.
"""

import argparse
import importlib.util
import random
import time

import torch

import lazygt
from benchmarks.harness import Measured, Report, interleave, parser, ratio
from lazygt.settings import grouped
from tests.conformance.programs.catalogue import TRAININGS
from tests.conformance.programs.training import STEPS, Training

#: Seconds to wait for compiled plans before a program is timed.
COMPILING = 60.0


def begin(name: str, device: str) -> Training:
    torch.manual_seed(0)
    random.seed(0)
    make, _ = TRAININGS[name]
    return make(device)


def burst(training: Training) -> float:
    """Milliseconds a step, of which each reads its loss."""
    start = time.perf_counter()
    for _ in range(STEPS):
        training.step().item()
    return (time.perf_counter() - start) / STEPS * 1e3


def measure_program(name: str, compiling: str, rounds: int) -> dict[str, Measured]:
    """Time a program on both, after 30 steps on both that don't count."""
    settings = {"compile": compiling, "default_device": False}
    with lazygt.session(**grouped({"workers": 1, "threads": 1, **settings})) as session:
        eager, ours = begin(name, "cpu"), begin(name, "lazygt")
        burst(eager)
        burst(ours)
        session.compiled(COMPILING)
        return interleave({"eager": lambda: burst(eager), "ours": lambda: burst(ours)}, rounds)


def measure(args: argparse.Namespace) -> Report:
    columns = ["library", "eager ms a step", "lazygt ms a step", "lazygt / eager"]
    report = Report("libraries", "Programs of other libraries: medians of rounds", columns)
    for name in args.only or TRAININGS:
        if importlib.util.find_spec(TRAININGS[name][1]) is None:
            report.remarks.append(f"{name} is not installed")
            continue
        took = measure_program(name, args.compile, args.rounds)
        eager, ours = took["eager"], took["ours"]
        report.add(name, f"{eager.median:.2f}", f"{ours.median:.2f}", f"{ratio(ours, eager):.1f}x")
    return report


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--only", nargs="*", choices=list(TRAININGS), help="these libraries")
    made.add_argument(
        "--compile", choices=["auto", "off"], default="off", help="compiled plans (off)"
    )
    args = made.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
