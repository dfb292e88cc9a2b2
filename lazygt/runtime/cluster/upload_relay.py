"""Pipelined chain broadcast of the client's uploads: a host's copy, and its relay to the next host.

The client sends each piece to the first host alone. Every other host *follows* its predecessor: its
agent connects to that host's agent, sends the number of its last piece, and receives the later
pieces as soon as they arrive. So each host sends a piece once at most. The client decides the order
of the chain, see `upload_progress`.

Pieces are numbered in the client's order of sending, and each host stores them in that order, from
any source; duplicates are dropped. A host that can't follow another reports its last piece to the
client, and gets the rest from the client.

For followers a host stores only the offsets of pieces: a piece is read from the host's own copy
when it is sent, a few at a time. By then a later piece may have the same offset. That is harmless:
the client reuses an offset only after all workers on all hosts have read the old piece.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice

import zmq

from lazygt.errors import LazyGTError, ProtocolError
from lazygt.net.connection import Connection, Listener, dial
from lazygt.net.keys import derived
from lazygt.net.mailbox import Frame
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.protocol import Alone, Begin, Follow, Has, Listens, Mirror
from lazygt.runtime.wire import Message, decode, encode

_log = logging.getLogger("lazygt")

#: Bytes of an upload in one message: small, so that the next host gets the first piece early.
UPLOAD_BYTES = 1 << 20
#: Bytes that may be in flight to a follower, and in this process's memory meanwhile.
WINDOW_BYTES = 16 * UPLOAD_BYTES
#: Seconds to reach the agent that is to be followed.
MEET_SECONDS = 10.0
_LONGEST = UPLOAD_BYTES + (1 << 16)
#: Pieces after which their arrival is reported to the client.
_REPORT_INTERVAL = 32

SendMessage = Callable[[Message, Sequence[Frame]], None]


@cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the ZMQ context of connections between agents.

    The client's connection has another context, so both encrypt in parallel.
    """
    return zmq.Context()


class UploadSource(threading.Thread):
    """Thread that connects to the followed agent.

    Attributes:
        connection: the connection; None until there is one.
        why: the error if the agent can't be reached; else "".
    """

    def __init__(self, endpoint: str, token: bytes, eventfd: int) -> None:
        super().__init__(name="lazygt-follow", daemon=True)
        self.connection: Connection | None = None
        self.why = ""
        self._endpoint, self._token, self._eventfd = endpoint, token, eventfd
        self._lock = threading.Lock()
        self._left = False

    def run(self) -> None:
        """Connect to the agent, and write the eventfd with the result."""
        connection, reason = None, ""
        keys, server = derived(self._token, "follower"), derived(self._token, "source").public
        try:
            connection = dial(_context(), self._endpoint, keys, server, b"", _LONGEST, MEET_SECONDS)
        except (LazyGTError, zmq.ZMQError) as error:
            reason = str(error)
        with self._lock:
            if not self._left:
                self.connection, self.why = connection, reason
                os.eventfd_write(self._eventfd, 1)
            elif connection is not None:
                connection.close("another is followed")

    def leave(self) -> None:
        """Close the connection, now or once it exists; the eventfd is not written any more."""
        with self._lock:
            self._left = True
        if self.connection is not None:
            self.connection.close("another is followed")


@dataclass(slots=True)
class Follower:
    """Agent that follows this one."""

    connection: Connection
    #: number of the last piece that it has or was sent; None until it has reported one
    number: int | None = None


