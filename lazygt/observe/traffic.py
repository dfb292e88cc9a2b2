"""Reports of ``lazygt log`` (an instruction log) and of ``lazygt comm`` (a training step)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lazygt.graph.collectives import ring_limit
from lazygt.graph.comm_volume import TransformerStep, Volume
from lazygt.graph.text import amount
from lazygt.printing.tables import PlainTable, Printed, remarks

# -- summary of an instruction log ----------------------------------------------------------------

#: Field of a line -> its type; see ``InstructionLog``.
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "t": (int, float), "direction": str, "kind": str, "rank": int, "run": int, "bytes": int,
    "why": str, "line": str,
}  # fmt: skip


class LoggedMessage(NamedTuple):
    """A line of a log; ``InstructionLog``, its writer, describes the fields."""

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
        milliseconds: sum of the times from sending a run to its answer; runs overlap, so the sum
            can exceed the duration of the log.
    """

    name: str
    count: int = 0
    nbytes: int = 0
    milliseconds: float = 0.0

    def add(self, message: LoggedMessage, milliseconds: float) -> None:
        """Add a message to the totals."""
        self.count += 1
        self.nbytes += message.nbytes
        self.milliseconds += milliseconds


def read_log(path: Path) -> Iterator[LoggedMessage]:
    """Yield the messages of an instruction log (``LAZYGT_LOG``).

    Raises:
        OSError: there is no such file, or it can't be read.
        ValueError: a line is invalid; the error has its number.
    """
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            try:
                yield _message(json.loads(text))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: this is no line of a log: {error}") from None


def _message(fields: Any) -> LoggedMessage:
    """Check and convert the object of a line."""
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}, not {fields!r:.60}")
    for name, kind in FIELDS.items():
        if not isinstance(fields.get(name), kind):
            raise ValueError(f"{name!r} is {fields.get(name)!r:.60}")
    return LoggedMessage(*(fields[name] for name in FIELDS))


class LogSummary:
    """Totals of an instruction log by kind, reason and source line.

    Attributes:
        messages, nbytes, seconds: totals of the whole log; over several sessions, the sum.
    """

    def __init__(self, messages: Iterable[LoggedMessage]) -> None:
        self._messages = list(messages)
        self._latencies = _latencies(self._messages)
        self.messages = len(self._messages)
        self.nbytes = sum(message.nbytes for message in self._messages)
        ends = [
            message.t
            for message, after in zip(self._messages, [*self._messages[1:], None], strict=True)
            if after is None or after.t < message.t  # another session begins
        ]
        self.seconds = sum(ends)

    def by_kind(self) -> list[Total]:
        """Sum all messages by direction and kind: ``send run``, ``receive done``."""
        return self._totals(lambda message: f"{message.direction} {message.kind}")

    def by_reason(self) -> list[Total]:
        """Sum the sent messages by reason: the sync point, or ``limit``, ``recovery``."""
        return self._totals(lambda message: message.why if message.direction == "send" else "")

    def by_line(self) -> list[Total]:
        """Sum the sent messages by the user's ``file:line``."""
        return self._totals(lambda message: message.line if message.direction == "send" else "")

    def _totals(self, name_of: Callable[[LoggedMessage], str]) -> list[Total]:
        """Sum the messages with a name by that name, the most frequent first."""
        totals: dict[str, Total] = {}
        for number, message in enumerate(self._messages):
            name = name_of(message)
            if name:
                total = totals.setdefault(name, Total(name))
                total.add(message, self._latencies.get(number, 0.0))
        return sorted(totals.values(), key=lambda total: (-total.count, total.name))


def _latencies(messages: Iterable[LoggedMessage]) -> dict[int, float]:
    """Return position of a sent run in the log -> milliseconds until its answer."""
    sent: dict[tuple[int, int], tuple[int, float]] = {}
    latencies: dict[int, float] = {}
    for number, message in enumerate(messages):
        if (message.direction, message.kind) == ("send", "run"):
            sent[message.rank, message.run] = number, message.t
        elif (message.direction, message.kind) == ("receive", "done"):
            request = sent.pop((message.rank, message.run), None)
            if request is not None:
                latencies[request[0]] = (message.t - request[1]) * 1e3
    return latencies


# -- traffic of a training step, and checks of claims ---------------------------------------------

