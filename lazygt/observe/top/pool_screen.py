"""A pool's status in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lazygt.observe.top.pool_status import PoolStatus
from lazygt.observe.top.screen import LETTERS, Screen, alerts, short
from lazygt.observe.top.status import STATES, SessionStatus
from lazygt.tables import plain_table

_LONGEST_NAME = 16  # of a session
_LEAST_ROWS = 14  # with fewer, a session's own screen does not fit


class PoolScreen:
    """Screen of a pool: alerts, a row for each session, and its client's work.

    If only one session is visible, its own screen follows.
    """

    def __init__(self, status: PoolStatus) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        told, sessions = self.status.told, self.status.sessions
        lines = [*_head(self.status), *_alerts(self.status), Text()]
        rows = sorted(told["sessions"], key=lambda row: _urgency(row, sessions))
        room = (options.height or console.height) - len(lines) - 2
        shown = rows[: max(room, 1)]
        if len(shown) < len(rows):
            lines.insert(-1, Text(f"{len(rows) - len(shown) + 1} sessions have no room here"))
            shown = shown[:-1]
        yield from map(_cut, lines)
        yield _table(shown, sessions)
        room -= len(shown)
        said = [line for row in shown for line in _said(row, sessions.get(row["session"]))]
        if len(sessions) == 1 and room > _LEAST_ROWS:
            yield Text()
            (session,) = sessions.values()
            yield from Screen(session).__rich_console__(console, options.update(height=room - 1))
        elif said and room > 1:
            yield Text()
            yield from map(_cut, said[: room - 1])


def _cut(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _head(status: PoolStatus) -> Iterator[Text]:
    told = status.told
    workers, free, others = told["workers"], told["free"], told["others"]
    waiting = sum(not row["places"] for row in told["sessions"]) + others["waiting"]
    draining = "  being drained" if told["draining"] else ""
    yield Text.assemble(
        (status.on, "bold"),
        f"  {workers - free} of {workers} workers taken, {told['at_once']} run at once  "
        f"queue {waiting} of {told['queue_limit']}{draining}",
    )
    if others["sessions"] or others["waiting"]:
        yield Text(
            f"besides, other keys have {others['sessions']} sessions with {others['workers']} "
            f"workers, and {others['waiting']} that wait"
        )


def _alerts(status: PoolStatus) -> Iterator[Text]:
    for name, session in status.sessions.items():
        for line in alerts(session):
            yield Text.assemble((f"{name}: ", "bold"), line)


def _urgency(row: Mapping[str, Any], sessions: Mapping[str, SessionStatus]) -> tuple[bool, int]:
    """Return the sort key of a row: sessions with stuck ranks first, then by request."""
    session = sessions.get(row["session"])
    return not (session is not None and session.stuck), 0


def _table(rows: list[Any], sessions: Mapping[str, SessionStatus]) -> Table:
    table = plain_table(
        "session",
        "state",
        "ranks",
        ">run-s",
        ">memory",
        ">of",
        ">steps/s",
        ">queue",
        ">hits",
        ">misses",
    )
    for column in table.columns:
        column.no_wrap = True
    table.padding = (0, 1, 0, 0)
    for row in rows:
        session = sessions.get(row["session"])
        table.add_row(
            _name(row), _state(row), _ranks(row, session), _brief(row["run_seconds"]),
            decimal(row["memory"]), _of_quota(row), *_numbers(session),
        )  # fmt: skip
    return table


def _name(row: Mapping[str, Any]) -> str:
    """Return a session's name, if long only its end, which differs between sessions."""
    name = str(row["session"])
    return name if len(name) <= _LONGEST_NAME else "\u2026" + name[1 - _LONGEST_NAME :]


def _brief(number: float) -> str:
    """Return a number as a text of at most five characters."""
    if number < 10_000:
        return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
    return f"{number / 1e3:.0f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def _state(row: Mapping[str, Any]) -> str:
    if row["before"] is not None:
        return f"waits ({row['before']})"
    ends = row["expires_in"]
    return str(row["state"]) if ends is None else f"{row['state']} {ends:.0f} s"


def _ranks(row: Mapping[str, Any], session: SessionStatus | None) -> Text:
    """Return the number of ranks in each state, by the state's letter."""
    if session is None:
        return Text(str(row["workers"]), "dim")
    counts = Counter(rank.state for rank in session.ranks)
    parts = [(f"{LETTERS[s][0]}{counts[s]}", LETTERS[s][1]) for s in STATES if counts[s]]
    return Text(" ").join([Text(*part) for part in parts])


def _of_quota(row: Mapping[str, Any]) -> str:
    """Return this session's share of its client's memory quota."""
    limit = row["quota"]["memory"]
    return f"{100 * row['memory'] / limit:.0f} %" if limit else ""


def _numbers(session: SessionStatus | None) -> tuple[str, str, str, str]:
    if session is None or not session.session.pid:
        return "", "", "", ""
    told = session.session
    return _brief(told.steps_a_second), str(told.queue), _brief(told.hits), _brief(told.misses)


def _said(row: Mapping[str, Any], session: SessionStatus | None) -> Iterator[Text]:
    """Yield lines on the work of a session's client."""
    if session is None or not session.session.pid:
        return
    told, name = session.session, row["session"]
    if told.line:
        yield Text.assemble((name, "bold"), f" at {short(told.line)} ({told.reason})")
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in session.memory.items())
    yield Text(f"  rank 0: {kinds}")
    if told.miss:
        yield Text(f"  last miss at {short(told.miss_line)}: {told.miss}")
    if told.recoveries:
        yield Text(f"  {told.recoveries} recoveries: {told.recovery}")
