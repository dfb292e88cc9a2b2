"""Cost reports of graphs and scripts as tables: terminal, plain text and notebook."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.collectives import collective_name
from lazygt.graph.comm_volume import parallelism_of
from lazygt.graph.cost import Cost
from lazygt.graph.text import amount, duration
from lazygt.machine.extrapolation import Outside
from lazygt.printing.tables import PlainTable, Printed, heading, section, summed, truncated

#: Path prefix of installed packages.
_INSTALLED = re.compile(r"^.*/(site|dist)-packages/")
_MAX_TEXT = 48
#: Title of ``outside_table``.
OUTSIDE = "outside of what was calibrated, the farthest of each kind"
#: Column of the user's code.
SOURCE = "source"


class LineCost(NamedTuple):
    """Costs of one of the user's lines over all runs.

    ``peak``: maximum bytes alive while an op of the line runs.
    """

    line: str
    ops: int
    cost: Cost
    peak: int


class PlanCost(NamedTuple):
    """Costs of a single run of a plan, and the number of its runs."""

    name: str
    runs: int
    ops: int
    groups: int  # fused groups
    cost: Cost
    inputs: int  # bytes of the inputs
    peak: int  # maximum bytes alive


class Fused(NamedTuple):
    """A fused group. ``saved``: bytes, ``gain``: seconds; both are estimates for one run."""

    runs: int
    members: tuple[str, ...]
    line: str
    saved: int
    gain: float


class Unfused(NamedTuple):
    """Unfused ops, other than matrix products, with the reason."""

    runs: int
    members: tuple[str, ...]
    line: str
    why: str


class CollectiveRow(NamedTuple):
    """One rank's collectives of one kind from one line, in a single run.

    ``nbytes``: payload, ``ring``: bytes that the rank sends in a ring, ``seconds``: an estimate;
    each is a sum over the collectives. ``ranks``: the number of ranks.
    """

    runs: int
    times: int
    kind: str
    reduce_op: str | None
    nbytes: int
    ring: int
    axis: str
    ranks: int
    seconds: float
    line: str
    why: str


class ExchangedRow(NamedTuple):
    """A rank's collectives of one kind along an axis, in all runs.

    ``parallelism``: the kind of parallelism implied by the axis's name, or empty. ``nbytes``:
    payload, ``ring``: bytes that the rank sends in a ring.
    """

    parallelism: str
    axis: str
    ranks: int
    kind: str
    times: int
    nbytes: int
    ring: int


class AlternativeRow(NamedTuple):
    """Cost of the best program without some collectives; see ``passes.sharding.reasons``.

    ``extra``: additional seconds; None if every program needs them.
    """

    runs: int
    times: int
    kind: str
    nbytes: int
    axis: str
    seconds: float
    line: str
    cause: str
    instead: str
    extra: float | None


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Cost report of graphs: lines, plans, fused groups, collectives.

    Prints as tables, in a notebook as HTML.

    Attributes:
        head: sentences above the tables.
        lines: the user's lines, the most expensive first.
        collectives: the collectives, in the order of their first launch.
        alternatives: programs without some of the collectives, if requested.
        outside: ops beyond the sizes for which the machine was calibrated.
    """

    head: tuple[str, ...]
    lines: Sequence[LineCost]
    plans: Sequence[PlanCost]
    fused: Sequence[Fused]
    unfused: Sequence[Unfused]
    collectives: Sequence[CollectiveRow] = ()
    alternatives: Sequence[AlternativeRow] = ()
    outside: Sequence[Outside] = ()

    @property
    def total(self) -> Cost:
        """Cost of all lines."""
        return sum((each.cost for each in self.lines), Cost())

    @property
    def peak(self) -> int:
        """Maximum over the plans of their peak bytes."""
        return max((plan.peak for plan in self.plans), default=0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(line) for line in self.head)
        for title, table in (
            ("lines", self._lines()),
            ("plans, one run of each", self._plans()),
            ("fused, one run of each (estimates)", self._fused()),
            ("not fused", self._unfused()),
        ):
            yield heading(title)
            yield table if table.rows else Text("none")
        sent = exchanged_table(exchanged(self.collectives))
        for title, table in (
            ("collectives, one run of each (times are estimates)", self._collectives()),
            ("sent in all runs, by kind of parallelism", sent),
            ("and without them, axis by axis, before buckets (estimates)", self._alternatives()),
            (OUTSIDE, outside_table(self.outside)),
        ):
            yield from section(title, table)

    def _lines(self) -> PlainTable:
        """Build the table of costs by line, with a total."""
        total = self.total
        table = PlainTable(
            "line", ">ops", ">launches", ">flops", ">share", ">read", ">written", ">share", ">peak",
            SOURCE, spare=(">read", ">written", ">launches", ">ops"), truncated=SOURCE,
            rows=(
                (short_line(line), ops, *_amounts(cost, total), _bytes(peak),
                 truncated(code_at(line), _MAX_TEXT))
                for line, ops, cost, peak in self.lines
            ),
        )  # fmt: skip
        ops = sum(each.ops for each in self.lines)
        table.add_row("total", ops, *_amounts(total, total), _bytes(self.peak), "")
        return table

    def _plans(self) -> PlainTable:
        """Build the table of plans."""
        return PlainTable(
            "plan", ">runs", ">ops", ">groups", ">launches", ">flops", ">read", ">written",
            ">inputs", ">peak", spare=(">groups", ">inputs", ">read", ">written"),
            rows=(
                (name, runs, ops, groups, cost.launches, amount(cost.flops, ""),
                 _bytes(cost.bytes_read), _bytes(cost.bytes_written), _bytes(inputs), _bytes(peak))
                for name, runs, ops, groups, cost, inputs, peak in self.plans
            ),
        )  # fmt: skip

    def _fused(self) -> PlainTable:
        """Build the table of fused groups."""
        return PlainTable(
            ">runs", ">ops", "members", "line", ">bytes saved", ">gain",
            rows=(
                (runs, len(members), names(members), short_line(line), _bytes(saved),
                 duration(gain))
                for runs, members, line, saved, gain in self.fused
            ),
        )  # fmt: skip

    def _unfused(self) -> PlainTable:
        """Build the table of ops that are not fused, with reasons."""
        return PlainTable(
            ">runs", ">ops", "members", "line", "why",
            rows=(
                (runs, len(members), names(members), short_line(line), reason)
                for runs, members, line, reason in self.unfused
            ),
        )  # fmt: skip

    def _collectives(self) -> PlainTable:
        """Build the table of collectives."""
        return PlainTable(
            ">runs", ">count", "collective", ">payload", ">ring a rank", "axis", ">ranks", ">time",
            "line", "why",
            rows=(
                (row.runs, row.times, collective_name(row.kind, row.reduce_op), _bytes(row.nbytes),
                 _bytes(row.ring), row.axis, row.ranks, duration(row.seconds), short_line(row.line),
                 row.why)
                for row in self.collectives
            ),
        )  # fmt: skip

    def _alternatives(self) -> PlainTable:
        """Build the table of programs without some of the collectives."""
        return PlainTable(
            ">runs", ">count", "collective", ">payload", "axis", ">time", ">without it", "line",
            "comes of", "instead",
            rows=(
                (row.runs, row.times, row.kind, _bytes(row.nbytes), row.axis, duration(row.seconds),
                 "-" if row.extra is None else _signed(row.extra), short_line(row.line), row.cause,
                 "nothing: the annotations force it" if row.extra is None else row.instead)
                for row in self.alternatives
            ),
        )  # fmt: skip


