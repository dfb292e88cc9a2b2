"""Connection with exactly-once, in-order messages over unreliable TCP connections."""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum, auto
from itertools import count
from typing import NamedTuple

import zmq

from lazygt.errors import ProtocolError
from lazygt.host.timer import Alarm
from lazygt.net.channel import COPY_BELOW, probe
from lazygt.net.mailbox import Frame
from lazygt.net.tcp import (
    GOODBYE,
    MESSAGE,
    OVERHEAD,
    RECEIVED,
    Monitor,
    close_in_children,
    kernel_state,
    pack,
    set_number,
)

# -- reliable message stream (go-back-N) -----------------------------------------------------------
# Messages have the sequence numbers 1, 2, 3, ... in each direction. The carrier keeps their order
# and loses messages only when it breaks. Then all unacknowledged messages are sent again from the
# first on, and the receiver drops duplicates. `Stream` is pure: it has no clock and no socket.

_ACK_MESSAGES = 32
_ACK_BYTES = 1 << 20


class Arrival(Enum):
    """Classification of a message by its receiver."""

    NEXT = auto()  #: the next message in order
    REPLAYED = auto()  #: a duplicate
    AHEAD = auto()  #: a message after a gap; it will be sent again with the lost ones


class Stream:
    """One end of a stream: unacknowledged sent messages, and the number of the last received one.

    Attributes:
        last_received: number of the last message received in order.
        last_acknowledged: last number that was acknowledged to the peer.
    """

    def __init__(self) -> None:
        self._unacknowledged: deque[tuple[bytearray, int]] = deque()
        self._numbers = count(1)
        self._next = 1
        self._highest = 0
        self.last_received = 0
        self.last_acknowledged = 0
        self._bytes_to_acknowledge = 0

    # -- sending -------------------------------------------------------------------------------

    def put(self, message: bytearray) -> None:
        """Number a message and append it, atomically for finalizers and KeyboardInterrupts."""
        self._unacknowledged.extend(zip((message,), self._numbers, strict=False))

    def due(self) -> tuple[bytearray, int] | None:
        """Return the next message to send and its number; `sent` confirms it."""
        if not self._unacknowledged:
            return None
        index = max(0, self._next - self._unacknowledged[0][1])
        return self._unacknowledged[index] if index < len(self._unacknowledged) else None

    def is_first_time(self, number: int) -> bool:
        """Return whether a message has not been sent before."""
        return number > self._highest

    def sent(self, number: int) -> None:
        """Confirm that a message was given to the carrier."""
        self._highest = max(self._highest, number)
        self._next = number + 1

    def resend_all(self) -> None:
        """Schedule all unacknowledged messages again, after the carrier broke."""
        self._next = 0

    def drop_acknowledged(self, number: int) -> None:
        """Drop the messages up to ``number``, which the peer has received.

        Raises:
            ProtocolError: there is no such message yet.
        """
        if number > self._highest:
            raise ProtocolError(
                f"message {number} is acknowledged, and {self._highest} was the last one sent"
            )
        while self._unacknowledged and self._unacknowledged[0][1] <= number:
            self._unacknowledged.popleft()

    @property
    def pending(self) -> int:
        """Bytes of the unacknowledged messages."""
        return sum(len(message) for message, _ in self._unacknowledged)

    # -- receiving -----------------------------------------------------------------------------

    def arrival(self, number: int) -> Arrival:
        """Classify an arrived message by its number."""
        if number <= self.last_received:
            return Arrival.REPLAYED
        return Arrival.NEXT if number == self.last_received + 1 else Arrival.AHEAD

    def take(self, number: int, size: int) -> None:
        """Note the arrival of message ``number``, the next one; ``size`` in bytes."""
        self.last_received = number
        self._bytes_to_acknowledge += size

    @property
    def owes_acknowledgement(self) -> bool:
        """True if some received messages are not acknowledged."""
        return self.last_acknowledged < self.last_received

    @property
    def must_acknowledge(self) -> bool:
        """True if the acknowledgement must not be delayed: many messages or bytes have arrived."""
        messages = self.last_received - self.last_acknowledged
        return messages >= _ACK_MESSAGES or self._bytes_to_acknowledge >= _ACK_BYTES

    def acknowledge(self) -> int:
        """Return the number to acknowledge, and note that it is acknowledged."""
        self.last_acknowledged, self._bytes_to_acknowledge = self.last_received, 0
        return self.last_received


