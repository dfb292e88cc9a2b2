"""Client of a pool: published values, and administration."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import zmq

from lazygt.errors import PoolError, ProtocolError
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.net.channel import MAX_MESSAGE_BYTES
from lazygt.net.connection import Connection, dial
from lazygt.net.keys import KeyFile
from lazygt.net.status_file import Pages, decoded
from lazygt.pool.published import PIECE_BYTES, Rows
from lazygt.pool.requests import (
    TO_CLIENT,
    DrainAll,
    EvictOne,
    Fetch,
    Forget,
    Listed,
    Names,
    Ok,
    PoolReport,
    Publish,
    RequestFailed,
    Status,
    Value,
    ValuePiece,
)
from lazygt.runtime.cluster.agent import Connected
from lazygt.runtime.wire import Message, decode, encode, received

M = TypeVar("M", bound=Message)

_POLL_SECONDS = 0.5
#: Bytes of a message besides its payload: numbers, lengths, headers.
_OVERHEAD_BYTES = 64 << 10
#: Bytes of the longest message between a pool and its clients.
LONGEST = MAX_MESSAGE_BYTES + _OVERHEAD_BYTES


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
