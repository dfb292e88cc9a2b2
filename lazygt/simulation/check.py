"""Comparison of a prediction with a profile of the same step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.text import duration
from lazygt.observe.report import shown
from lazygt.observe.timeline import TimedRun
from lazygt.simulation.prediction import Prediction
from lazygt.tables import PlainTable, Printed

_MAX_ROWS = 12


class LineCheck(NamedTuple):
    """Computing seconds of a line in a step of one rank, predicted and measured."""

    line: str
    predicted: float
    measured: float


@dataclass(frozen=True, repr=False)
class PredictionCheck(Printed):
    """Prediction against measurement. Prints as a table.

    Attributes:
        predicted, measured: seconds of a step on the ranks; measured node by node, as by ``lazygt
            profile``, the mean over ranks and over all runs but each rank's first.
        lines: seconds by line, the slowest first.
    """

    predicted: float
    measured: float
    lines: Sequence[LineCheck]

    @property
    def error(self) -> float:
        """Relative error of the prediction; negative if it is too fast."""
        return self.predicted / self.measured - 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            f"checked: the ranks took {duration(self.measured)} a step where "
            f"{duration(self.predicted)} were predicted ({self.error:+.0%})"
        )
        table = PlainTable("line", ">predicted", ">measured", ">off")
        for line, predicted, measured in self.lines[:_MAX_ROWS]:
            off = f"{predicted / measured - 1:+.0%}" if measured else "-"
            table.add_row(shown(line), duration(predicted), duration(measured), off)
        yield table


def check(prediction: Prediction, runs: Iterable[TimedRun]) -> PredictionCheck:
    """Compare a prediction with timed runs of the same plans.

    Raises:
        ValueError: a plan of the step was run only once; the first run is a warm-up.
    """
    runs_of_plan = _warm(runs)
    seconds, nanoseconds = 0.0, Counter[str]()
    for name in (run.plan for run in prediction.runs):
        warm = runs_of_plan.get(name)
        if not warm:
            raise ValueError(f"plan {name} was not run twice: let the script do more steps")
        seconds += sum(run.timings.end - run.timings.begin for run in warm) / len(warm)
        for run in warm:
            lines = run.lines()
            for number, _, begin, end in run.timings.steps:
                nanoseconds[lines[number]] += (end - begin) / len(warm)  # type: ignore[assignment]
    predicted = dict(prediction.by_line())
    rows = [
        LineCheck(line, predicted.get(line, 0.0), nanoseconds[line] / 1e9)
        for line in {**nanoseconds, **predicted}
    ]
    rows.sort(key=lambda row: -max(row.predicted, row.measured))
    return PredictionCheck(prediction.computing, seconds / 1e9, rows)


def _warm(runs: Iterable[TimedRun]) -> dict[str, list[TimedRun]]:
    """Group runs by their plan's short digest, without each rank's first run (the warm-up)."""
    ranks: dict[tuple[str, int, int], list[TimedRun]] = defaultdict(list)
    for run in runs:
        if run.plan is not None:
            ranks[run.plan.digest.hex()[:12], run.pid, run.track].append(run)
    warm: dict[str, list[TimedRun]] = defaultdict(list)
    for (name, _, _), of_rank in ranks.items():
        warm[name] += of_rank[1:]
    return warm
