"""A pool's status in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lazygt.observe.top.screen import LETTERS, Screen, alerts, short
from lazygt.observe.top.status import STATES, PoolStatus, SessionStatus
from lazygt.tables import plain_table

_LONGEST_NAME = 16  # of a session
_LEAST_LINES = 14  # with fewer, a session's own screen does not fit


class PoolScreen:
    """Rich renderable of a pool's status: alerts, a table of sessions, and their activity.

    If only one session is visible, its own screen follows.
    """

    def __init__(self, status: PoolStatus) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, sessions = self.status.report, self.status.sessions
        lines = [*_head(self.status), *_alerts(self.status), Text()]
        rows = sorted(report["sessions"], key=lambda row: _urgency(row, sessions))
        free_lines = (options.height or console.height) - len(lines) - 2
        shown = rows[: max(free_lines, 1)]
        if len(shown) < len(rows):
            lines.insert(-1, Text(f"{len(rows) - len(shown) + 1} sessions do not fit here"))
            shown = shown[:-1]
        yield from map(_truncated, lines)
        yield _table(shown, sessions)
        free_lines -= len(shown)
        activities = [
            line for row in shown for line in _activity(row, sessions.get(row["session"]))
        ]
        if len(sessions) == 1 and free_lines > _LEAST_LINES:
            yield Text()
            (session,) = sessions.values()
            yield from Screen(session).__rich_console__(
                console, options.update(height=free_lines - 1)
            )
        elif activities and free_lines > 1:
            yield Text()
            yield from map(_truncated, activities[: free_lines - 1])


def _truncated(line: Text) -> Text:
    """Make a text truncate instead of wrapping."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _head(status: PoolStatus) -> Iterator[Text]:
    """Yield the summary lines: address, workers, queue, and sessions of other keys."""
    report = status.report
    workers, free, others = report["workers"], report["free"], report["others"]
    waiting = sum(not row["places"] for row in report["sessions"]) + others["waiting"]
    draining = "  being drained" if report["draining"] else ""
    yield Text.assemble(
        (status.on, "bold"),
        f"  {workers - free} of {workers} workers taken, {report['at_once']} run at once  "
        f"queue {waiting} of {report['queue_limit']}{draining}",
    )
    if others["sessions"] or others["waiting"]:
        yield Text(
            f"besides, other keys have {others['sessions']} sessions with {others['workers']} "
            f"workers, and {others['waiting']} that wait"
        )


def _alerts(status: PoolStatus) -> Iterator[Text]:
    """Yield the alerts of all sessions, each with the session's name."""
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
            _name(row), _state(row), _ranks(row, session), _short_number(row["run_seconds"]),
            decimal(row["memory"]), _quota_share(row), *_rates(session),
        )  # fmt: skip
    return table


def _name(row: Mapping[str, Any]) -> str:
    """Return a session's name; a long one is truncated to its end, which tells names apart."""
    name = str(row["session"])
    return name if len(name) <= _LONGEST_NAME else "\u2026" + name[1 - _LONGEST_NAME :]


def _short_number(number: float) -> str:
    """Return a number as a text of at most five characters."""
    if number < 10_000:
        return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
    return f"{number / 1e3:.0f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def _state(row: Mapping[str, Any]) -> str:
    """Return a session's state, with its position in the queue or seconds until it expires."""
    if row["before"] is not None:
        return f"waits ({row['before']})"
    ends = row["expires_in"]
    return str(row["state"]) if ends is None else f"{row['state']} {ends:.0f} s"


def _ranks(row: Mapping[str, Any], session: SessionStatus | None) -> Text:
    """Return the number of ranks in each state, by the state's letter."""
    if session is None:
        return Text(str(row["workers"]), "dim")
    counts = Counter(rank.state for rank in session.ranks)
    counted = [(f"{LETTERS[s][0]}{counts[s]}", LETTERS[s][1]) for s in STATES if counts[s]]
    return Text(" ").join([Text(*entry) for entry in counted])


def _quota_share(row: Mapping[str, Any]) -> str:
    """Return this session's share of its client's memory quota."""
    limit = row["quota"]["memory"]
    return f"{100 * row['memory'] / limit:.0f} %" if limit else ""


def _rates(session: SessionStatus | None) -> tuple[str, str, str, str]:
    """Return steps per second, queue length, hits and misses of a session, as texts."""
    if session is None or not session.session.pid:
        return "", "", "", ""
    client = session.session
    return (
        _short_number(client.steps_a_second),
        str(client.queue),
        _short_number(client.hits),
        _short_number(client.misses),
    )


def _activity(row: Mapping[str, Any], session: SessionStatus | None) -> Iterator[Text]:
    """Yield lines on the work of a session's client."""
    if session is None or not session.session.pid:
        return
    client, name = session.session, row["session"]
    if client.line:
        yield Text.assemble((name, "bold"), f" at {short(client.line)} ({client.reason})")
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in session.memory.items())
    yield Text(f"  rank 0: {kinds}")
    if client.miss:
        yield Text(f"  last miss at {short(client.miss_line)}: {client.miss}")
    if client.recoveries:
        yield Text(f"  {client.recoveries} recoveries: {client.recovery}")