# -- connection ------------------------------------------------------------------------------------

#: Seconds for which a dead link is tolerated, and for which a peer that hung up may come back.
GRACE, GONE_AFTER = 60.0, 1.0

_ACK_SECONDS = 0.05  # delay of an acknowledgement, unless a message carries it earlier
_LINGER_MS = 1000  # most time for a goodbye after the socket was closed
_WATCH_SECONDS = 1.0  # seconds between two checks for answers to sent messages


class Line(ABC):
    """Carrier of connections: a dialed socket, or the listener that many share.

    Args:
        context: the process's ZMQ context.
        kind: type of the ZMQ socket.
        events: ZMQ's events of the socket's TCP connections that are needed.

    Attributes:
        fd: descriptor to poll; see `Connection`.
    """

    counts: dict[str, int]

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, events: int) -> None:
        self.lock, self._open = threading.RLock(), True
        with ExitStack() as undo:
            self._socket = context.socket(kind)
            undo.callback(self._socket.close, 0)
            self._monitor = Monitor(context, self._socket, events)
            undo.callback(self._monitor.close)
            self._timer = Alarm()
            undo.callback(self._timer.close)
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            for fd in (int(self._socket.getsockopt(zmq.FD)), self._monitor.fd, self._timer.fd):
                self._epoll.register(fd, select.EPOLLIN)
            self.fd = self._epoll.fileno()
            undo.pop_all()

    @abstractmethod
    def pump(self) -> None:
        """Read all that has arrived, and pass it to the connections. The caller holds the lock."""

    @abstractmethod
    def transmit(self, connection: Connection, message: bytes | bytearray) -> bool:
        """Pass a message to ZMQ; False if the peer is not connected."""

    @abstractmethod
    def detach(self, connection: Connection) -> None:
        """Detach an ended connection; ``fd`` becomes readable, which wakes a waiting thread."""

    @abstractmethod
    def release(self, connection: Connection) -> None:
        """Release a connection's resources; its ``fd`` must not be polled any more."""

    def schedule_tick(self, at: float) -> None:
        """Make ``fd`` readable at ``at`` or earlier; `pump` then calls `Connection.tick`."""
        if self._open:
            self._timer.schedule(at)

    def rearm(self) -> None:
        """Make ``fd`` readable if a message has come: a use of the socket may clear its signal."""
        if self._has_input():
            self._timer.schedule()

    def _has_input(self) -> bool:
        """Return whether the socket has a message to read."""
        return self._open and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _close_socket(self) -> None:
        """Close the socket; ZMQ still sends its queued messages for up to a second (linger)."""
        self._open = False
        self._monitor.close()
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.close()

    def _close_descriptor(self) -> None:
        """Close ``fd``, which must not be polled any more."""
        self._epoll.close()
        self._timer.close()


class Patience(NamedTuple):
    """Timeouts in seconds: for a dead link, and for the return of a peer that hung up."""

    grace: float = GRACE
    gone_after: float = GONE_AFTER


