"""Status of a session, merged from the status pages of its processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from lazygt.errors import NoSession, ProtocolError
from lazygt.net.status_file import ClientPage, Page, Pages, WorkerPage, decoded

#: State of a rank -> its meaning.
STATES = {
    "frozen": "its process is stopped, by SIGSTOP or a debugger",
    "gone": "its process has ended",
    "silent": "its process runs, and has not said anything for some seconds",
    "waiting": "it is in a collective, and other ranks have not come",
    "busy": "it is acting on a message of the client's",
    "idle": "it waits for the client",
    "unreachable": "its host does not answer, or the client, by way of which it would",
    "starting": "it is not ready yet, or nothing has been heard of it yet",
}
#: States in which a rank makes no progress, so that others wait in vain.
STUCK = frozenset({"frozen", "gone", "silent", "unreachable"})
_SILENT_SECONDS = 2.0


class RankStatus(msgspec.Struct, frozen=True):
    """Status of a rank."""

    rank: int
    pid: int
    state: str  # one of ``STATES``
    run: int = 0  # number of the current or last run
    plan: str = ""  # name of its plan
    step: int = -1  # number of the plan's node, if known (in timed runs); else -1
    doing: str = ""  # the user's function that runs, with its line
    seconds: float = 0.0  # time spent on the current message so far
    waits_for: tuple[int, ...] = ()  # ranks that have not come to its collective
    #: ranks that wait for this one, even indirectly; none while it waits itself
    blocks: tuple[int, ...] = ()
    done: int = 0  # number of messages that it has acted on
    living: int = 0  # living, allocated, peak, resident: bytes
    allocated: int = 0
    peak: int = 0
    resident: int = 0
    age: float = 0.0  # seconds since its last report
    host: str = ""  # its host; empty: the client's
    unheard: float = 0.0  # seconds without any message from that host; 0 while it is reachable


class SessionStatus(msgspec.Struct, frozen=True):
    """Status of a session, as ``lazygt top --once --json`` prints it."""

    at: float  # time of the status, in seconds since the epoch
    client: str  # ``running``, ``frozen``, ``gone`` or ``silent``
    age: float  # seconds since the client's last report
    session: ClientPage  # the client's own page
    memory: dict[str, int]  # bytes on rank 0 by kind, with ``other``
    ranks: tuple[RankStatus, ...]  # status of each rank, in order
    stuck: tuple[int, ...]  # ranks that are frozen, gone, silent or unreachable


def plain(status: SessionStatus) -> dict[str, Any]:
    """Return a session's status as a dict; docs/top.md describes it."""
    fields: dict[str, Any] = msgspec.to_builtins(status)
    fields["session"] = msgspec.structs.asdict(status.session)
    del fields["session"]["kinds"]  # "memory" has them, with ``other``
    return fields


def session_status(hosts: Sequence[Pages]) -> SessionStatus:
    """Build a session's status from the pages of its hosts.

    Raises:
        NoSession: no host has the client's page.
        ProtocolError: a page is invalid.
    """
    page = next((pages.client for pages in hosts if pages.client is not None), None)
    if page is None:
        raise NoSession("the client's status page has not been written yet")
    client = decoded(page.message, ClientPage)
    client_state = _process_state(page, "running")
    client_lives = client_state in {"running", "silent"}
    reported = [
        _rank(rank, client_lives) for pages in hosts for rank in pages.ranks if rank is not None
    ]
    by_rank = {rank.rank: rank for rank in reported}
    all_ranks = [
        by_rank.get(rank) or RankStatus(rank, 0, "starting") for rank in range(client.workers)
    ]
    blocked = blocks({rank.rank: rank.waits_for for rank in all_ranks})
    ranks = tuple(
        msgspec.structs.replace(rank, blocks=blocked.get(rank.rank, ())) for rank in all_ranks
    )
    return SessionStatus(
        time.time(),
        client_state,
        page.age,
        client,
        _memory(client, ranks),
        ranks,
        tuple(rank.rank for rank in ranks if rank.state in STUCK),
    )


def _rank(page: Page, client_lives: bool) -> RankStatus:
    """Build a rank's status from its page; a remote rank may be unreachable or starting."""
    worker = decoded(page.message, WorkerPage)
    remote, unheard = worker.elsewhere, 0.0
    state = _process_state(page, "waiting" if worker.waits_for else worker.state)
    if remote is not None and remote.process:
        now = page.when + page.age * 1e9
        since = remote.unheard or (0 if client_lives else remote.received)
        unheard = (now - since) / 1e9 if since else 0.0
        if since:
            state = "unreachable"
        elif (
            now - remote.received > 1e9 * _SILENT_SECONDS
        ):  # no viewer has requested its page for a while
            state = "starting"
    return RankStatus(
        worker.rank, worker.pid, state, worker.run, worker.plan, worker.step, worker.doing,
        max((page.when - worker.begun) / 1e9, 0.0) + page.age if worker.begun else 0.0,
        () if state in STUCK else worker.waits_for, (), worker.done,
        worker.living, worker.allocated, worker.peak, worker.resident,
        page.age, "" if remote is None else remote.host, unheard,
    )  # fmt: skip


