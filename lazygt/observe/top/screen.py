"""Status of a session or of a pool: in a terminal of 80 columns and 24 rows, and in a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lazygt.observe.top.status import STATES, STUCK, PoolStatus, RankStatus, SessionStatus
from lazygt.printing.tables import plain_table

# -- a session -------------------------------------------------------------------------------------

#: State -> its letter in the grid, and its style.
LETTERS = {
    "frozen": ("F", "bold white on red"),
    "gone": ("X", "bold white on red"),
    "silent": ("S", "bold red"),
    "unreachable": ("U", "bold white on red"),
    "waiting": ("W", "yellow"),
    "busy": ("B", "green"),
    "idle": ("i", "dim"),
    "starting": ("s", "cyan"),
}
_GRID_COLUMNS = 64  # ranks in a line of the grid, at most
_MOST_RANGES = 6  # ranges of ranks that a text lists, at most
_RANK_COLUMNS = (">rank", "state", ">for", ">run", "plan", "of", ">living", ">peak")


class Screen:
    """Rich renderable of a session's status: a summary, alerts, and a table of all ranks.

    If the table is too high for the terminal: a grid with one letter per rank, and a table of the
    most urgent ranks only.
    """

    def __init__(self, status: SessionStatus) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self.status
        lines = [*_session_head(status), *_rendered(alerts(status)), Text()]
        free_lines = (
            (options.height or console.height) - len(lines) - 2
        )  # the table's header, and a last line
        ranks = status.ranks
        if len(ranks) > free_lines:
            grid = list(_grid(ranks))
            lines += [*grid, Text()]
            free_lines -= len(grid) + 1
            ranks = tuple(sorted(ranks, key=_rank_urgency))[: max(free_lines, 1)]
        yield from map(_truncated, lines)
        yield _rank_table(ranks)


def _session_head(status: SessionStatus) -> Iterator[Text]:
    """Yield the summary lines: session, rates, last miss, compiles, hosts, memory."""
    client = status.session
    uptime = status.at - client.opened
    yield Text.assemble(
        (client.name, "bold"), f"  process {client.pid}  up {_duration(uptime)}  ",
        f"{client.workers} {client.device} workers, {client.mesh}",
    )  # fmt: skip
    if client.line:
        yield Text.assemble("at ", (short(client.line), "bold"), f" ({client.reason})")
    yield Text(
        f"{client.steps_a_second:,.1f} steps/s  {client.runs_a_second:,.1f} runs/s  "
        f"queue {client.queue}  {client.runs:,} runs  "
        f"{client.hits:,} hits  {client.misses:,} misses"
    )
    if client.miss:
        yield Text(f"last miss at {short(client.miss_line)}: {client.miss}")
    compiles = f"{client.compiled} compiled, {client.compiling} compiling"
    failed = f", {client.failed_compiles} failed" if client.failed_compiles else ""
    last = f": {client.recovery}" if client.recovery else ""
    yield Text(
        f"{compiles}{failed}  {client.snapshots} snapshots  {client.recoveries} recoveries{last}"
    )
    if any(rank.host for rank in status.ranks):
        yield Text("; ".join(_ranks_by_host(status.ranks)))
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in status.memory.items())
    yield Text(f"rank 0: {kinds}")


def _ranks_by_host(ranks: Sequence[RankStatus]) -> Iterator[str]:
    """Yield a text for each host with its ranks: ``node1: ranks 0-3``."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank.rank)
    for host, numbers in by_host.items():
        yield f"{host or 'this host'}: {ranks_text(numbers)}"


class Alert(NamedTuple):
    """Problem of a session, or notice of ranks that wait for another one."""

    text: str
    kind: str = "problem"  # or "notice"
    session: str = ""  # name of the session, in a pool

    def __str__(self) -> str:
        return f"{self.session}: {self.text}" if self.session else self.text

    def rendered(self) -> Text:
        """Return the alert for a terminal."""
        style = "bold red" if self.kind == "problem" else "yellow"
        return Text(str(self), style)


def alerts(status: SessionStatus) -> Iterator[Alert]:
    """Yield the problems and notices of a session."""
    if status.client != "running":
        yield Alert(f"the client is {status.client}")
    for host, ranks in _unreachable(status.ranks).items():
        blocked = {other for rank in ranks for other in rank.blocks}
        harm = _consequences(blocked, any(r.rank in status.session.waits_for for r in ranks))
        seconds = max(rank.unheard for rank in ranks)
        names = ranks_text(rank.rank for rank in ranks)
        yield Alert(f"{host} ({names}) is unreachable for {seconds:.0f} s{harm}")
    for rank in status.ranks:
        if rank.state == "unreachable":
            continue
        if rank.state in STUCK:
            location = f" on {rank.host}" if rank.host else ""
            harm = _consequences(rank.blocks, rank.rank in status.session.waits_for)
            yield Alert(f"rank {rank.rank} (process {rank.pid}{location}) is {rank.state}{harm}")
        elif rank.blocks:
            yield Alert(f"rank {rank.rank} keeps {ranks_text(rank.blocks)} waiting", "notice")


