"""Summary of an instruction log: messages, bytes and time by kind, reason and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

#: Field of a line -> its type; see ``InstructionLog``.
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "t": (int, float), "direction": str, "kind": str, "rank": int, "run": int, "bytes": int,
    "why": str, "line": str,
}  # fmt: skip


class LoggedMessage(NamedTuple):
    """A line of a log; the fields are those of ``InstructionLog``."""

    t: float
    direction: str
    kind: str
    rank: int
    run: int
    nbytes: int
    why: str
    line: str


@dataclass(slots=True)
class Total:
    """Totals of messages with a common name.

    Attributes:
        count, nbytes: number of messages, and bytes of all their frames (without tensors in shared
            memory).
        milliseconds: sum of the times from sending a run to its answer; runs may overlap, so a sum
            can be longer than the log.
    """

    name: str
    count: int = 0
    nbytes: int = 0
    milliseconds: float = 0.0

    def add(self, message: LoggedMessage, milliseconds: float) -> None:
        """Count one more message."""
        self.count += 1
        self.nbytes += message.nbytes
        self.milliseconds += milliseconds


def read_log(path: Path) -> Iterator[LoggedMessage]:
    """Yield the messages of a log written because of ``LAZYGT_LOG``.

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: a line is not one of a log; the error has its number.
    """
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            try:
                yield _message(json.loads(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: this is no line of a log: {error}") from None


def _message(fields: Any) -> LoggedMessage:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}, not {fields!r:.60}")
    for name, kind in FIELDS.items():
        if not isinstance(fields.get(name), kind):
            raise ValueError(f"{name!r} is {fields.get(name)!r:.60}")
    return LoggedMessage(*(fields[name] for name in FIELDS))


class LogSummary:
    """Totals of a log.

    Attributes:
        messages, nbytes, seconds: totals of the whole log; over several sessions, the sum.
    """

    def __init__(self, messages: Iterable[LoggedMessage]) -> None:
        self._rows = list(messages)
        self._waits = _waits(self._rows)
        self.messages = len(self._rows)
        self.nbytes = sum(row.nbytes for row in self._rows)
        ends = [
            row.t
            for row, after in zip(self._rows, [*self._rows[1:], None], strict=True)
            if after is None or after.t < row.t  # another session begins
        ]
        self.seconds = sum(ends)

    def by_kind(self) -> list[Total]:
        """Sum all messages by direction and kind: ``send run``, ``receive done``."""
        return self._totals(lambda row: f"{row.direction} {row.kind}")

    def by_reason(self) -> list[Total]:
        """Sum the sent messages by reason: the sync point, or ``limit``, ``recovery``."""
        return self._totals(lambda row: row.why if row.direction == "send" else "")

    def by_line(self) -> list[Total]:
        """Sum the sent messages by the user's ``file:line``."""
        return self._totals(lambda row: row.line if row.direction == "send" else "")

    def _totals(self, name_of: Callable[[LoggedMessage], str]) -> list[Total]:
        """Sum the messages with a name by that name, the most frequent first."""
        totals: dict[str, Total] = {}
        for number, row in enumerate(self._rows):
            name = name_of(row)
            if name:
                total = totals.setdefault(name, Total(name))
                total.add(row, self._waits.get(number, 0.0))
        return sorted(totals.values(), key=lambda total: (-total.count, total.name))


def _waits(rows: Iterable[LoggedMessage]) -> dict[int, float]:
    """Return sent runs, by position in the log -> milliseconds until their answer."""
    sent: dict[tuple[int, int], tuple[int, float]] = {}
    waits: dict[int, float] = {}
    for number, row in enumerate(rows):
        if (row.direction, row.kind) == ("send", "run"):
            sent[row.rank, row.run] = number, row.t
        elif (row.direction, row.kind) == ("receive", "done"):
            known = sent.pop((row.rank, row.run), None)
            if known is not None:
                waits[known[0]] = (row.t - known[1]) * 1e3
    return waits