def _process_state(page: Page, else_state: str) -> str:
    """Return gone, frozen or silent by the process's state; ``else_state`` if it is alive."""
    if not page.process:
        return "gone"
    if page.process in "Tt":
        return "frozen"
    return "silent" if page.age > _SILENT_SECONDS else else_state


def blocks(waits: Mapping[int, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Transitive closure of the wait-for graph: the ranks that each non-waiting rank blocks.

    Args:
        waits: rank -> the ranks that it waits for (edges of the wait-for graph).
    """
    waiters: dict[int, set[int]] = {}
    for rank, others in waits.items():
        for other in others:
            waiters.setdefault(other, set()).add(rank)
    roots = [rank for rank in waiters if not tuple(waits.get(rank, ()))]
    return {rank: tuple(sorted(_reached(rank, waiters))) for rank in roots}


def _reached(rank: int, waiters: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks reachable from ``rank`` (depth-first search)."""
    reached: set[int] = set()
    todo = [rank]
    while todo:
        new = waiters.get(todo.pop(), set()) - reached
        reached |= new
        todo += new
    return reached


def _memory(client: ClientPage, ranks: Sequence[RankStatus]) -> dict[str, int]:
    """Return rank 0's bytes by memory category; ``other`` is the rest of its living bytes."""
    kinds = dict(client.kinds)
    living = ranks[0].living if ranks else 0
    return {**kinds, "other": max(living - sum(kinds.values()), 0)}


# -- status of a pool: its report, and the status of its sessions' workers -------------------------

_UNREADABLE = "�"


class PoolStatus(msgspec.Struct, frozen=True):
    """Status of a pool."""

    at: float  # time of the status, in seconds since the epoch
    on: str  # the pool's address
    report: dict[str, Any]  # the pool's report, as ``lazygt pool status --json`` prints it
    sessions: dict[str, SessionStatus]  # status of the sessions with workers, by name


def pool_status(on: str, report: Mapping[str, Any], pages: Mapping[str, Pages]) -> PoolStatus:
    """Build a pool's status from its report and the pages of its sessions.

    Texts of clients and workers are not trusted: another user's terminal may show them. A session
    with pages that cannot be decoded has no status.
    """
    sessions = {}
    for row in report["sessions"]:
        if row["session"] in pages:
            status = _status(row, pages[row["session"]])
            if status is not None:
                sessions[row["session"]] = status
    return PoolStatus(time.time(), on, dict(report), sessions)


def _status(row: Mapping[str, Any], pages: Pages) -> SessionStatus | None:
    """Return the status of one session of the report; None if its pages are invalid."""
    try:
        status = session_status(
            [Pages(_client(row, pages.client), tuple(map(_pool_rank, pages.ranks)))]
        )
    except ProtocolError:
        return None
    cleaned = _printable(msgspec.to_builtins(status))
    for rank in cleaned["ranks"]:
        rank["state"] = rank["state"] if rank["state"] in STATES else "starting"
    return msgspec.convert(cleaned, SessionStatus)


def _client(row: Mapping[str, Any], page: Page | None) -> Page:
    """Return the client's page, corrected by the pool, or a substitute without one."""
    name, workers = row["session"], row["workers"]
    if page is None:
        empty = ClientPage(name, 0, workers, "", "", time.time() - row["seconds"])
        gone = "" if row["state"] == "alone" else "S"
        return Page(0, row["unheard"], gone, _encode(empty))
    client = replace(decoded(page.message, ClientPage), name=name, workers=workers)
    return replace(page, message=_encode(client))


def _pool_rank(page: Page | None) -> Page | None:
    """Return a worker's page; None if it cannot be decoded."""
    with suppress(ProtocolError):
        if page is not None:
            decoded(page.message, WorkerPage)
            return page
    return None


_encode = msgspec.msgpack.Encoder().encode


def _printable(value: Any) -> Any:
    """Return the value with all non-printable characters in its texts replaced."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else _UNREADABLE for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value


def plain_pool(status: PoolStatus) -> dict[str, Any]:
    """Return a pool's status as a dict; docs/top.md describes it."""
    rows = [
        {**row, "status": plain(session) if session is not None else None}
        for row in status.report["sessions"]
        for session in (status.sessions.get(row["session"]),)
    ]
    return {"at": status.at, "on": status.on, **status.report, "sessions": rows}