#: Relative tolerance: claims are rounded.
_ROUNDING = 0.02
_BYTES = re.compile(r"(\d+\.?\d*(?:e\+?\d+)?)\s*([kMGTP]?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


class VolumeClaim(NamedTuple):
    """A user's claim on the bytes of one kind of parallelism, to be checked."""

    parallelism: str
    nbytes: float


def parse_volume_claim(text: str) -> VolumeClaim:
    """Parse a claim of the command line, such as ``tensor=17.2TB``.

    Raises:
        ValueError: the text is no claim.
    """
    parallelism, _, number = (word.strip() for word in text.partition("="))
    match = _BYTES.fullmatch(number)
    if match is None:
        raise ValueError(f"{text!r}: expected a kind of parallelism and bytes, such as data=56GB")
    return VolumeClaim(parallelism, float(match[1]) * 1000.0 ** _POWERS[match[2].upper()])


@dataclass(frozen=True, repr=False)
class VolumeReport(Printed):
    """Collectives of a training step by kind of parallelism. Prints as a table.

    Attributes:
        dtypes: dtype of the parameters, and of activations.
        volumes: the collectives, kind by kind.
        remarks: remarks on claims.
    """

    step: TransformerStep
    dtypes: tuple[str, str]
    volumes: tuple[Volume, ...]
    remarks: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, in bytes."""
        rows = [
            {**each._asdict(), "logical": each.logical, "ring_limit": each.limit,
             "ring_of_rank": each.ring}
            for each in self.volumes
        ]  # fmt: skip
        dtype, activations = self.dtypes
        return {
            "params": self.step.params,
            "dtype": dtype,
            "activations": activations,
            "collectives": rows,
            "by_parallelism": {
                name: {"logical": sum(each.logical for each in volumes),
                       "ring_limit": sum(each.limit for each in volumes),
                       "ring_of_rank": sum(each.ring for each in volumes)}
                for name, volumes in _by_parallelism(self.volumes).items()
            },
            "remarks": list(self.remarks),
        }  # fmt: skip

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        dtype, activations = self.dtypes
        params = amount(self.step.params * self.step.itemsize, "B")
        head = f"One step; {amount(self.step.params, ' parameters')} in {dtype} are {params}"
        if self.step.activation:
            nbytes = amount(self.step.activation * self.step.activation_itemsize, "B")
            elements = amount(self.step.activation, " elements")
            head += f"; B x S x H = {elements}, in {activations} {nbytes}"
        yield Text(f"{head}.")
        yield Text("Logical: the payload, of the whole model. Ring: what is sent for it, by the "
                   "rule for many ranks, and exactly by one of the ranks that meet.\n")  # fmt: skip
        yield self._table()
        yield from remarks(self.remarks)

    def _table(self) -> PlainTable:
        """Build the table of collectives, with a sum for each kind of parallelism."""
        table = PlainTable(
            "parallelism", ">ranks", "collective", "of", ">count", ">elements each",
            ">logical", ">ring, many ranks", ">ring, a rank",
        )  # fmt: skip
        for name, volumes in _by_parallelism(self.volumes).items():
            for row in volumes:
                table.add_row(name, str(row.ranks), row.kind, row.what, f"{row.times:,}",
                              amount(row.elements, ""), *_bytes([row]))  # fmt: skip
            if len(volumes) > 1:
                table.add_row(name, "", "together", "", "", "", *_bytes(volumes))
        return table


def _by_parallelism(volumes: Sequence[Volume]) -> dict[str, list[Volume]]:
    """Group volumes by kind of parallelism."""
    rows: dict[str, list[Volume]] = {}
    for volume in volumes:
        rows.setdefault(volume.parallelism, []).append(volume)
    return rows


def _bytes(volumes: Sequence[Volume]) -> list[str]:
    """Return the sums of logical bytes, ring bytes in the limit, and ring bytes of a rank."""
    sums = (
        sum(each.logical for each in volumes),
        sum(each.limit for each in volumes),
        sum(each.ring for each in volumes),
    )
    return [amount(nbytes, "B") for nbytes in sums]


def check_claims(volumes: Sequence[Volume], claims: Sequence[VolumeClaim]) -> tuple[str, ...]:
    """Check each claim against the computed bytes, and return a sentence on each.

    Raises:
        ValueError: a claim is on a kind of parallelism without collectives.
    """
    by_parallelism = _by_parallelism(volumes)
    for claim in claims:
        if claim.parallelism not in by_parallelism:
            kinds = ", ".join(by_parallelism) or "none"
            raise ValueError(f"a claim of {claim.parallelism!r}: what is exchanged is of {kinds}")
    return tuple(_check_claim(by_parallelism[claim.parallelism], claim) for claim in claims)


def _check_claim(volumes: Sequence[Volume], claim: VolumeClaim) -> str:
    """Match a claim with logical bytes, ring bytes and element counts, and name its mistake."""
    logical, limit, ring = _bytes(volumes)
    claimed = f"{claim.parallelism}={amount(round(claim.nbytes), 'B')}"
    computed = f"logical {logical}, {limit} in a ring of many ranks, {ring} sent by a rank"
    if _near(claim.nbytes, sum(each.ring for each in volumes)):
        return f"{claimed} is what one rank sends in the ring: {computed}"
    if _near(claim.nbytes, sum(each.limit for each in volumes)):
        return f"{claimed} holds for a ring of many ranks: {computed}"
    elements = [sum(each.times * each.elements for each in volumes)]
    elements.append(sum(ring_limit(each.kind, each.times * each.elements) for each in volumes))
    counted = any(_near(claim.nbytes, number) for number in elements)
    if _near(claim.nbytes, sum(each.logical for each in volumes)):
        also = ", or is a number of elements and no bytes" if counted else ""
        return f"mistake 3: {claimed} is the payload, and forgets the ring{also}: {computed}"
    if counted:
        return f"{claimed} is a number of elements, and no bytes: {computed}"
    return f"{claimed} is wrong: {computed}"


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _ROUNDING * max(other, 1)