def _unreachable(ranks: Iterable[RankStatus]) -> dict[str, list[RankStatus]]:
    """Return the unreachable ranks of each host."""
    by_host: dict[str, list[RankStatus]] = {}
    for rank in ranks:
        if rank.state == "unreachable":
            by_host.setdefault(rank.host, []).append(rank)
    return by_host


def _consequences(blocked: Collection[int], client_waits: bool) -> str:
    """Return a clause on the processes that stuck ranks block; empty if there are none."""
    effects = [f"blocks {ranks_text(blocked)}"] if blocked else []
    if client_waits:
        effects.append("keeps the client waiting")
    return "; it " + " and ".join(effects) if effects else ""


def _grid(ranks: Sequence[RankStatus]) -> Iterator[Text]:
    """Yield lines of one letter per rank (its state), then a legend."""
    columns = 32 if len(ranks) <= 8 * 32 else _GRID_COLUMNS
    for start in range(0, len(ranks), columns):
        line = Text(f"{start:5} ", "dim")
        for column, rank in enumerate(ranks[start : start + columns]):
            if column and column % 8 == 0:
                line.append(" ")
            line.append(*LETTERS[rank.state])
        yield line
    legend = Text("      ")
    for state, count in Counter(rank.state for rank in ranks).items():
        letter, style = LETTERS[state]
        legend.append(letter, style).append(f" {state} {count}  ")
    yield legend


def _rank_urgency(rank: RankStatus) -> tuple[bool, int, bool, float, int]:
    """Return the sort key of a rank: stuck ranks, then blocking ones, then slow ones."""
    waits = rank.state == "waiting"
    return rank.state not in STUCK, -len(rank.blocks), waits, -rank.seconds, rank.rank


def _rank_table(ranks: Sequence[RankStatus]) -> Table:
    """Build the table of ranks; the column of activities takes the remaining width."""
    table = _table(*_RANK_COLUMNS)
    table.columns[5].ratio = 1
    table.expand = True
    for rank in ranks:
        number, state, *cells = _rank_cells(rank)
        table.add_row(number, Text(state, LETTERS[state][1]), *map(Text, cells))
    return table


def _rank_cells(rank: RankStatus) -> tuple[str, ...]:
    """Return the row of a rank: state, its duration, run, plan, activity and memory."""
    seconds = (rank.unheard or rank.age) if rank.state in STUCK else rank.seconds
    return (
        str(rank.rank),
        rank.state,
        f"{seconds:.1f} s" if seconds >= 0.1 else "",
        str(rank.run or ""),
        rank.plan[:6] + (f":{rank.step}" if rank.step >= 0 else ""),
        _rank_activity(rank),
        decimal(rank.living) if rank.living else "",
        decimal(rank.peak) if rank.peak else "",
    )


def _rank_activity(rank: RankStatus) -> str:
    """Return the ranks that a rank blocks or waits for; else its running function."""
    if rank.blocks:
        return f"blocks {ranks_text(rank.blocks)}"
    if rank.waits_for:
        return f"waits for {ranks_text(rank.waits_for)}"
    return short(rank.doing)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-2, 5``; at most six ranges are listed."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = f" and {len(texts) - _MOST_RANGES} more" if len(texts) > _MOST_RANGES else ""
    plural = "" if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else "s"
    return f"rank{plural} {', '.join(texts[:_MOST_RANGES])}{more}"


def short(line: str) -> str:
    """Truncate a line to its last 47 characters if it is longer than 50."""
    return line if len(line) <= 50 else "..." + line[-47:]


# -- a pool ----------------------------------------------------------------------------------------

_LONGEST_NAME = 16  # of a session
_LEAST_LINES = 14  # with fewer, a session's own screen does not fit
_SESSION_COLUMNS = (
    "session", "state", "ranks", ">run-s", ">memory", ">of", ">steps/s", ">queue", ">hits",
    ">misses",
)  # fmt: skip


