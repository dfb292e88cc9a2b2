"""A session's status in a terminal: 80 columns and 24 rows for any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lazygt.observe.top.status import STUCK, RankStatus, SessionStatus
from lazygt.tables import plain_table

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
_LONGEST_ROW = 64  # ranks in a row of the grid
_NAMED = 6  # ranges of ranks that a line names


class Screen:
    """Screen of a session: a table of all ranks, if there is room for it.

    Else a grid of letters, and a table of the most important ranks.
    """

    def __init__(self, status: SessionStatus) -> None:
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self.status
        lines = [*_head(status), *alerts(status), Text()]
        room = (options.height or console.height) - len(lines) - 2  # its header, and a last line
        ranks = status.ranks
        if len(ranks) > room:
            grid = list(_grid(ranks))
            lines += [*grid, Text()]
            room -= len(grid) + 1
            ranks = tuple(sorted(ranks, key=_urgency))[: max(room, 1)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line
        yield _table(ranks)


def _head(status: SessionStatus) -> Iterator[Text]:
    told = status.session
    up = status.at - told.opened
    yield Text.assemble(
        (told.name, "bold"), f"  process {told.pid}  up {_clock(up)}  ",
        f"{told.workers} {told.device} workers, {told.mesh}",
    )  # fmt: skip
    if told.line:
        yield Text.assemble("at ", (short(told.line), "bold"), f" ({told.reason})")
    yield Text(
        f"{told.steps_a_second:,.1f} steps/s  {told.runs_a_second:,.1f} runs/s  "
        f"queue {told.queue}  {told.runs:,} runs  {told.hits:,} hits  {told.misses:,} misses"
    )
    if told.miss:
        yield Text(f"last miss at {short(told.miss_line)}: {told.miss}")
    compiles = f"{told.compiled} compiled, {told.compiling} compiling"
    failed = f", {told.failed_compiles} failed" if told.failed_compiles else ""
    last = f": {told.recovery}" if told.recovery else ""
    yield Text(
        f"{compiles}{failed}  {told.snapshots} snapshots  {told.recoveries} recoveries{last}"
    )
    if any(rank.host for rank in status.ranks):
        yield Text("; ".join(_on_hosts(status.ranks)))
    kinds = ", ".join(f"{kind} {decimal(size)}" for kind, size in status.memory.items())
    yield Text(f"rank 0: {kinds}")


def _on_hosts(ranks: Sequence[RankStatus]) -> Iterator[str]:
    """Yield the ranks of each host."""
    there: dict[str, list[int]] = {}
    for rank in ranks:
        there.setdefault(rank.host, []).append(rank.rank)
    for host, numbers in there.items():
        yield f"{host or 'this host'}: {ranks_text(numbers)}"


def alerts(status: SessionStatus) -> Iterator[Text]:
    """Yield a line for each problem."""
    if status.client != "running":
        yield Text(f"the client is {status.client}", "bold red")
    for host, ranks in _unreachable(status.ranks).items():
        blocked = {other for rank in ranks for other in rank.blocks}
        why = _harm(blocked, any(r.rank in status.session.waits_for for r in ranks))
        since = max(rank.unheard for rank in ranks)
        yield Text(
            f"{host} ({ranks_text(r.rank for r in ranks)}) is unreachable for {since:.0f} s{why}",
            "bold red",
        )
    for rank in status.ranks:
        if rank.state == "unreachable":
            continue
        if rank.state in STUCK:
            where = f" on {rank.host}" if rank.host else ""
            why = _harm(rank.blocks, rank.rank in status.session.waits_for)
            yield Text(
                f"rank {rank.rank} (process {rank.pid}{where}) is {rank.state}{why}", "bold red"
            )
        elif rank.blocks:
            yield Text(f"rank {rank.rank} keeps {ranks_text(rank.blocks)} waiting", "yellow")


def _unreachable(ranks: Iterable[RankStatus]) -> dict[str, list[RankStatus]]:
    """Return the unreachable ranks of each host."""
    there: dict[str, list[RankStatus]] = {}
    for rank in ranks:
        if rank.state == "unreachable":
            there.setdefault(rank.host, []).append(rank)
    return there


def _harm(blocked: Collection[int], client_waits: bool) -> str:
    """Return the effects of stuck ranks on others, in words."""
    victims = [f"blocks {ranks_text(blocked)}"] if blocked else []
    if client_waits:
        victims.append("keeps the client waiting")
    return "; it " + " and ".join(victims) if victims else ""


def _grid(ranks: Sequence[RankStatus]) -> Iterator[Text]:
    """Yield all ranks as letters, with a legend."""
    row = 32 if len(ranks) <= 8 * 32 else _LONGEST_ROW
    for start in range(0, len(ranks), row):
        line = Text(f"{start:5} ", "dim")
        for place, rank in enumerate(ranks[start : start + row]):
            if place and place % 8 == 0:
                line.append(" ")
            line.append(*LETTERS[rank.state])
        yield line
    legend = Text("      ")
    for state, count in Counter(rank.state for rank in ranks).items():
        letter, style = LETTERS[state]
        legend.append(letter, style).append(f" {state} {count}  ")
    yield legend


def _urgency(rank: RankStatus) -> tuple[bool, int, bool, float, int]:
    """Return the sort key of a rank: stuck ranks, then blocking ones, then slow ones."""
    waits = rank.state == "waiting"
    return rank.state not in STUCK, -len(rank.blocks), waits, -rank.seconds, rank.rank


def _table(ranks: Sequence[RankStatus]) -> Table:
    table = plain_table(">rank", "state", ">for", ">run", "plan", "of", ">living", ">peak")
    for column in table.columns:
        column.no_wrap = True
    table.columns[5].ratio = 1
    table.columns[5].overflow = "ellipsis"
    table.expand = True
    for rank in ranks:
        stuck = rank.unheard or rank.age
        seconds = stuck if rank.state in STUCK else rank.seconds
        table.add_row(
            str(rank.rank),
            Text(rank.state, LETTERS[rank.state][1]),
            f"{seconds:.1f} s" if seconds >= 0.1 else "",
            str(rank.run or ""),
            rank.plan[:6] + (f":{rank.step}" if rank.step >= 0 else ""),
            _concerns(rank),
            decimal(rank.living) if rank.living else "",
            decimal(rank.peak) if rank.peak else "",
        )
    return table


def _concerns(rank: RankStatus) -> str:
    if rank.blocks:
        return f"blocks {ranks_text(rank.blocks)}"
    if rank.waits_for:
        return f"waits for {ranks_text(rank.waits_for)}"
    return short(rank.doing)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-2, 5``; of very many the first ones."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    plural = "" if len(runs) == 1 and runs[0][0] == runs[0][1] else "s"
    return f"rank{plural} {', '.join(words[:_NAMED])}{more}"


def short(line: str) -> str:
    """Return a line, if long only its end, which says more than its beginning."""
    return line if len(line) <= 50 else "..." + line[-47:]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
