"""Steps on workers of this machine, predicted from its calibration and then measured.

Each program is simulated without computing anything, and then run by worker processes with one
thread each. Calibrate first, on a quiet machine: `lazygt calibrate`. Predicted and measured are the
time from one step to the next, and by how much a worker grows at most.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import lazygt
from benchmarks.foresight import summary
from benchmarks.harness import Report
from benchmarks.models import SMALL_GPT, chain_step, gpt_step, mlp_step, pointwise_step
from benchmarks.sharded_workloads import GPT_EXAMPLE, MIDDLE_MLP, WORKLOADS, Workload, train_step
from lazygt import Shard
from lazygt.errors import LazyGTError
from lazygt.settings import grouped

Program = Callable[[], object]
#: Steps before any is measured.
_WARM = 6


class Case(NamedTuple):
    """A program that repeats a step.

    Attributes:
        mesh: its workers; empty: one.
    """

    make: Callable[[], Program]
    mesh: str = ""


def _parallel(workload: Workload, lay: Callable[[torch.nn.Module], object], cut: bool) -> Program:
    """A step of a workload on two workers."""
    torch.manual_seed(0)
    model, batches = workload.model(), workload.batches()
    lay(model)
    if cut:
        batches = [tuple(lazygt.distribute(t, {"data": Shard(0)}) for t in b) for b in batches]
    return train_step(workload, model, batches)


def _megatron(workload: Workload) -> Callable[[torch.nn.Module], object]:
    plan = {
        **dict.fromkeys(workload.columns, lazygt.ColwiseParallel()),
        **dict.fromkeys(workload.rows, lazygt.RowwiseParallel()),
    }
    return lambda model: lazygt.parallelize_module(model, "model", plan)


def _in_halves(model: torch.nn.Module) -> None:
    layers = list(model.children())
    half = len(layers) // 2
    lazygt.stage(layers[:half], 0)
    lazygt.stage(layers[half:], 1)


def _two_workers(name: str, model: str) -> dict[str, Case]:
    workload = WORKLOADS[model]
    return {
        f"{name}, data parallel": Case(
            lambda: _parallel(workload, lazygt.data_parallel, True), "data=2"
        ),
        f"{name}, fully sharded": Case(
            lambda: _parallel(workload, lazygt.fully_shard, True), "data=2"
        ),
        f"{name}, tensor parallel": Case(
            lambda: _parallel(workload, _megatron(workload), False), "model=2"
        ),
    }


CASES: dict[str, Case] = {
    "W1, 1,000 ops on 4 floats": Case(lambda: chain_step("lazygt")),
    "W2, pointwise on 8M floats": Case(lambda: pointwise_step("lazygt")),
    "W3, MLP, SGD": Case(lambda: mlp_step("lazygt")),
    "W3, MLP, Adam": Case(lambda: mlp_step("lazygt", "adam")),
    "W4, GPT": Case(lambda: gpt_step("lazygt", SMALL_GPT)),
    "MLP 4 x 1024, batch 256": Case(
        lambda: mlp_step("lazygt", "adam", batch=256, width=1024, hidden=4)
    ),
    **_two_workers("GPT", GPT_EXAMPLE),
    **_two_workers("MLP 4 x 512", MIDDLE_MLP),
    "MLP 4 x 512, two stages": Case(
        lambda: _parallel(WORKLOADS[MIDDLE_MLP], _in_halves, False), "pipe=2"
    ),
}


def repeated(step: Program, steps: int) -> float:
    """Seconds of a step in the session that is open; each step is shipped by itself."""
    session = lazygt.current()
    begin = time.perf_counter()
    for _ in range(steps):
        result = step()  # noqa: F841 - it is kept, so it is computed
        session.flush()
    session.synchronize()
    return (time.perf_counter() - begin) / steps


class Measured(NamedTuple):
    """Seconds and bytes, predicted and measured."""

    predicted: float
    seconds: float
    predicted_bytes: int
    peak: int


def measure(case: Case, machine: str, steps: int, rounds: int) -> Measured:
    """Simulate a case, and run it; the median of some rounds."""
    mesh = case.mesh or None
    told = lazygt.simulate(
        lambda: repeated(case.make(), 4), mesh=mesh, machine=machine, compiled=False
    )
    settings = {"compile": "off", "device": "cpu", "recovery": "off", "threads": 1}
    with lazygt.session(**grouped({"mesh": mesh, "machine": machine, **settings})) as session:
        before = max(rank.resident for rank in session.memory().ranks)
        step = case.make()
        repeated(step, _WARM)
        seconds = statistics.median(repeated(step, steps) for _ in range(rounds))
        peak = max(rank.peak for rank in session.memory().ranks) - before
    return Measured(told.step_seconds, seconds, told.peak_bytes, peak)


def report(machine: str, names: list[str], steps: int, rounds: int) -> Report:
    """A table of the cases."""
    table = Report(
        "foresight here",
        "Steps on workers with one thread each, predicted from a calibration and measured",
        ("program", "predicted ms", "measured ms", "off", "peak MB", "measured", "off"),
    )
    off = []
    for name in names:
        told = measure(CASES[name], machine, steps, rounds)
        off.append(told.predicted / told.seconds - 1)
        table.add(
            name, f"{told.predicted * 1e3:.3f}", f"{told.seconds * 1e3:.3f}", f"{off[-1]:+.1%}",
            f"{told.predicted_bytes / 1e6:.2f}", f"{told.peak / 1e6:.2f}",
            f"{told.predicted_bytes / told.peak - 1:+.1%}",
        )  # fmt: skip
    table.remarks.append(f"time: {summary(off)}; {statistics.mean(off):+.1%} with sign")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--machine", default="calibrated", help="a machine or its file (calibrated)"
    )
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round (12)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    if not names:
        raise SystemExit(f"no program has {arguments.only!r} in its name: {', '.join(CASES)}")
    try:
        table = report(arguments.machine, names, arguments.steps, arguments.rounds)
    except LazyGTError as error:
        raise SystemExit(str(error)) from None
    table.finish(save=arguments.save)


if __name__ == "__main__":
    main()
