"""Report of a sweep: a row for each combination, as a table, CSV, JSON or a plot."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.text import amount, duration
from lazygt.host.files import open_output
from lazygt.printing.plots import figure
from lazygt.printing.tables import PlainTable, Printed
from lazygt.sweeps.knobs import Combination
from lazygt.sweeps.steps import Shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -- rows ------------------------------------------------------------------------------------------

MEASURED, SIMULATED = "measured", "simulated"
DONE, SKIPPED, FAILED = "done", "skipped", "failed"
_UNKNOWN = "-"


@dataclass(frozen=True)
class Row:
    """Result of a combination.

    Attributes:
        how: ``measured`` or ``simulated``.
        status: ``done``, ``skipped`` (too little memory) or ``failed``.
        step_seconds: mean time of a step.
        tokens: tokens of a step on all ranks; 0 if the program looks up none.
        peak_bytes: peak bytes of values: measured on rank 0, simulated over all ranks; None if
            unknown.
        shares: shares of a step's time; None if unknown.
        note: reason of a skip or a failure.
    """

    combination: Combination
    how: str
    status: str = DONE
    step_seconds: float = 0.0
    tokens: int = 0
    peak_bytes: int | None = None
    shares: Shares | None = None
    note: str = ""

    @property
    def done(self) -> bool:
        """True if there are figures."""
        return self.status == DONE

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks; 0 for a program without embedding look-ups."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def rate(self) -> float:
        """Rate by which rows are compared: tokens, or else steps, per second."""
        if not self.done:
            return 0.0
        return self.tokens_per_second or 1 / self.step_seconds

    @property
    def speed(self) -> str:
        """The rate with its unit."""
        unit = "tokens/s" if self.tokens else "steps/s"
        return f"{self.rate:,.0f} {unit}" if self.rate >= 100 else f"{self.rate:.3g} {unit}"

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data: seconds, bytes, shares from 0 to 1; None: unknown."""
        shares = self.shares
        return {
            **self.combination.values,
            "tokens_per_second": self.tokens_per_second if self.done and self.tokens else None,
            "step_seconds": self.step_seconds if self.done else None,
            "peak_bytes": self.peak_bytes,
            "in_collectives": None if shares is None else shares.in_collectives,
            "exposed": None if shares is None else shares.exposed,
            "how": self.how,
            "status": self.status,
            "note": self.note,
        }

    def cells(self, baseline: Row) -> list[str]:
        """Return the cells of the table, after the knobs."""
        shares = self.shares
        gain = _UNKNOWN
        if self.done and baseline.done:
            gain = f"{self.rate / baseline.rate - 1:+.1%}"
        return [
            f"{self.tokens_per_second:,.0f}" if self.done and self.tokens else _UNKNOWN,
            gain,
            duration(self.step_seconds) if self.done else _UNKNOWN,
            _UNKNOWN if self.peak_bytes is None else amount(self.peak_bytes, "B"),
            _UNKNOWN if shares is None else f"{shares.in_collectives:.0%}",
            _UNKNOWN if shares is None else f"{shares.exposed:.0%}",
            self.how,
            f"{self.status}: {self.note}" if not self.done else self.note,
        ]


# -- verdict ---------------------------------------------------------------------------------------


def verdict(rows: Sequence[Row], baseline: int, target: float) -> str:
    """Compare the best combination with the baseline; below the target, name its bottleneck.

    Args:
        baseline: index of the baseline's row.
        target: required gain in per cent.
    """
    base, done = rows[baseline], [row for row in rows if row.done]
    if not done:
        skipped = sum(row.status == SKIPPED for row in rows)
        return f"No combination has figures: {skipped} skipped, {len(rows) - skipped} failed."
    best = max(done, key=lambda row: row.rate)
    if not base.done:
        return (
            f"Best: {best.combination} with {best.speed} ({best.how}). The baseline "
            f"{base.combination} {base.status}, so there is nothing to compare it with."
        )
    gain = 100 * (best.rate / base.rate - 1)
    comparison = f"{gain:+.1f}% against the baseline {base.combination} ({base.speed}), {best.how}"
    if best is base:
        comparison = f"the baseline itself, {best.how}"
    summary = f"Best: {best.combination} with {best.speed}, {comparison}"
    if gain >= target:
        return f"{summary}: the target of {target:+g}% is reached."
    if best.shares is None:
        return f"{summary}: below the target of {target:+g}%."
    return f"{summary}: below the target of {target:+g}%, bound by {_bound(best, best.shares)}."


