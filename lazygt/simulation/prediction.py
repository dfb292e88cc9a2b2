"""Prediction of a step on a machine: figures, tables, a timeline; comparison with a profile."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.collectives import ring_bytes
from lazygt.graph.comm_volume import parallelism_of
from lazygt.graph.mesh import Mesh
from lazygt.graph.text import amount, duration
from lazygt.machine import Machine
from lazygt.machine.extrapolation import Outside, farthest
from lazygt.observe.report import (
    OUTSIDE,
    ExchangedRow,
    by_axis,
    exchanged_table,
    outside_table,
    short_line,
)
from lazygt.observe.timeline import TimedRun, box, track_name, write_trace
from lazygt.printing.tables import PlainTable, Printed, heading, section, summed
from lazygt.simulation.discrete_event import RankClass, Simulated, Span
from lazygt.simulation.node_costs import KINDS, LiveMemory
from lazygt.simulation.suggest import Suggestion, Trial, suggestions
from lazygt.submit.memory_categories import OPTIMIZER, PARAMETERS

#: Rows of each table, at most.
_MAX_ROWS = 8


class CollectiveTime(NamedTuple):
    """Collectives of one kind, axis and line in a step of one rank.

    Attributes:
        nbytes: payload.
        ring: bytes that the rank sends in a ring.
        seconds: total duration.
        exposed: seconds of it in which the rank computes nothing.
    """

    axis: str
    kind: str
    line: str
    times: int
    nbytes: int
    ring: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds of collectives in which the rank computes."""
        return self.seconds - self.exposed


class SimulatedRun(NamedTuple):
    """A simulated run of a plan.

    Attributes:
        plan: beginning of the plan's digest.
        simulated: the run on all ranks.
        beside: bytes by category that a rank holds besides the plan's own values.
    """

    plan: str
    simulated: Simulated
    beside: Mapping[str, int]

    @property
    def elsewhere(self) -> int:
        """Sum of ``beside``."""
        return sum(self.beside.values())


class Peak(NamedTuple):
    """Peak memory of a rank.

    Attributes:
        rank, line: the rank, and the user's line that runs at the peak.
        kinds: bytes by category (see ``simulation.node_costs``); their sum is ``nbytes``.
        lines: the same by category and line, the largest first.
    """

    nbytes: int
    rank: int
    line: str
    kinds: dict[str, int]
    lines: Sequence[LiveMemory]