class PoolScreen:
    """Rich renderable of a pool's status: alerts, a table of sessions, and their activity.

    If only one session is visible, its own screen follows.
    """

    def __init__(self, status: PoolStatus) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, sessions = self.status.report, self.status.sessions
        lines = [*_pool_head(self.status), *_rendered(_pool_alerts(self.status)), Text()]
        rows = sorted(report["sessions"], key=lambda row: not _is_urgent(row, sessions))
        free_lines = (options.height or console.height) - len(lines) - 2
        shown = rows[: max(free_lines, 1)]
        if len(shown) < len(rows):
            lines.insert(-1, Text(f"{len(rows) - len(shown) + 1} sessions do not fit here"))
            shown = shown[:-1]
        yield from map(_truncated, lines)
        yield _session_table(shown, sessions)
        free_lines -= len(shown)
        activities = [
            line for row in shown for line in _session_activity(row, sessions.get(row["session"]))
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


def _pool_head(status: PoolStatus) -> Iterator[Text]:
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


def _pool_alerts(status: PoolStatus) -> Iterator[Alert]:
    """Yield the alerts of all sessions, each with the session's name."""
    for name, session in status.sessions.items():
        for alert in alerts(session):
            yield alert._replace(session=name)


def _is_urgent(row: Mapping[str, Any], sessions: Mapping[str, SessionStatus]) -> bool:
    """Return whether a session has stuck ranks."""
    session = sessions.get(row["session"])
    return session is not None and bool(session.stuck)


def _session_table(rows: list[Any], sessions: Mapping[str, SessionStatus]) -> Table:
    """Build the table of a pool's sessions."""
    table = _table(*_SESSION_COLUMNS)
    table.padding = (0, 1, 0, 0)
    for row in rows:
        session = sessions.get(row["session"])
        name, state, *cells = map(Text, _session_cells(row, session))
        table.add_row(name, state, _ranks(row, session), *cells)
    return table


def _session_cells(row: Mapping[str, Any], session: SessionStatus | None) -> tuple[str, ...]:
    """Return the row of a session, without its ranks."""
    cells = (
        _name(row), _state(row), _short_number(row["run_seconds"]), decimal(row["memory"]),
        _quota_share(row),
    )  # fmt: skip
    if session is None or not session.session.pid:
        return *cells, "", "", "", ""
    client = session.session
    rates = map(_short_number, (client.steps_a_second, client.queue, client.hits, client.misses))
    return *cells, *rates


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


def _session_activity(
    row: Mapping[str, Any],
    session: SessionStatus | None,
    shortened: Callable[[str], str] = short,
) -> Iterator[Text]:
    """Yield lines on the work of a session's client, each with the session's name.

    Args:
        shortened: makes the user's lines as short as the screen needs them.
    """
    if session is None or not session.session.pid:
        return
    client = session.session
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in session.memory.items())
    lines = {
        f"at {shortened(client.line)} ({client.reason})": client.line,
        f"rank 0: {kinds}": True,
        f"last miss at {shortened(client.miss_line)}: {client.miss}": client.miss,
        f"{client.recoveries} recoveries: {client.recovery}": client.recoveries,
    }
    for line, applies in lines.items():
        if applies:
            yield Text.assemble((f"{row['session']} ", "bold"), line)


# -- both in a browser -----------------------------------------------------------------------------

_MOST_ROWS = 16  # ranks in the table of a page, at most


def page_of(status: SessionStatus | PoolStatus) -> dict[str, Any]:
    """Return the content of the page: the lines of the screen, squares of ranks, and a table.

    A cell of the table is a text, or the squares of a session's ranks.
    """
    if isinstance(status, PoolStatus):
        return _pool_page(status)
    title, *lines = map(str, _session_head(status))
    ranks = status.ranks
    if len(ranks) > _MOST_ROWS:
        ranks = tuple(sorted(ranks, key=_rank_urgency))[:_MOST_ROWS]
    return {
        "title": title,
        "alerts": [(str(alert), alert.kind) for alert in alerts(status)],
        "lines": lines,
        "squares": _squares(status),
        "columns": _RANK_COLUMNS,
        "rows": list(map(_rank_cells, ranks)),
    }


def _pool_page(status: PoolStatus) -> dict[str, Any]:
    """Return the content of a pool's page; see ``page_of``."""
    title, *lines = map(str, _pool_head(status))
    rows = []
    for row in status.report["sessions"]:
        session = status.sessions.get(row["session"])
        _, state, *cells = _session_cells(row, session)
        ranks = str(row["workers"]) if session is None else _squares(session)
        rows.append((row["session"], row["client"], state, ranks, *cells))
        lines += map(str, _session_activity(row, session, shortened=str))
    session_column, *other_columns = _SESSION_COLUMNS
    return {
        "title": title,
        "alerts": [(str(alert), alert.kind) for alert in _pool_alerts(status)],
        "lines": lines,
        "squares": [],
        "columns": (session_column, "key", *other_columns),
        "rows": rows,
    }


def _squares(status: SessionStatus) -> list[tuple[int, str, str]]:
    """Return (rank, state, activity) of each rank."""
    return [(rank.rank, rank.state, _rank_activity(rank)) for rank in status.ranks]


# -- lines and tables of both ----------------------------------------------------------------------


def _rendered(all_alerts: Iterable[Alert]) -> Iterator[Text]:
    """Yield alerts for a terminal."""
    return (alert.rendered() for alert in all_alerts)


def _truncated(line: Text) -> Text:
    """Make a text truncate instead of wrapping."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _table(*columns: str) -> Table:
    """Build a table without lines and wrapped cells; see ``plain_table``."""
    table = plain_table(*columns)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return table


def _duration(seconds: float) -> str:
    """Format seconds as ``h:mm:ss``."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