def _bound(row: Row, shares: Shares) -> str:
    """Return the bottleneck of a step, with numbers."""
    step = row.step_seconds
    exposed = f"{duration(shares.exposed * step)} of waiting for collectives"
    texts = {
        "compute": f"compute ({shares.compute:.0%} of the {duration(step)} of a step; only "
        f"{exposed} could still be hidden)",
        "exposed bandwidth": f"exposed bandwidth ({shares.bandwidth:.0%} of the {duration(step)} "
        f"of a step is waiting for bytes, {shares.latency:.0%} for latencies, "
        f"{shares.compute:.0%} computing)",
        "latency x count": f"latency x count ({shares.collectives} collectives a step; "
        f"{shares.latency:.0%} of the {duration(step)} of a step is waiting for their latencies, "
        f"{shares.bandwidth:.0%} for bytes, {shares.compute:.0%} computing)",
        "host": f"the host ({shares.host:.0%} of the {duration(step)} of a step the ranks wait for "
        f"what the client records and launches)",
    }
    return texts[shares.bound]


# -- plot ------------------------------------------------------------------------------------------

_BASELINE, _OTHERS, _HIDDEN = "tab:red", "tab:blue", "0.8"


def _points(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    """Plot the rate against the peak memory of each row."""
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True), 1):
        point = ((row.peak_bytes or 0) / 1e9, row.rate)
        axes.plot(*point, "o", color=colour)
        axes.annotate(str(number), point, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("peak memory of a rank (GB)")
    axes.set_ylabel("tokens a second" if rows[0].tokens else "steps a second")
    axes.set_title("the baseline is red")


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Plot a bar for each row: its share in collectives, and in front the exposed share."""
    shown = [(n, row.shares) for n, row in enumerate(rows) if row.shares is not None]
    positions = [number for number, _ in shown]
    axes.barh(positions, [100 * shares.in_collectives for _, shares in shown], color=_HIDDEN,
              label="in collectives")  # fmt: skip
    axes.barh(positions, [100 * shares.exposed for _, shares in shown], color=_OTHERS,
              label="exposed")  # fmt: skip
    names = [f"{row.combination}  {number}" for number, row in enumerate(rows, 1)]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of a step (%)")
    axes.legend(loc="lower right")


# -- report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Sweep(Printed):
    """Rows of all combinations, and a verdict. Prints as a table.

    Attributes:
        title: the program and the machine.
        baseline: index of the row to compare with.
        target: required gain over the baseline, in per cent.
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
        table = PlainTable(
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
        """Write the rows as CSV: seconds, bytes, shares from 0 to 1; unknown values are empty."""
        rows = [row.as_json() for row in self.rows]
        with open(open_output(path), "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot tokens per second against peak memory, and exposed shares, into a file.

        The file is a ``.png`` or ``.svg``.

        Raises:
            ValueError: the suffix is another one, or no row has figures.
            ImportError: matplotlib is not installed.
        """
        if not any(row.done for row in self.rows):
            raise ValueError("no combination has figures, and so there is nothing to draw")
        done = [row for row in self.rows if row.done]
        baseline = self.rows[self.baseline]
        with figure(path, 12, max(4.0, 0.3 * len(done) + 2)) as drawn:
            points, bars = drawn.subplots(1, 2)
            _points(points, done, [_BASELINE if row is baseline else _OTHERS for row in done])
            _bars(bars, done)
            drawn.suptitle(self.title)