class Connection:
    """One end of a connection, with exactly-once, in-order delivery; from `dial` or `accept`.

    Nothing here waits. To wait, poll ``fd`` for reading after a `take` that returned None: the
    descriptor is readable when a message has come, and when ``closed`` may have been set. It
    signals once for all arrivals (ZMQ's descriptors are edge-triggered), so call `take` until it
    returns None. All connections of a listener share its descriptor: after a signal, check each
    connection, and `Listener.accept`. A client's descriptor stays readable after ``closed`` was
    set, until `close` is called.

    `send` may be called from any thread, also in a finalizer. `take` and `pump` are for one thread.

    Attributes:
        id: random bytes that only both ends know.
        peer: the name of the peer's key; on the client's side the endpoint.
        hello: the client's data, an argument of `dial`.
        closed: reason for the end of messages; None while messages may still come. `take` still
            returns earlier arrivals.
        given_up: True if the host had ended the connection before a reconnection of this client.
    """

    def __init__(
        self,
        carrier: Line,
        id: bytes,
        peer: str,
        hello: bytes,
        max_message: int,
        timeouts: Patience,
    ) -> None:
        self.id, self.peer, self.hello = id, peer, hello
        self.closed: str | None = None
        self.given_up = False
        self._carrier, self._max_message, self._timeouts = carrier, max_message, timeouts
        self._stream = Stream()
        self._ready: deque[tuple[list[memoryview], int]] = deque()
        self._sending = False
        self._disconnected_at: float | None = None
        #: descriptor of the TCP socket, for queries of the kernel's state; -1 if none is known
        self.tcp = -1
        close_in_children(self)

    # -- for everybody -------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Descriptor to poll for reading."""
        return self._carrier.fd

    @property
    def away(self) -> float:
        """Seconds since the peer was last connected; 0.0 while it is.

        The kernel reports this, not the peer: a busy or stopped process counts as connected.
        """
        with self._carrier.lock:
            if self._disconnected_at is not None:
                return time.monotonic() - self._disconnected_at
            return 0.0 if self.closed else kernel_state(self.tcp).silence

    @property
    def has_mail(self) -> bool:
        """True if `take` has a message that was read by a `pump` before."""
        return bool(self._ready)

    @property
    def pending(self) -> int:
        """Bytes that were sent and that the peer has not acknowledged."""
        with self._carrier.lock:
            return self._stream.pending

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; its copy is retained until the peer acknowledges it. Never waits.

        Messages sent after the connection was closed are dropped.

        Raises:
            ValueError: it is longer than ``max_message`` bytes.
        """
        message = pack(MESSAGE, frames)
        if len(message) > self._max_message:
            raise ValueError(
                f"a message of {len(message) - OVERHEAD} bytes is over the limit of "
                f"{self._max_message - OVERHEAD}"
            )
        with self._carrier.lock:
            if self.closed is None:
                self._stream.put(message)
                self.flush()
                self._carrier.rearm()

    def take(self) -> list[memoryview] | None:
        """Return the frames of the next message, or None if there is none."""
        if not self._ready:
            self.pump()
        return self._ready.popleft()[0] if self._ready else None

    def pump(self) -> None:
        """Read and acknowledge arrivals, and notice lost peers."""
        with self._carrier.lock:
            self._carrier.pump()

    def close(self, reason: str = "done") -> None:
        """Close the connection; ZMQ sends earlier messages if the peer is there within a second."""
        with self._carrier.lock:
            if self.closed is None:
                self._stream.put(pack(GOODBYE, (reason.encode(),)))
                self.flush()
            self.end(f"closed here: {reason}")
            self._carrier.release(self)

    # -- for the carrier, which has acquired its lock ------------------------------------------

    def flush(self) -> None:
        """Send the messages that are due, with those that a finalizer adds meanwhile."""
        while not self._sending and self._disconnected_at is None and self._stream.due():
            self._sending = True
            try:
                self._send_due()
            finally:
                self._sending = False

    def _send_due(self) -> None:
        """Number and send the messages that are due, until the peer is disconnected."""
        stream = self._stream
        while (entry := stream.due()) is not None:
            message, number = entry
            if stream.is_first_time(number):
                set_number(message, number, stream.acknowledge())
            if not self._transmit(message):
                self.mark_disconnected()
                return
            stream.sent(number)

    def receive(self, number: int, acknowledged: int, kind: bytes, view: list[memoryview]) -> None:
        """Handle one frame of the peer.

        Raises:
            ProtocolError: the frame is invalid.
        """
        stream = self._stream
        stream.drop_acknowledged(acknowledged)
        if kind == RECEIVED:
            return
        if kind not in (MESSAGE, GOODBYE) or not number:
            raise ProtocolError(f"a message of kind {kind!r} and number {number}")
        if self._ready:  # an interrupt may have skipped `stream.take` below
            stream.last_received = max(stream.last_received, self._ready[-1][1])
        arrival = stream.arrival(number)
        if arrival is Arrival.REPLAYED:
            self._carrier.counts["replayed"] += 1
        if arrival is not Arrival.NEXT:
            return
        if kind == GOODBYE:
            reason = bytes(view[0]).decode(errors="replace") if view else ""
            self.end(f"the other end closed the connection: {reason}")
            return
        self._ready.append((view, number))
        stream.take(number, sum(map(len, view)))
        if stream.must_acknowledge:
            self.acknowledge()
        else:
            self._carrier.schedule_tick(time.monotonic() + _ACK_SECONDS)

    def acknowledge(self) -> bool:
        """Acknowledge the received messages; False if the peer is not connected."""
        return self._transmit(pack(RECEIVED, (), self._stream.acknowledge()))

    def _transmit(self, message: bytes | bytearray) -> bool:
        """Pass a message to the carrier, and schedule a check of the link."""
        self.watch()
        return self._carrier.transmit(self, message)

    def watch(self) -> None:
        """Schedule a check of the link for unacknowledged messages."""
        self._carrier.schedule_tick(time.monotonic() + _WATCH_SECONDS)

    @property
    def last_received(self) -> int:
        """Number of the last message received."""
        return self._stream.last_received

    def resume(self, received: int) -> None:
        """Continue on a new TCP connection, from the peer's last received number.

        Raises:
            ProtocolError: the number is impossible.
        """
        self._stream.drop_acknowledged(received)
        self.mark_connected()
        self._stream.resend_all()
        self.flush()

    def mark_disconnected(self) -> None:
        """Record that the TCP connection has ended, and schedule the end of the grace period."""
        if self._disconnected_at is None and self.closed is None:
            self._disconnected_at, self.tcp = time.monotonic(), -1
            self._carrier.schedule_tick(self._disconnected_at + self._timeouts.gone_after)

    def mark_connected(self) -> None:
        """Record that the peer is connected again, though it may not have sent anything yet."""
        self._disconnected_at = None
        self.watch()

    def tick(self, now: float) -> None:
        """Handle a scheduled tick: acknowledge, and end the connection to a lost peer."""
        if self._stream.owes_acknowledgement:
            self.acknowledge()
        if self.closed is not None:
            return
        if self._disconnected_at is None:
            self._check_link(now)
        elif now < self._disconnected_at + self._timeouts.gone_after:
            self._carrier.schedule_tick(self._disconnected_at + self._timeouts.gone_after)
        elif self.acknowledge():
            self.mark_connected()
        else:
            self.end(
                f"{self.peer} is gone: its process has ended, or the network between closed the "
                f"connection, and it did not come back within {self._timeouts.gone_after:g} s"
            )

    def _check_link(self, now: float) -> None:
        """End the connection if the peer's kernel has not answered for the grace period.

        Without messages in flight the kernel's keepalive probes end a dead TCP connection. The
        kernel's own limit for messages in flight (TCP_USER_TIMEOUT) would also end a connection to
        a busy peer that does not read its messages.
        """
        state = kernel_state(self.tcp)
        if 0.0 < state.silence >= self._timeouts.grace:
            self.end(f"{self.peer} did not answer for {self._timeouts.grace:g} s: the link is down")
        elif state.waits or self._stream.pending:
            self._carrier.schedule_tick(now + _WATCH_SECONDS)

    def end(self, reason: str) -> None:
        """Mark the connection as closed, with the reason: no message will come any more."""
        if self.closed is None:
            self.closed = reason
        self._carrier.detach(self)


def configure(sock: zmq.Socket[bytes], max_message: int, grace: float) -> None:
    """Set the options that both ends' sockets share, with a keepalive of ``grace`` s."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),
        (zmq.MAXMSGSIZE, max_message),
        (zmq.IPV6, 1),
        (zmq.HANDSHAKE_IVL, 10_000),
    ):
        sock.setsockopt(option, value)
    probe(sock, grace)


def queue_message(
    sock: zmq.Socket[bytes], message: bytes | bytearray, flags: int = zmq.NOBLOCK
) -> None:
    """Pass a message to ZMQ, without a copy if it is long."""
    sock.send(message, flags, copy=len(message) < COPY_BELOW)
