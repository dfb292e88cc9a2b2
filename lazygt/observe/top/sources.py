"""Sources of the status of a session, or of a pool."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from lazygt.errors import NoSession, PoolError
from lazygt.net.status_file import (
    ClientPage,
    Pages,
    StatusFile,
    decoded,
    open_files,
    read_pages,
    sessions,
)
from lazygt.observe.top.status import (
    PoolStatus,
    SessionStatus,
    plain,
    plain_pool,
    pool_status,
    session_status,
)

if TYPE_CHECKING:
    from lazygt.net.keys import KeyFile

#: Seconds after which a viewer counts as gone: longer than the interval between two reads.
_LEASE_SECONDS = 3.0
_POLL_SECONDS = 0.05


Status = SessionStatus | PoolStatus


def as_json(status: Status) -> bytes:
    """Encode a status as JSON; docs/top.md describes it."""
    return msgspec.json.encode(
        plain(status) if isinstance(status, SessionStatus) else plain_pool(status)
    )


class StatusSource(ABC):
    """Source of the status of a session, or of the sessions of a pool."""

    @abstractmethod
    def snapshot(self) -> Status:
        """Read the present status.

        Raises:
            NoSession: the session or pool has ended.
        """

    @abstractmethod
    def is_settled(self, since: float) -> bool:
        """Return whether every process has reported after ``since``, of the monotonic clock."""

    @abstractmethod
    def close(self) -> None:
        """Stop watching. Idempotent."""

    def settled(self, seconds: float) -> Status:
        """Wait for a report of every process since the call, then read the status.

        Args:
            seconds: maximum time to wait.
        """
        begin = time.monotonic()
        while not self.is_settled(begin) and time.monotonic() < begin + seconds:
            time.sleep(_POLL_SECONDS)
        return self.snapshot()


class LocalStatus(StatusSource):
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

    def is_settled(self, since: float) -> bool:
        """See `StatusSource`; processes that are stopped or out of reach do not count."""
        pages = self._read()
        present = [page for page in (pages.client, *pages.ranks) if page is not None]
        return len(present) == self._file.pages and all(
            page.when >= since * 1e9 or page.process in ("", "T") or page.unheard
            for page in present
        )

    def close(self) -> None:
        """See `StatusSource`."""
        self._file.close()


class PoolSource(StatusSource):
    """All sessions of a pool that a key may see.

    Args:
        on: the pool's address.
        key: a client's key file; by default the key of this user's own pool.

    Raises:
        ConnectionLost, AccessDenied, VersionMismatch, SecurityError: see `Pool`.
    """

    def __init__(self, on: str, key: str | os.PathLike[str] | KeyFile | None) -> None:
        # why: they load torch and sockets, which take seconds; local sessions need neither
        from lazygt.net.keys import Keyring, keys_directory
        from lazygt.pool.pool_client import Pool

        self._on = on
        self._pool = Pool(on, key or Keyring(keys_directory()).own())

    def snapshot(self) -> PoolStatus:
        """See `StatusSource`."""
        try:
            report, pages = self._pool.look()
        except PoolError as error:
            raise NoSession(f"the pool at {self._on} is not there any more: {error}") from None
        return pool_status(self._on, report, pages)

    def is_settled(self, since: float) -> bool:
        """See `StatusSource`; frozen ranks do not count."""
        status = self.snapshot()
        waited = time.monotonic() - since
        for row in status.report["sessions"]:
            session = status.sessions.get(row["session"])
            has_workers = bool(row["places"])  # numbers of its worker slots
            if has_workers and (session is None or not session.session.pid):
                return False
            ranks = () if session is None else session.ranks
            ages = [session.age] if session is not None else []
            ages += [rank.age for rank in ranks if rank.state != "frozen"]
            if max(ages, default=0.0) > waited:
                return False
        return True

    def close(self) -> None:
        """See `StatusSource`."""
        self._pool.close()


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
