"""Status of a pool: its report, and the status of its sessions' workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from lazygt.errors import ProtocolError
from lazygt.observe.top.status import STATES, SessionStatus, plain, session_status
from lazygt.runtime.launch.status_file import ClientPage, WorkerPage, decoded
from lazygt.runtime.launch.status_reader import Page, Pages

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
        status = session_status([Pages(_client(row, pages.client), tuple(map(_rank, pages.ranks)))])
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


def _rank(page: Page | None) -> Page | None:
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