class Mirrors:
    """This host's copy of the client's upload arena.

    Args:
        address: address at which the agents of other hosts reach this one; "": there is none, and
            the client's `Follow` messages are refused.
        send: sends a message to the client.

    Attributes:
        number: number of the last piece stored.
        passed_bytes: bytes sent to followers.
    """

    def __init__(self, address: str, send: SendMessage) -> None:
        self._address, self._send = address, send
        self._arena: Arena | None = None
        self.number = self.passed_bytes = 0
        self._session = self._turn = self._reported = 0
        self._first = self._done = 0
        #: number, offset and bytes of pieces that a host may still lack
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._token = b""
        self._listener: Listener | None = None
        self._followers: list[Follower] = []
        self._source: UploadSource | None = None
        self._followed: Connection | None = None
        self._epoll = select.epoll() if address else None
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if address else -1
        if self._epoll is not None:
            self._epoll.register(self._eventfd, select.EPOLLIN)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that are readable when there may be something to `pump`."""
        return () if self._epoll is None else (self._epoll.fileno(),)

    def arena(self, first: int) -> Arena:
        """Return the arena, with a first segment of ``first`` bytes if it is new."""
        if self._arena is None:
            self._arena = Arena.create(first)
        return self._arena

    @property
    def held(self) -> int:
        """Bytes of memory in use by the arena."""
        return 0 if self._arena is None else self._arena.held

    # -- messages of the client ----------------------------------------------------------

    def begin(self, message: Begin) -> None:
        """Start to count and relay pieces; without a token, stop that."""
        self._leave_chain()
        self._pieces.clear()
        self._session, self._turn, self._done = message.session, 0, 0
        self.number = self._reported = message.number
        if message.token:
            self._send(Listens(message.session, self._listen(message.token)), ())

    def follow(self, message: Follow) -> None:
        """Receive pieces from another agent; without an endpoint, from the client."""
        self._leave_source()
        self._turn = message.turn
        if not (message.endpoint and self._listener):
            self._request_from_client("", met=True)
            return
        self._source = UploadSource(message.endpoint, self._token, self._eventfd)
        self._source.start()

    def take(self, message: Mirror, data: Frame) -> None:
        """Store a piece, from any source.

        Raises:
            ProtocolError: an earlier piece is missing, or this one is outside the arena.
        """
        if 0 < message.number <= self.number:
            return
        if message.number > self.number + 1:
            raise ProtocolError(f"piece {message.number} of the uploads came after {self.number}")
        write(self.arena(message.first), message.offset, data)
        if not message.number:  # pieces are not counted
            return
        self.number, self._first = message.number, message.first
        if self._listener is not None:
            self._pieces.append((message.number, message.offset, memoryview(data).nbytes))
            self._done = max(self._done, message.done)
            while self._pieces and self._pieces[0][0] <= self._done:
                self._pieces.popleft()
            self._pass_on()
        if self.number - self._reported >= _REPORT_INTERVAL:
            self._reported = self.number
            self._send(Has(self._session, self.number), ())

    # -- between agents ------------------------------------------------------------------

    def pump(self) -> None:
        """Receive pieces from the followed agent, and send followers the pieces that they lack."""
        if self._epoll is None or not self._epoll.poll(0):
            return
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)
        self._receive_from_followers()
        self._receive_from_source()
        self._pass_on()

    def close(self) -> None:
        """Release everything."""
        self._leave_chain()
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._eventfd)
        if self._arena is not None:
            self._arena.close()

    def _listen(self, secret: str) -> str:
        """Listen for followers; return the endpoint, "" if they can't connect."""
        if self._epoll is None:
            return ""
        try:
            token = bytes.fromhex(secret)
            keys, follower_key = derived(token, "source"), derived(token, "follower").public
            listener = Listener(
                _context(), self._address, 0, keys, {follower_key: "follower"}.get, _LONGEST
            )
        except (OSError, ValueError, LazyGTError, zmq.ZMQError) as error:
            _log.warning("uploads can't be passed on from %s: %s", self._address, error)
            return ""
        self._token, self._listener = token, listener
        self._epoll.register(listener.fd, select.EPOLLIN)
        return listener.address

    def _receive_from_followers(self) -> None:
        """Accept followers, read their piece numbers, and remove those that have gone."""
        if self._listener is None:
            return
        while (connection := self._listener.accept()) is not None:
            self._followers.append(Follower(connection))
        for follower in list(self._followers):
            try:
                while (frames := follower.connection.take()) is not None:
                    report = decode(frames, (Has,))
                    assert isinstance(report, Has)
                    follower.number = self._check(report)
            except ProtocolError as error:
                follower.connection.close(str(error))
            if follower.connection.closed is not None:
                self._followers.remove(follower)

    def _check(self, report: Has) -> int:
        """Return a follower's piece number; ProtocolError if the piece after it was dropped."""
        oldest = self._pieces[0][0] if self._pieces else self.number + 1
        if report.session != self._session or report.number + 1 < oldest:
            raise ProtocolError(f"the pieces after {report.number} are not here any more")
        return report.number

    def _pass_on(self) -> None:
        """Send each follower the pieces that it lacks, as far as it keeps up."""
        for follower in self._followers:
            if follower.number is None or follower.number >= self.number or not self._pieces:
                continue
            begin = max(follower.number + 1 - self._pieces[0][0], 0)
            for number, offset, nbytes in islice(self._pieces, begin, None):
                if follower.connection.pending >= WINDOW_BYTES:
                    break
                piece = self.arena(self._first).view(offset, nbytes).numpy().data
                message = encode(Mirror(self._first, offset, number, self._done), [piece])
                follower.connection.send(message)
                follower.number = number
                self.passed_bytes += nbytes

    def _receive_from_source(self) -> None:
        """Receive pieces from the followed agent; request the rest from the client if it fails."""
        source = self._source
        if source is None:
            return
        connection = source.connection
        if connection is not None and self._followed is None:
            assert self._epoll is not None
            self._epoll.register(connection.fd, select.EPOLLIN)
            self._followed = connection
            connection.send(encode(Has(self._session, self.number)))
        reason = source.why
        if connection is not None:
            reason = self._receive_pieces(connection) or connection.closed or ""
        if reason:
            self._leave_source()
            self._request_from_client(reason, met=connection is not None)

    def _receive_pieces(self, connection: Connection) -> str:
        """Store the pieces that have arrived on a connection; return its error, or ""."""
        try:
            while (frames := connection.take()) is not None:
                message = decode(frames, (Mirror,))
                assert isinstance(message, Mirror)
                self.take(message, frames[1])
        except (ProtocolError, IndexError) as error:
            return f"its messages make no sense: {error}"
        return ""

    def _request_from_client(self, reason: str, met: bool) -> None:
        """Request the next pieces from the client.

        Args:
            reason: the error of the source; "": none.
            met: True if the source had been reached.
        """
        self._send(Alone(self._session, self._turn, self.number, met, reason), ())

    def _leave_source(self) -> None:
        """Stop following another agent."""
        if self._followed is not None:
            assert self._epoll is not None
            self._epoll.unregister(self._followed.fd)
        if self._source is not None:
            self._source.leave()
        self._source = self._followed = None

    def _leave_chain(self) -> None:
        """Stop following, and drop all followers."""
        self._leave_source()
        self._followers.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            assert self._epoll is not None
            self._epoll.unregister(listener.fd)
            listener.close("it passes nothing on any more")


def write(arena: Arena, offset: int, data: Frame) -> None:
    """Write bytes at an offset of an arena."""
    target = arena.view(offset, memoryview(data).nbytes).numpy()
    memoryview(target.data).cast("B")[:] = memoryview(data).cast("B")
