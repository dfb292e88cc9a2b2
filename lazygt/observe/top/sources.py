"""Sources of a session's status."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from lazygt.errors import NoSession
from lazygt.net.status_file import (
    ClientPage,
    Pages,
    StatusFile,
    decoded,
    open_files,
    read_pages,
    sessions,
)
from lazygt.observe.top.status import PoolStatus, SessionStatus, plain, plain_pool, session_status

#: Seconds after which a viewer counts as gone: longer than the interval between two reads.
_LEASE_SECONDS = 3.0
_POLL_SECONDS = 0.02


Status = SessionStatus | PoolStatus


def as_json(status: Status) -> bytes:
    """Encode a status as JSON; docs/top.md describes it."""
    return msgspec.json.encode(
        plain(status) if isinstance(status, SessionStatus) else plain_pool(status)
    )


class StatusSource(Protocol):
    """Source of the status of a session, or of the sessions of a pool."""

    def snapshot(self) -> Status:
        """Read the present status.

        Raises:
            NoSession: the session or pool has ended.
        """

    def settled(self, seconds: float) -> Status:
        """Wait for a report of every process since the call, then read the status.

        Args:
            seconds: maximum time to wait.
        """

    def close(self) -> None:
        """Stop watching. Idempotent."""


class LocalStatus:
    """A session of this user on this machine.

    Args:
        pid: process id of its client.
        file: its status pages.
        interval: maximum seconds between two reads.
    """

    def __init__(self, pid: int, file: StatusFile, interval: float = 1.0) -> None:
        self._pid, self._file = pid, file
        self._lease = max(_LEASE_SECONDS, 3 * interval)
        self._file.watch(self._lease)

    def snapshot(self) -> SessionStatus:
        """See `StatusSource`."""
        return session_status([self._read()])

    def _read(self) -> Pages:
        """Read all pages and renew the lease; NoSession once the client has ended."""
        pages = read_pages(self._file)
        client = pages.client
        if client is None or not client.process or decoded(client.message, ClientPage).ended:
            raise NoSession(f"the session of process {self._pid} has ended")
        self._file.watch(self._lease)
        return pages

    def settled(self, seconds: float) -> SessionStatus:
        """Wait for a report of every running process since the call, then read the status.

        Args:
            seconds: maximum time to wait.
        """
        deadline = time.monotonic() + seconds
        since = time.monotonic_ns()
        while True:
            pages = self._read()
            present = [page for page in (pages.client, *pages.ranks) if page is not None]
            late = [
                page
                for page in present
                if page.when < since and page.process not in ("", "T") and not page.unheard
            ]
            if time.monotonic() >= deadline or (len(present) == self._file.pages and not late):
                return session_status([pages])
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """See `StatusSource`."""
        self._file.close()


def open_source(process_or_name: str, interval: float = 1.0) -> LocalStatus:
    """Open the session of a process or of a name; with neither, the only one there is.

    Args:
        process_or_name: process id, name of the session, or empty.

    Raises:
        NoSession: there is no such session, there are several, or it is another user's.
    """
    if process_or_name.isdigit():
        return _open_process(int(process_or_name), process_or_name, interval)
    matches = [(name, pid) for name, pid in sessions() if process_or_name in ("", name)]
    if len(matches) == 1:
        ((name, pid),) = matches
        return _open_process(pid, name, interval)
    if not matches:
        named = f"named {process_or_name!r} " if process_or_name else ""
        raise NoSession(f"there is no lazygt session {named}of this user on this machine")
    raise NoSession(f"there are {len(matches)} sessions; name one:\n{listed(matches)}")


def listed(known: list[tuple[str, int]]) -> str:
    """Return a text with one line per session: the command that shows it.

    A session is named by its process if its name occurs twice, as in two pools.
    """
    names = [name for name, _ in known]
    return "\n".join(
        f"  lazygt top {name}  (process {pid})"
        if names.count(name) == 1
        else f"  lazygt top {pid}  (session {name})"
        for name, pid in known
    )


def _open_process(pid: int, requested_name: str, interval: float) -> LocalStatus:
    """Open the session named ``requested_name`` of a process, or its only session."""
    files = open_files(pid)
    if requested_name in files:
        file = files.pop(requested_name)
    elif len(files) == 1:
        _, file = files.popitem()
    else:
        raise NoSession(
            f"process {pid} has {len(files)} sessions; name one:\n"
            f"{listed([(name, pid) for name in sorted(files)])}"
        )
    for other in files.values():
        other.close()
    return LocalStatus(pid, file, interval)