@dataclass(frozen=True, repr=False)
class Prediction(Printed):
    """A step of a program on a machine. Prints as tables.

    Attributes:
        mesh: mesh of the ranks; None for one rank.
        runs: runs of a step, in order.
        recording: seconds in which the client records and sends a step.
        waits: True if the program reads a value in every step, so that recording and computing
            alternate.
        looped: True if the program repeats a step; else the step is everything after the
            second-to-last backward pass, or the full program.
        tokens: tokens of a step on all ranks: rows of the largest embedding look-up; 0 if none.
        reads: lines of the program that read results; the simulation returned 0 there.
        tries: function that simulates the program with changes, for ``suggestions``.
    """

    machine: Machine
    mesh: Mesh | None
    runs: tuple[SimulatedRun, ...]
    recording: float
    waits: bool
    looped: bool
    tokens: int = 0
    reads: tuple[str, ...] = ()
    tries: Callable[[], Iterable[tuple[Trial, Prediction | None]]] | None = field(
        default=None, compare=False
    )

    @cached_property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """The three most useful changes, each found by simulating the program with the change.

        Each simulation takes as long as this one did. Empty without ``tries``.
        """
        return () if self.tries is None else suggestions(self, self.tries())

    @property
    def computing(self) -> float:
        """Seconds of a step on the ranks."""
        return sum(run.simulated.seconds for run in self.runs)

    @property
    def step_seconds(self) -> float:
        """Seconds from one step to the next."""
        if self.waits:
            return self.recording + self.computing
        return max(self.recording, self.computing)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks; 0 for a program without embedding look-ups."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def host_bound(self) -> bool:
        """True if recording takes longer than computing."""
        return self.recording > self.computing

    @property
    def flops(self) -> int:
        """Arithmetic operations of a step on all ranks."""
        return sum(c.flops * c.count for run in self.runs for c in run.simulated.classes)

    @property
    def mfu(self) -> float:
        """Model flops utilization (Chowdhery et al., PaLM, 2022).

        ``flops`` per second over the peak of all ranks in the dtype of most matrix products.
        Recomputed values count, too.
        """
        ranks = 1 if self.mesh is None else self.mesh.world_size
        peak = self.machine.matmul.most(self.dtype) * ranks
        return self.flops / (self.step_seconds * peak) if self.step_seconds else 0.0

    @property
    def dtype(self) -> str:
        """Dtype of most flops of matrix products, as the machine names it."""
        products = Counter[str]()
        for run in self.runs:
            for ranks in run.simulated.classes:
                products += ranks.products
        return max(products, key=products.__getitem__, default="f32")

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a rank."""
        return self.peak.nbytes

    @property
    def peak_line(self) -> str:
        """The user's line that runs at the peak."""
        return self.peak.line

    @cached_property
    def peak(self) -> Peak:
        """Peak memory of a rank, by category and by line."""
        run, ranks = max(
            ((run, ranks) for run in self.runs for ranks in run.simulated.classes),
            key=lambda pair: pair[0].elsewhere + pair[1].peak_bytes,
        )
        memory = ranks.memory
        kinds = {kind: run.beside.get(kind, 0) + nbytes for kind, nbytes in memory.kinds.items()}
        besides = [LiveMemory(kind, "", nbytes) for kind, nbytes in run.beside.items()]
        lines = summed((*memory.lines, *besides), "nbytes")
        lines.sort(key=lambda row: -row.nbytes)
        return Peak(sum(kinds.values()), ranks.rank, memory.line, kinds, lines)

    @property
    def collectives(self) -> list[CollectiveTime]:
        """Collectives of the rank with the most exposed time per run, the most exposed first."""
        rows = (
            CollectiveTime(
                span.lane, span.name, span.line, 1, span.nbytes, self._ring_bytes(span),
                span.end - span.begin, span.exposed,
            )
            for run in self.runs
            for span in max(run.simulated.classes, key=_exposed).spans
            if span.lane != "compute"
        )  # fmt: skip
        times = summed(rows, "times", "nbytes", "ring", "seconds", "exposed")
        return sorted(times, key=lambda row: (-row.exposed, -row.seconds))

    def _ring_bytes(self, span: Span) -> int:
        """Return the bytes that a rank sends for a collective in a ring; 0 for a receive."""
        kind = span.name.partition(" ")[0]
        ranks = self._ranks_along(span.lane)
        return 0 if kind == "receive" else round(ring_bytes(kind, span.nbytes, ranks))

    def _ranks_along(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return 1 if self.mesh is None else self.mesh.size(axis)

    def by_parallelism(self) -> list[ExchangedRow]:
        """Sum the rank's collectives in a step, by axis of the mesh and kind."""
        return by_axis(
            ExchangedRow(
                parallelism_of(row.axis), row.axis, self._ranks_along(row.axis),
                row.kind.partition(" ")[0], row.times, row.nbytes, row.ring,
            )
            for row in self.collectives
        )  # fmt: skip

    @property
    def outside(self) -> list[Outside]:
        """List the ops farthest beyond the calibrated sizes, on one rank of each class."""
        return farthest(
            row
            for run in self.runs
            for ranks in run.simulated.classes
            for row in ranks.outside
        )  # fmt: skip

    def by_line(self) -> list[tuple[str, float]]:
        """Return (the user's line, seconds on the busiest rank), the most expensive first."""
        seconds_of_line: dict[str, float] = defaultdict(float)
        for run in self.runs:
            busiest = max(run.simulated.classes, key=lambda ranks: ranks.busy)
            for span in busiest.spans:
                if span.lane == "compute":
                    seconds_of_line[span.line] += span.end - span.begin
        return sorted(seconds_of_line.items(), key=lambda row: -row[1])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(Text, self._summary())
        if "suggestions" in vars(self):
            yield heading("what would help most, as simulated")
            yield Text("\n".join(map(str, self.suggestions)) or "nothing that was tried")
        yield heading("what holds memory at the peak")
        yield PlainTable("kind", ">bytes", "line", rows=(
            (kind, amount(nbytes, "B"), short_line(line) if line else "held before")
            for kind, line, nbytes in self.peak.lines[:_MAX_ROWS]
        ))  # fmt: skip
        yield heading("the dearest lines of the busiest rank")
        yield PlainTable("line", ">time", rows=(
            (short_line(line), duration(seconds)) for line, seconds in self.by_line()[:_MAX_ROWS]
        ))  # fmt: skip
        sent = exchanged_table(self.by_parallelism())
        yield from section("collectives, the most exposed first", self._collectives_table())
        yield from section("sent in a step, by kind of parallelism", sent)
        yield from section(OUTSIDE, outside_table(self.outside))

    def _collectives_table(self) -> PlainTable:
        """Build the table of the most exposed collectives."""
        return PlainTable(
            "axis", "collective", ">count", ">payload", ">ring a rank", ">time", ">exposed", "line",
            rows=(
                (row.axis, row.kind, row.times, amount(row.nbytes, "B"), amount(row.ring, "B"),
                 duration(row.seconds), duration(row.exposed), short_line(row.line))
                for row in self.collectives[:_MAX_ROWS]
            ),
        )  # fmt: skip

    def _summary(self) -> Iterator[str]:
        """Yield the sentences above the tables."""
        ranks = "one rank" if self.mesh is None else str(self.mesh)
        bound = "recording in the client" if self.host_bound else "the ranks"
        order = ", one after the other: each step reads a value" if self.waits else ""
        peak, capacity = self.peak_bytes, int(self.machine.memory.capacity)
        excess = "" if peak <= capacity else f": more than the {amount(capacity, 'B')} there are"
        stored = self.peak.kinds[PARAMETERS] + self.peak.kinds[OPTIMIZER]
        if stored > capacity:
            excess += f", and so are parameters and optimizer state alone: {amount(stored, 'B')}"
        yield (
            f"A step on {ranks}, {self.machine}: {duration(self.step_seconds)} (estimated), "
            f"bound by {bound}"
        )
        yield f"  ranks {duration(self.computing)}, recording {duration(self.recording)}{order}"
        yield (
            f"  {amount(self.flops, 'flop')} on all ranks, {self.mfu:.1%} of their peak in "
            f"{self.dtype}"
        )
        if self.tokens:
            yield f"  {self.tokens:,} tokens, {self.tokens_per_second:,.0f} a second"
        yield f"  peak {amount(peak, 'B')} a rank at {short_line(self.peak_line)}{excess}"
        kinds = [f"{kind} {amount(size, 'B')}" for kind, size in self.peak.kinds.items() if size]
        yield f"    {', '.join(kinds)}"
        if self.collectives:
            exposed = sum(row.exposed for row in self.collectives)
            hidden = sum(row.hidden for row in self.collectives)
            yield f"  collectives: {duration(exposed)} exposed, {duration(hidden)} hidden"
        elif self.mesh is not None:
            yield "  nothing is exchanged: every rank does all that the program says of its values"
        for line in self.reads[:_MAX_ROWS]:
            yield f"  reads a value at {short_line(line)}: taken as 0, also by what branches on it"
        if not self.looped:
            yield "  no step is repeated: this is the last one, up to its backward pass"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline in Chrome's trace format.

        Each class of ranks is a process, and each of its lanes a track.
        """
        write_trace(path, self._events())

    def _events(self) -> list[dict[str, Any]]:
        """Return the trace events: spans of all lanes, and counters of memory by category."""
        events: list[dict[str, Any]] = []
        tracks: dict[tuple[int, str], int] = {}
        begin = 0.0
        for run in self.runs:
            for ranks in run.simulated.classes:
                for span in ranks.spans:
                    track = tracks.setdefault((ranks.rank, span.lane), len(tracks))
                    at, length = (begin + span.begin) * 1e6, (span.end - span.begin) * 1e6
                    about = {"line": span.line, "bytes": span.nbytes}
                    events.append(box(ranks.rank, track, span.name, at, length, about))
                for seconds, row in ranks.alive:
                    bytes_of = zip(KINDS, row, strict=True)
                    events.append({
                        "ph": "C", "name": "memory", "pid": ranks.rank, "tid": 0,
                        "ts": (begin + seconds) * 1e6,
                        "args": {kind: run.beside.get(kind, 0) + alive for kind, alive in bytes_of},
                    })  # fmt: skip
            begin += run.simulated.seconds
        return [track_name(rank, track, lane) for (rank, lane), track in tracks.items()] + events

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data; seconds and bytes."""
        return {
            "machine": self.machine.name,
            "mesh": None if self.mesh is None else dict(zip(self.mesh.names, self.mesh.sizes,
                                                            strict=True)),
            "step_seconds": self.step_seconds,
            "recording_seconds": self.recording,
            "computing_seconds": self.computing,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "flops": self.flops,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "peak_line": self.peak_line,
            "memory": {
                "rank": self.peak.rank,
                "kinds": self.peak.kinds,
                "lines": [row._asdict() for row in self.peak.lines[:_MAX_ROWS]],
            },
            "collectives": [row._asdict() for row in self.collectives],
            "reads": list(self.reads),
            "suggestions": [row._asdict() for row in vars(self).get("suggestions", ())],
            "by_parallelism": [row._asdict() for row in self.by_parallelism()],
            "outside": [row._asdict() for row in self.outside],
        }  # fmt: skip


def _exposed(ranks: RankClass) -> float:
    """Return the seconds in which a rank of a class only waits for collectives."""
    return sum(span.exposed for span in ranks.spans)


# -- comparison of a prediction with a profile of the same step ------------------------------------

#: Lines of a comparison, at most.
_MAX_CHECKED = 12


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
        for line, predicted, measured in self.lines[:_MAX_CHECKED]:
            off = f"{predicted / measured - 1:+.0%}" if measured else "-"
            table.add_row(short_line(line), duration(predicted), duration(measured), off)
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
