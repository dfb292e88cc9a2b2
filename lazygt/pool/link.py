"""A session's link to workers of a pool."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from lazygt.config import Config
from lazygt.errors import LazyGTError, PoolError
from lazygt.graph.mesh import Mesh
from lazygt.pool.client import answer, connect
from lazygt.pool.messages import TO_CLIENT, Admitted, Ask, Failed, Leave, Ok, Waits, is_ours
from lazygt.runtime.cluster.connection import Connection
from lazygt.runtime.cluster.link import ClusterLink
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.opening import link_spec
from lazygt.runtime.wire import decode, encode

_LEAVE_SECONDS = 10.0


class SessionConnection:
    """A connection to a pool once a session was admitted: what is not for the session's host is
    dealt with here. See ``Connected``.

    Attributes:
        error: why the pool has ended the session.
        left: the session has ended, or goes on without us.
    """

    def __init__(self, connection: Connection) -> None:
        self.fd = connection.fd
        self._connection = connection
        self.error: PoolError | None = None
        self.left = False

    @property
    def closed(self) -> str | None:
        """Why nothing comes any more, or None."""
        if self.left:
            return "the session has left the pool"
        return str(self.error) if self.error is not None else self._connection.closed

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message. Does not wait."""
        if self.closed is None:
            self._connection.send(frames)

    def take(self) -> list[memoryview] | None:
        """The next message of the session's host, if there is one.

        Raises:
            PoolError: the pool has ended the session.
        """
        while (frames := self._connection.take()) is not None:
            if not is_ours(frames[0]):
                return frames
            message = decode(frames[:1], TO_CLIENT)
            if isinstance(message, Failed):
                self.error = message.error()
            self.left = self.left or isinstance(message, Ok)
        if self.error is not None and not self.left:
            raise self.error
        return None

    def close(self, reason: str = "done") -> None:
        """See `leave`."""
        self.leave()

    def leave(self) -> None:
        """Say that we are done, and hang up once the pool has heard all that was sent."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        until = time.monotonic() + _LEAVE_SECONDS
        self.send(encode(Leave()))
        while self.closed is None and (left := until - time.monotonic()) > 0:
            try:
                self.take()
            except PoolError:
                break
            if self.closed is None:
                poller.poll(1_000 * min(left, 0.5))
        self.left = True
        self._connection.close()


class PoolLink(ClusterLink):
    """Workers of a pool; the session's `Link`.

    Raises:
        ConnectionLost, AccessDenied, VersionMismatch, SecurityError: see `Pool`.
        PoolFull, PoolDraining, GangTooLarge, OverQuota: the pool has refused.
        PoolError: it had no workers in time.
    """

    def __init__(self, config: Config, mesh: Mesh, copier: str) -> None:
        assert config.on is not None
        assert config.key is not None
        connection = connect(config.on, config.key, config.start_timeout, config.grace)
        try:
            self.name = _admitted(connection, config)
            self._pool = SessionConnection(connection)
            self._detach = config.detach
            host = RemoteHost(config.on, self._pool)
            super().__init__(link_spec(config, mesh, copier), 0, [(host, config.workers)])
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """End the workers, or leave them alone where the session is detached. Idempotent."""
        if self._detach:
            self._pool.leave()
        try:
            super().close()
        except LazyGTError:  # the pool has ended it before
            super().close()
        finally:
            self._pool.leave()


def _admitted(connection: Connection, config: Config) -> str:
    """Ask for workers, and wait for them; the session's name.

    Raises:
        PoolError: there are none, or not in time.
    """
    until = time.monotonic() + config.start_timeout
    cores = (config.threads or 1) * config.workers
    connection.send(encode(Ask(config.workers, cores, config.grace, config.detach)))
    message, _ = answer(connection, (Admitted, Waits), until)
    if isinstance(message, Waits):
        ahead = message.ahead
        try:
            message, _ = answer(connection, (Admitted,), until)
        except PoolError as error:
            if type(error) is not PoolError or connection.closed is not None:
                raise
            raise PoolError(
                f"the pool had no {config.workers} worker(s) free within {config.start_timeout:g} "
                f"s: {ahead} session(s) were before this one. Wait longer with "
                f"lazygt.session(start_timeout=...), or see `lazygt pool status`."
            ) from None
    assert isinstance(message, Admitted)
    return message.session
