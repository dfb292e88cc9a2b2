"""LBFGS with a strong Wolfe line search, against eager torch: a program that reads several numbers
in every step, and decides by them what it does next.

With a worker process on another core and on the client's own, and without one.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import lazygt
from benchmarks.harness import CORES, Measured, Report, interleave, parser, pin_process, ratio
from benchmarks.small_syncs import SESSIONS
from lazygt.settings import grouped

COLUMNS = ["session", "eager ms", "lazygt ms", "lazygt / eager", "evaluations a step"]
FEATURES, HIDDEN, SAMPLES = 16, 32, 256


class Fit:
    """A small network that is fitted to random targets, the whole set at once."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(SAMPLES, FEATURES, device="cpu").to(device)
        self.y = torch.randn(SAMPLES, 1, device="cpu").to(device)
        layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
        self.model = layers.to(device)
        self.optimizer = torch.optim.LBFGS(
            self.model.parameters(), max_iter=8, line_search_fn="strong_wolfe"
        )
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.evaluations = 0

    def loss(self) -> torch.Tensor:
        """The loss and its gradients, as the optimizer asks for them."""
        self.evaluations += 1
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        return loss

    def step(self) -> float:
        """One step from the same start as ever; the loss before it."""
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(start)
        self.optimizer.state.clear()
        return float(self.optimizer.step(self.loss).detach())


def timed(fit: Fit, steps: int) -> Callable[[], float]:
    """Milliseconds a step."""

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            fit.step()
        return (time.perf_counter() - begin) * 1e3 / steps

    return run


def row(
    name: str, settings: Mapping[str, Any], core: int | None, args: argparse.Namespace
) -> tuple[str, ...]:
    """One kind of session, measured."""
    with ExitStack() as stack:
        session = stack.enter_context(
            lazygt.session(**grouped({"threads": 1, "default_device": False, **settings}))
        )
        eager, ours = Fit("cpu"), Fit("lazygt")
        if ours.step() != eager.step() or ours.evaluations != eager.evaluations:
            raise RuntimeError(f"{name}: not eager torch's numbers")
        counted = ours.evaluations
        if core is not None:
            pin_process(os.getpid(), CORES[0])
            stack.callback(os.sched_setaffinity, 0, CORES)
            for pid in session.worker_pids:
                pin_process(pid, core)
        runs = {"eager": timed(eager, args.steps), "lazygt": timed(ours, args.steps)}
        for run in runs.values():
            run()
        took: Mapping[str, Measured] = interleave(runs, args.rounds)
    times = [f"{took[who].median:.2f}" for who in ("eager", "lazygt")]
    return (name, *times, f"{ratio(took['lazygt'], took['eager']):.2f}x", str(counted))


def measure(args: argparse.Namespace) -> Report:
    report = Report("line_search", "A step of LBFGS, 8 iterations, strong Wolfe", COLUMNS)
    for name, settings, core in SESSIONS:
        report.add(*row(name, settings, core, args))
    report.remarks.append(
        "each step from the same start; the losses are eager torch's, bit for bit"
    )
    return report


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--steps", type=int, default=20, help="steps a round (20)")
    args = options.parse_args()
    torch.set_num_threads(1)
    measure(args).finish(save=args.save)


if __name__ == "__main__":
    main()