def exchanged(collectives: Iterable[CollectiveRow]) -> list[ExchangedRow]:
    """Sum the collectives of all runs by axis, ranks and kind; see ``by_axis``."""
    return by_axis(
        ExchangedRow(
            parallelism_of(row.axis), row.axis, row.ranks, row.kind, row.runs * row.times,
            row.runs * row.nbytes, row.runs * row.ring,
        )
        for row in collectives
    )  # fmt: skip


def by_axis(rows: Iterable[ExchangedRow]) -> list[ExchangedRow]:
    """Sum rows of one axis and kind; the axes are in the order of their first row."""
    totals = summed(rows, "times", "nbytes", "ring")
    axes = list(dict.fromkeys(row.axis for row in totals))
    return sorted(totals, key=lambda row: axes.index(row.axis))


def exchanged_table(rows: Iterable[ExchangedRow]) -> PlainTable:
    """Build the table of bytes by kind of parallelism."""
    return PlainTable(
        "parallelism", "axis", ">ranks", "collective", ">count", ">logical", ">ring a rank",
        rows=(
            (row.parallelism or "-", row.axis, row.ranks, row.kind, row.times, _bytes(row.nbytes),
             _bytes(row.ring))
            for row in rows
        ),
    )  # fmt: skip


def outside_table(rows: Iterable[Outside]) -> PlainTable:
    """Build the table of extrapolations beyond the measured sizes."""
    return PlainTable(
        "what", "farthest", ">size", ">calibrated", ">count", "line",
        rows=(
            (row.what, row.op, row.size, row.measured, f"{row.times:,}", short_line(row.line))
            for row in rows
        ),
    )  # fmt: skip


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{duration(abs(seconds))}"


def names(ops: Iterable[str]) -> str:
    """Return ops with their counts, in the order of first occurrence: ``mul x2, add``."""
    text = ", ".join(
        f"{op} x{times}" if times > 1 else op for op, times in Counter(ops).items()
    )  # fmt: skip
    return truncated(text, _MAX_TEXT)


def short_line(line: str) -> str:
    """Shorten ``file:line``: relative to the current folder, or to ``site-packages``."""
    try:
        folder = os.getcwd() + os.sep
    except FileNotFoundError:
        folder = ""  # the folder has been removed
    return _INSTALLED.sub("", line.removeprefix(folder))


def code_at(line: str) -> str:
    """Return the user's code at ``file:line``; empty when the file can't be read."""
    path, _, number = line.rpartition(":")
    return linecache.getline(path, int(number)).strip() if path and number.isdigit() else ""


def _bytes(number: int) -> str:
    return amount(number, "B")


def _amounts(cost: Cost, total: Cost) -> tuple[str, ...]:
    """Return the cells of a cost: launches, flops and their share, bytes and their share."""
    return (
        str(cost.launches),
        amount(cost.flops, ""),
        _share(cost.flops, total.flops),
        _bytes(cost.bytes_read),
        _bytes(cost.bytes_written),
        _share(cost.bytes, total.bytes),
    )


def _share(amount: int, total: int) -> str:
    """Return a share in per cent; ``-`` if the total is 0."""
    return f"{100 * amount / total:.0f}%" if total else "-"
