"""Measured training runs beside what is predicted of them: tables of the literature, or your own.

    python -m benchmarks.foresight --save
    python -m benchmarks.foresight --table runs.csv
    python -m benchmarks.foresight --table runs.csv --fit 0.1 -o fitted/

Each row is built as lazygt programs, recorded without computing anything, planned for its ranks
and simulated on the machine that it names. All constants are the machine's; ``--fit`` changes some
of them to what fits a share of the rows best, and grades the others.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.foresight_fit import chosen_rows, fitted
from benchmarks.foresight_rows import Row, TableError, read_table
from benchmarks.foresight_simulated import (
    Programs,
    activation_bytes,
    peak_bytes,
    programs_key,
    step_seconds,
)
from benchmarks.harness import Report
from lazygt.errors import LazyGTError
from lazygt.machine import Machine, machine_of
from lazygt.machine.file import text_of

TABLES = Path(__file__).with_name("tables")
_GIB = 1 << 30


class Graded(NamedTuple):
    """A row, and what is predicted of it: seconds of a step, and GiB of a rank."""

    row: Row
    seconds: float
    gib: float
    activation_gib: float


def grade(rows: Sequence[Row], machines: Mapping[str, Machine], jobs: int = 1) -> list[Graded]:
    """What is predicted of rows, in their order, on machines by the names that rows have for them.

    Args:
        jobs: processes that share the work.
    """
    groups = defaultdict(list)
    for row in sorted(rows, key=_programs_alone):
        groups[programs_key(row)].append(row)
    work = [(group, machines[key.machine]) for key, group in groups.items()]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done = pool.map(_grade_alike, work) if jobs > 1 else map(_grade_alike, work)
        bar = tqdm(done, "programs", total=len(work), disable=len(work) < 2)
        graded = {one.row: one for group in bar for one in group}
    return [graded[row] for row in rows]


def _programs_alone(row: Row) -> str:
    """Rows that share programs of ranks that are alone stand together."""
    return str(programs_key(replace(row, dp=1, sharding="none")))


def _grade_alike(work: tuple[Sequence[Row], Machine]) -> list[Graded]:
    """Rows with the same programs, which are dropped then."""
    rows, machine = work
    programs = Programs.of(programs_key(rows[0]))
    times = programs.times(machine)
    return [
        Graded(
            row, step_seconds(row, times, machine), peak_bytes(row, programs) / _GIB,
            activation_bytes(row, programs) / _GIB,
        )
        for row in rows
    ]  # fmt: skip


def errors(graded: Sequence[Graded]) -> list[float]:
    """By which share of what was measured each step's prediction is off."""
    return [each.seconds / each.row.seconds - 1 for each in graded if each.row.seconds]


def report(name: str, title: str, graded: Sequence[Graded]) -> Report:
    """A table of rows, and how far off they are."""
    table = Report(
        name, title,
        ("run", "sharding", "recompute", "step", "measured", "off",
         "activations GiB", "measured", "off", "peak GiB", "measured", "off"),
    )  # fmt: skip
    for row, seconds, gib, activations in graded:
        table.add(
            str(row), row.sharding, row.recompute + (", compiled" if row.compiled else ""),
            *_beside(seconds, row.seconds, "s"), *_beside(activations, row.activation_gib, ""),
            *_beside(gib, row.gib, ""),
        )  # fmt: skip
    if off := errors(graded):
        table.remarks.append(f"time of {len(off)} runs: {summary(off)}")
    return table


def summary(off: Sequence[float]) -> str:
    """Mean, median and 90th percentile of how far off something is."""
    sizes = sorted(map(abs, off))
    p90 = sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
    return (
        f"off by {statistics.mean(sizes):.1%} in the mean, {statistics.median(sizes):.1%} in the "
        f"median, {p90:.1%} at the 90th percentile"
    )


def _beside(predicted: float, measured: float | None, unit: str) -> tuple[str, str, str]:
    if not measured:
        return f"{predicted:.2f}{unit}", "", ""
    return f"{predicted:.2f}{unit}", f"{measured:.2f}{unit}", f"{predicted / measured - 1:+.1%}"


def main() -> None:
    arguments = _parser().parse_args()
    paths = arguments.table or sorted(TABLES.glob("*.csv"))
    try:
        rows = [row for path in paths for row in read_table(path)]
        machines = {name: machine_of(name) for name in {row.machine for row in rows}}
    except (TableError, LazyGTError, OSError) as error:
        raise SystemExit(str(error)) from None
    if arguments.fit:
        rows, machines = _fitted(rows, machines, arguments)
    rows.sort(key=lambda row: row.machine)
    graded = grade(rows, machines, arguments.jobs)
    title = "Steps and memory, predicted and measured" + (", after a fit" if arguments.fit else "")
    report("foresight", title, graded).finish(save=arguments.save)


def _fitted(
    rows: Sequence[Row], machines: Mapping[str, Machine], arguments: argparse.Namespace
) -> tuple[list[Row], dict[str, Machine]]:
    """The rows that no machine was fitted to, and the machines, each fitted to its others."""
    chosen, fits = chosen_rows(rows, arguments.fit, arguments.seed), {}
    for name, machine in machines.items():
        of_machine = [row for row in chosen if row.machine == name]
        fits[name] = fitted(machine, of_machine) if of_machine else machine
        print(f"{name}: fitted to {len(of_machine)} rows")
        if arguments.output is not None:
            arguments.output.mkdir(parents=True, exist_ok=True)
            path = arguments.output / f"{fits[name].name}.toml"
            path.write_text(text_of(fits[name]))
            print(f"  written to {path}")
    return [row for row in rows if row not in chosen], fits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--table", type=Path, action="append", help="a CSV file; several may be given"
    )
    parser.add_argument("--fit", type=float, metavar="SHARE", help="of each machine's rows, first")
    parser.add_argument("--seed", type=int, default=0, help="which rows are fitted to (0)")
    parser.add_argument("-o", "--output", type=Path, help="a folder for the fitted machine files")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    return parser


if __name__ == "__main__":
    main()
