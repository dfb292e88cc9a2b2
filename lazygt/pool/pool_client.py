"""Client of a pool: published values, administration, and the link of a session to its workers."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch
import zmq

from lazygt.config import Config
from lazygt.errors import ConnectionLost, LazyGTError, PoolError, ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.net.connection import Connection, dial
from lazygt.net.keys import KeyFile
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import Page, Pages, StatusFile, decoded, read_client
from lazygt.pool.published import PIECE_BYTES, Rows
from lazygt.pool.requests import (
    LONGEST,
    TO_CLIENT,
    Admitted,
    AreYouThere,
    Ask,
    Doing,
    DrainAll,
    EvictOne,
    Fetch,
    Forget,
    Leave,
    Listed,
    Names,
    Ok,
    PoolReport,
    Publish,
    RequestFailed,
    Status,
    Value,
    ValuePiece,
    Waits,
    Watched,
    is_ours,
)
from lazygt.runtime.cluster.agent import Connected
from lazygt.runtime.cluster.cluster_link import ClusterLink
from lazygt.runtime.cluster.opening import link_spec
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.wire import Message, decode, encode, received

M = TypeVar("M", bound=Message)

_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class PublishedName:
    """Description of a published value of a pool."""

    name: str
    nbytes: int
    client: str  # name of the key that published it
    shared: bool  # True if other keys may fetch it


def connect(
    on: str, key: str | os.PathLike[str] | KeyFile, timeout: float, grace: float = 30.0
) -> Connection:
    """Connect to a pool.

    Args:
        grace: seconds for which the link may be dead.

    Raises:
        ConnectionLost, AccessDenied, VersionMismatch, SecurityError: see `Pool`.
    """
    file = key if isinstance(key, KeyFile) else KeyFile.read(Path(key))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    return dial(context, on, file.keys, file.server, b"pool", LONGEST, timeout, grace=grace)


def answer(connection: Connected, kinds: tuple[type[M], ...], deadline: float) -> tuple[M, Any]:
    """Wait for an answer of one of these kinds; return the message and its frames.

    Raises:
        PoolError: the pool has refused, the connection has ended, or the deadline has passed.
    """
    poller = select.poll()
    poller.register(connection.fd, select.POLLIN)
    while True:
        while (frames := connection.take()) is not None:
            message = decode(frames[:1], TO_CLIENT)
            if isinstance(message, RequestFailed):
                raise message.error()
            if isinstance(message, kinds):
                return message, frames[1:]
        if connection.closed is not None:
            raise PoolError(f"the connection to the pool has ended: {connection.closed}")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise PoolError("the pool has not answered in time; see `lazygt pool status`")
        poller.poll(1_000 * min(remaining, _POLL_SECONDS))


class Pool:
    """A pool of workers: ``lazygt.Pool("tcp://HOST:PORT", KEYFILE)``.

    Use it as a context manager, or call `close`. Sessions are opened with
    ``lazygt.session(pool=PoolAccess(...))``.

    Args:
        on: the pool's address.
        key: the client's key file, of ``lazygt keys new``, or its content.
        timeout: seconds that the pool may take to answer.

    Raises:
        ConnectionLost: no pool answers there.
        AccessDenied: the pool does not know this key.
        VersionMismatch: the pool has another lazygt, torch or Python.
        SecurityError: the file is no key file, or others may read it.
    """

    def __init__(
        self, on: str, key: str | os.PathLike[str] | KeyFile, timeout: float = 30.0
    ) -> None:
        self._timeout = timeout
        self._connection = connect(on, key, timeout)

    def names(self) -> list[PublishedName]:
        """List the values that this key may fetch."""
        reply = self._request(Names(), Listed)
        return [PublishedName(*fields) for fields in reply.rows]

    def publish(
        self, name: str, value: torch.Tensor | Mapping[str, torch.Tensor], *, shared: bool = False
    ) -> None:
        """Publish a tensor, or tensors by name, for later clients.

        A value of the same name and key is replaced.

        Args:
            shared: True if clients with other keys may fetch it, too.

        Raises:
            OverQuota: this key may not have so many bytes in the pool.
            TypeError: the value is neither a tensor nor a mapping of tensors.
        """
        tensors = {"": value} if isinstance(value, torch.Tensor) else dict(value)
        if not all(isinstance(t, torch.Tensor) for t in tensors.values()):
            raise TypeError(
                f"publish({name!r}, ...): expected a tensor or a mapping of names to tensors, such "
                f"as model.state_dict()"
            )
        dense = {key: _dense(t) for key, t in tensors.items()}
        metas = tuple((key, _meta(t)) for key, t in dense.items())
        self._request(Publish(name, metas, shared), Ok)
        for piece in _pieces(dense):
            self._connection.send(encode(ValuePiece(), [piece]))
        if any(meta.nbytes for _, meta in metas):
            self._answer(Ok)

    def fetch(self, name: str) -> Any:
        """Return a published value: a CPU tensor, or a dict of them.

        Raises:
            PoolError: nothing is published under that name for this key.
        """
        metas = self._request(Fetch(name), Value).rows
        data = bytearray()
        total = sum(meta.nbytes for _, meta in metas)
        while len(data) < total:
            _, (piece,) = self._answer_with_frames(ValuePiece)
            data += piece
        tensors = dict(_tensors(metas, memoryview(data)))
        return tensors[""] if list(tensors) == [""] else tensors

    def forget(self, name: str) -> None:
        """Remove the value that this key has published under a name.

        Raises:
            PoolError: this key has published nothing under that name.
        """
        self._request(Forget(name), Ok)

    def status(self) -> dict[str, Any]:
        """Return the pool's report as plain values.

        Other keys' sessions are only counted, unless this key may administer.
        """
        report: dict[str, Any] = json.loads(self._request(Status(), PoolReport).text)
        return report

    def look(self) -> tuple[dict[str, Any], dict[str, Pages]]:
        """Return `status`, and the status pages of clients and workers by session.

        Raises:
            ProtocolError: the pool's answer has no pages.
        """
        self._connection.send(encode(Status(pages=True)))
        report, frames = self._answer_with_frames(PoolReport)
        if not frames:
            raise ProtocolError("a pool's report without its status pages")
        return json.loads(report.text), decoded(frames[0], dict[str, Pages])

    def drain(self) -> None:
        """Stop admitting sessions; the pool ends when its last session has ended.

        Needs a key that may administer.
        """
        self._request(DrainAll(), Ok)

    def evict(self, session: str) -> None:
        """End a session of this key, or any session if this key may administer.

        Raises:
            PoolError: the pool has no session of that name.
        """
        self._request(EvictOne(session), Ok)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, message: Message, kind: type[M]) -> M:
        self._connection.send(encode(message))
        return self._answer(kind)

    def _answer(self, kind: type[M]) -> M:
        return self._answer_with_frames(kind)[0]

    def _answer_with_frames(self, kind: type[M]) -> tuple[M, Any]:
        return answer(self._connection, (kind,), time.monotonic() + self._timeout)


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the CPU, contiguous."""
    return t.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _meta(t: torch.Tensor) -> TensorMeta:
    """Return the meta of a contiguous tensor of the same shape and dtype."""
    shape = tuple(t.shape)
    return intern(shape, contiguous_stride(shape), t.dtype, 0, False, False)


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the tensors' bytes in pieces of at most ``PIECE_BYTES``."""
    for t in tensors.values():
        flat = t.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(flat), PIECE_BYTES):
            yield flat[begin : begin + PIECE_BYTES]


def _tensors(metas: Rows, data: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors from their metas and consecutive bytes."""
    begin = 0
    for name, meta in metas:
        piece = data[begin : begin + meta.nbytes]
        begin += meta.nbytes
        yield name, received(piece).view(meta.dtype).view(meta.shape)


# -- link of a session to workers of a pool ------------------------------------------------------

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
        timeout: seconds that the pool may take for an answer.

    Attributes:
        error: the reason for the session's end.
        status_page: returns the client's status page, for observers of the pool.
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

    def update_status(self) -> None:
        """See ``Link.update_status``; also answers the pool while nothing waits for messages."""
        self._receive_arrived()
        super().update_status()

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
