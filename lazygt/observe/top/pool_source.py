"""Source of a pool's status, read through its port."""

from __future__ import annotations

import os
import time

from lazygt.errors import NoSession, PoolError
from lazygt.net.keys import KeyFile, Keyring, keys_place
from lazygt.observe.top.status import PoolStatus, pool_status
from lazygt.pool.pool_client import Pool

_POLL_SECONDS = 0.05


class PoolSource:
    """All sessions of a pool that a key may see.

    Args:
        on: the pool's address.
        key: a client's key file; by default the key of this user's own pool.

    Raises:
        ConnectionLost, AccessDenied, VersionMismatch, SecurityError: see `Pool`.
    """

    def __init__(self, on: str, key: str | os.PathLike[str] | KeyFile | None) -> None:
        self._on = on
        self._pool = Pool(on, key or Keyring(keys_place()).own())

    def snapshot(self) -> PoolStatus:
        """Read the pool's present status.

        Raises:
            NoSession: the pool has ended.
        """
        try:
            report, pages = self._pool.look()
        except PoolError as error:
            raise NoSession(f"the pool at {self._on} is not there any more: {error}") from None
        return pool_status(self._on, report, pages)

    def settled(self, seconds: float) -> PoolStatus:
        """Wait for a report of every session since the call, then read the status.

        Args:
            seconds: maximum time to wait.
        """
        begin = time.monotonic()
        while True:
            status = self.snapshot()
            waited = time.monotonic() - begin
            if waited >= seconds or _is_recent(status, waited):
                return status
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Stop watching."""
        self._pool.close()


def _is_recent(status: PoolStatus, seconds: float) -> bool:
    """Return whether all sessions with workers have reported in the last ``seconds``."""
    for entry in status.report["sessions"]:
        session = status.sessions.get(entry["session"])
        if entry["places"] and (session is None or not session.session.pid):
            return False
        if (
            session is not None
            and max([session.age, *(rank.age for rank in session.ranks if rank.state != "frozen")])
            > seconds
        ):
            return False
    return True
