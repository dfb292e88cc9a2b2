"""Status of a session, merged from the status pages of its processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lazygt.errors import NoSession
from lazygt.runtime.launch.status_file import ClientPage, WorkerPage, decoded
from lazygt.runtime.launch.status_reader import Page, Pages

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
        since = remote.unheard or (0 if client_lives else remote.heard)
        unheard = (now - since) / 1e9 if since else 0.0
        if since:
            state = "unreachable"
        elif (
            now - remote.heard > 1e9 * _SILENT_SECONDS
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
