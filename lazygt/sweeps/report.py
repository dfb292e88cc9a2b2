"""Report of a sweep: a row for each combination, as a table, CSV, JSON or a plot."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.files import open_output
from lazygt.printed import Printed, plain_table
from lazygt.sweeps.row import Row
from lazygt.sweeps.verdict import verdict


@dataclass(frozen=True, repr=False)
class Sweep(Printed):
    """Rows for combinations, and the best one. Prints as a table.

    Attributes:
        title: the program and the machine.
        baseline: number of the row that others are compared with.
        target: per cent by which the best has to be better.
    """

    title: str
    rows: Sequence[Row]
    baseline: int
    target: float

    @property
    def verdict(self) -> str:
        """Best combination and its gain, or the bottleneck, in a sentence or two."""
        return verdict(self.rows, self.baseline, self.target)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title)
        knobs = list(self.rows[0].combination.values) if self.rows else []
        table = plain_table(
            *knobs, ">tokens/s", ">against", ">step", ">peak", ">in collectives", ">exposed", "how",
            "note",
        )  # fmt: skip
        for row in self.rows:
            knob_cells = [row.combination.values[knob] for knob in knobs]
            table.add_row(*knob_cells, *row.cells(self.rows[self.baseline]))
        yield table
        yield Text(f"\n{self.verdict}")

    def as_json(self) -> dict[str, Any]:
        """Return the sweep as plain data."""
        return {
            "title": self.title,
            "rows": [row.as_json() for row in self.rows],
            "baseline": self.baseline,
            "target_percent": self.target,
            "verdict": self.verdict,
        }

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows; seconds, bytes, shares from 0 to 1, nothing where nothing is known."""
        rows = [row.as_json() for row in self.rows]
        with open(open_output(path), "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw tokens a second against peak memory, and exposed shares, into a file.

        The file is a ``.png`` or ``.svg``; the shares are bars.

        Raises:
            ValueError: another suffix, or no row has figures.
            ImportError: matplotlib is not there.
        """
        if not any(row.done for row in self.rows):
            raise ValueError("no combination has figures, and so there is nothing to draw")
        from lazygt.sweeps.plot import draw  # why: matplotlib is optional, and takes long to load

        draw(self.rows, self.baseline, self.title, Path(path))
