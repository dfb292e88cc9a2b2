"""Link of a session to workers of a pool."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from lazygt.config import Config
from lazygt.errors import ConnectionLost, LazyGTError, PoolError
from lazygt.graph.mesh import Mesh
from lazygt.net.connection import Connection
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import Page, StatusFile, read_client
from lazygt.pool.pool_client import answer, connect
from lazygt.pool.requests import (
    TO_CLIENT,
    Admitted,
    AreYouThere,
    Ask,
    Doing,
    Leave,
    Ok,
    RequestFailed,
    Waits,
    Watched,
    is_ours,
)
from lazygt.runtime.cluster.cluster_link import ClusterLink
from lazygt.runtime.cluster.opening import link_spec
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.wire import decode, encode

_LEAVE_SECONDS = 10.0
_WATCHED_SECONDS = 3.0
#: Seconds of silence after which the pool is pinged.
_SILENCE_SECONDS = 2.0
#: Seconds between two checks that mean this process was stopped: an answer may be pending.
_STOPPED_SECONDS = 1.5
#: Minimum timeout in seconds for a pool's answer.
_MIN_TIMEOUT = 10.0


class SessionConnection:
    """Connection to a pool after the admission of a session; see ``Connected``.

    The pool's own messages are handled here; the others are for the session's host. The kernel
    keeps the connection of a stopped pool alive, so the pool itself is pinged while the client
    waits for a message.

    Args:
        endpoint: address of the pool.
        patience: seconds that the pool may take for an answer.

    Attributes:
        error: the reason for the session's end.
        doing: returns the client's status page, for observers of the pool.
        leaving: True if no more answers are expected, so the connection's end is no error.
        left: True if the session has ended, or continues without this client.
    """

    def __init__(self, connection: Connection, endpoint: str, timeout: float) -> None:
        self.fd = connection.fd
        self._connection, self._endpoint, self._timeout = connection, endpoint, timeout
        self.error: LazyGTError | None = None
        self.status_page: Callable[[], Page | None] = lambda: None
        self.leaving = self.left = False
        self._checked_at = self._received_at = time.monotonic()
        #: time of the unanswered ping; None: there is none
        self._pinged_at: float | None = None

    @property
    def closed(self) -> str | None:
        """Reason for the connection's end, or None."""
        if self.left:
            return "the session has left the pool"
        return str(self.error) if self.error is not None else self._connection.closed

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message. Does not wait."""
        if self.closed is None:
            self._connection.send(frames)

    def take(self) -> list[memoryview] | None:
        """Return the next message of the session's host; None: there is none.

        Raises:
            PoolError: the pool has ended the session.
            ConnectionLost: the pool has ended, can't be reached any more, or does not answer.
        """
        frames = self._next()
        if frames is None:
            self._check_alive(time.monotonic())
            if self.error is not None and not (self.left or self.leaving):
                raise self.error
        return frames

    def _next(self) -> list[memoryview] | None:
        """Handle the pool's own messages; return the next one for the session's host."""
        while (frames := self._connection.take()) is not None:
            self._received_at, self._pinged_at = time.monotonic(), None
            if not is_ours(frames[0]):
                return frames
            message = decode(frames[:1], TO_CLIENT)
            if isinstance(message, RequestFailed):
                self.error = message.error()
            elif isinstance(message, Watched) and (page := self.status_page()) is not None:
                self.send(encode(Doing(), [msgspec.msgpack.encode(page)]))
            self.left = self.left or isinstance(message, Ok)
        return None

    def _check_alive(self, now: float) -> None:
        """Check that the pool is alive; else set `error`."""
        if self.error is not None or self.left:
            return
        if self._connection.closed is not None:
            self._set_lost(self._connection.closed)
        elif now - self._checked_at > _STOPPED_SECONDS:
            self._received_at, self._pinged_at = now, None
        elif self._pinged_at is not None and now - self._pinged_at > self._timeout:
            self._set_lost(
                f"the pool has not answered for {self._timeout:g} s, though its machine does. Is "
                f"`lazygt serve` stopped there?"
            )
        elif self._pinged_at is None and now - self._received_at > _SILENCE_SECONDS:
            self._pinged_at = now
            self._connection.send(encode(AreYouThere()))
        self._checked_at = now

    def _set_lost(self, why: str) -> None:
        self.error = ConnectionLost(self._endpoint, f"{why}. The session's values are lost")

    def close(self, reason: str = "done") -> None:
        """See `leave`."""
        self.leave()

    def leave(self) -> None:
        """Leave the session, and close the connection once the pool has read all messages."""
        self.leaving = True
        deadline = time.monotonic() + _LEAVE_SECONDS
        poller = select.poll()
        if self.closed is None:
            poller.register(self.fd, select.POLLIN)
        self.send(encode(Leave()))
        while self.closed is None and (remaining := deadline - time.monotonic()) > 0:
            self.take()
            if self.closed is None:
                poller.poll(1_000 * min(remaining, 0.5))
        self.left = True
        self._connection.close()


class PoolLink(ClusterLink):
    """Workers of a pool; the session's `Link`.

    Attributes:
        config: the session's configuration, with the workers' device.

    Raises:
        ConnectionLost, AccessDenied, VersionMismatch, SecurityError: see `Pool`.
        PoolFull, PoolDraining, GangTooLarge, OverQuota: the pool has refused.
        PoolError: the pool had no free workers in time.
    """

    def __init__(self, config: Config, mesh: Mesh, copier: str) -> None:
        assert config.pool is not None
        assert config.key is not None
        connection = connect(config.pool, config.key, config.start_timeout, config.grace)
        try:
            admitted = _request_workers(connection, config)
            self.config = replace(config, device=admitted.device)
            timeout = max(config.grace, _MIN_TIMEOUT)
            self._pool = SessionConnection(connection, config.pool, timeout)
            self._detach = config.detach
            host = RemoteHost(config.pool, self._pool)
            spec = link_spec(self.config, mesh, copier)
            super().__init__(spec, 0, [(host, config.workers)], name=admitted.session)
            self._pool.status_page = partial(_watched_page, self.status)
        except BaseException:
            connection.close()
            raise

    def look(self) -> None:
        """See ``Link.look``; also answers the pool while nothing waits for messages."""
        self._receive_arrived()
        super().look()

    def close(self) -> None:
        """End the workers, or leave them running if the session is detached. Idempotent."""
        self._pool.leaving = True
        if self._detach:
            self._pool.leave()
        try:
            super().close()
        finally:
            self._pool.leave()


def _watched_page(pages: StatusFile) -> Page | None:
    """Return the client's status page, and make the client write details for a while."""
    pages.watch(_WATCHED_SECONDS)
    return read_client(pages)


def _request_workers(connection: Connection, config: Config) -> Admitted:
    """Request workers, and wait until the pool has granted them.

    Raises:
        PoolError: the pool has refused, or had no workers in time.
    """
    deadline = time.monotonic() + config.start_timeout
    cores = (config.threads or 1) * config.workers
    connection.send(encode(Ask(config.workers, cores, config.grace, config.detach)))
    message, _ = answer(connection, (Admitted, Waits), deadline)
    if isinstance(message, Waits):
        sessions_ahead = message.ahead
        try:
            message, _ = answer(connection, (Admitted,), deadline)
        except PoolError as error:
            if type(error) is not PoolError or connection.closed is not None:
                raise
            raise PoolError(
                f"the pool had no {config.workers} worker(s) free within {config.start_timeout:g} "
                f"s: {sessions_ahead} session(s) were before this one. Wait longer with "
                f"lazygt.session(workers=Workers(start_timeout=...)), or see `lazygt pool status`."
            ) from None
    assert isinstance(message, Admitted)
    return message
