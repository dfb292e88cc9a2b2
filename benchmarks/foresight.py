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
from dataclasses import dataclass
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


class Graded(NamedTuple):
    """A row, and what is predicted of it: seconds of a step, and GiB of a rank."""

    row: Row
    seconds: float
    gib: float
    activation_gib: float


@dataclass
class Grader:
    """Programs that rows share, and the machines that they are simulated on."""

    programs: dict[Row, Programs]
    machines: dict[str, Machine]

    @staticmethod
    def of(rows: Sequence[Row]) -> "Grader":
        keys = list(dict.fromkeys(map(programs_key, rows)))
        programs = {key: Programs.of(key) for key in tqdm(keys, "programs", disable=len(keys) < 2)}
        return Grader(programs, {name: machine_of(name) for name in {row.machine for row in rows}})

    def grade(self, rows: Sequence[Row]) -> list[Graded]:
        """What is predicted of rows."""
        times = {
            key: programs.times(self.machines[key.machine])
            for key, programs in self.programs.items()
        }
        graded = []
        for row in rows:
            key, machine = programs_key(row), self.machines[row.machine]
            programs, size = self.programs[key], 1 << 30
            graded.append(
                Graded(
                    row,
                    step_seconds(row, times[key], machine),
                    peak_bytes(row, programs) / size,
                    activation_bytes(row, programs) / size,
                )
            )
        return graded


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
        grader = Grader.of(rows)
    except (TableError, LazyGTError, OSError) as error:
        raise SystemExit(str(error)) from None
    if arguments.fit:
        rows = _fit(grader, rows, arguments.fit, arguments.seed, arguments.output)
    by_machine: Mapping[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_machine[row.machine].append(row)
    graded = [one for group in by_machine.values() for one in grader.grade(group)]
    title = "Steps and memory, predicted and measured" + (", after a fit" if arguments.fit else "")
    report("foresight", title, graded).finish(save=arguments.save)


def _fit(
    grader: Grader, rows: Sequence[Row], share: float, seed: int, output: Path | None
) -> list[Row]:
    """Fit each machine to some of its rows; the others."""
    chosen = chosen_rows(rows, share, seed)
    for name in grader.machines:
        of_machine = [row for row in chosen if row.machine == name]
        grader.machines[name] = fitted(grader.machines[name], of_machine, grader.programs)
        print(f"{name}: fitted to {len(of_machine)} rows")
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            path = output / f"{grader.machines[name].name}.toml"
            path.write_text(text_of(grader.machines[name]))
            print(f"  written to {path}")
    return [row for row in rows if row not in chosen] or list(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--table", type=Path, action="append", help="a CSV file; several may be given"
    )
    parser.add_argument("--fit", type=float, metavar="SHARE", help="of each machine's rows, first")
    parser.add_argument("--seed", type=int, default=0, help="which rows are fitted to (0)")
    parser.add_argument("-o", "--output", type=Path, help="a folder for the fitted machine files")
    parser.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    return parser


if __name__ == "__main__":
    main()
