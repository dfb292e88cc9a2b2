"""Connections between hosts: encrypted, authenticated, and reliable.

    listener = Listener(context, "10.0.0.1", 7000, keys, keyring.allows, 1 << 30)
    connection = listener.accept()                                              # at one end
    connection = dial(context, "tcp://10.0.0.1:7000", keys, server_public, ...)  # at the other

Both ends prove a key (CURVE) before any of their messages is read. A network failure delays
messages and loses none; the end of a process is noticed within about a second. See docs/security.md
for the threats that this covers.
"""

from __future__ import annotations

import secrets
import select
import time
from collections import deque
from collections.abc import Callable

import zmq

from lazygt.errors import (
    AccessDenied,
    ConnectionLost,
    LazyGTError,
    ProtocolError,
    SecurityError,
    VersionMismatch,
)
from lazygt.net.channel import Keys
from lazygt.net.listening import Listener
from lazygt.net.reliable import (
    GONE_AFTER,
    GRACE,
    Connection,
    Line,
    Patience,
    configure,
    queue_message,
)
from lazygt.net.tcp import (
    FAILED,
    REFUSED,
    WELCOME,
    Refusal,
    pack_hello,
    parse,
    read_refusal,
    versions_here,
)

# -- client's end ----------------------------------------------------------------------------------
# It is a DEALER socket, which ZMQ reconnects by itself.

_RECONNECT_MS = 50
_DISTRUST_AFTER = 3  # failed handshakes in a row, after which the listener counts as another's
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED


def dial(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    keys: Keys,
    server_public: str,
    hello: bytes,
    max_message: int,
    timeout: float,
    *,
    grace: float = GRACE,
    gone_after: float = GONE_AFTER,
) -> Connection:
    """Connect to a `Listener`, which may begin to listen during the wait.

    Args:
        context: the process's ZMQ context.
        endpoint: ``tcp://HOST:PORT``.
        keys: this client's own keys.
        server_public: the public key that the listener must have (Z85).
        hello: value of `Connection.hello` on the listener's side.
        max_message: bytes of the longest message either way, with 4 for each of its frames and 21.
        timeout: seconds to wait.
        grace: seconds after which a link that is down counts as lost.
        gone_after: seconds within which a connection that has ended must be restored.

    Raises:
        ConnectionLost: the listener does not answer in time.
        AccessDenied: the listener does not know our key, or does not have the expected one.
        VersionMismatch: the listener runs another lazygt, torch or Python.
        SecurityError: one of the given keys is no key.
    """
    timeouts = Patience(grace, gone_after)
    carrier = _Dialed(context, endpoint, keys, server_public, hello, max_message, timeouts)
    try:
        carrier.wait(time.monotonic() + timeout)
    except BaseException:
        carrier.release(carrier.connection)
        raise
    return carrier.connection


class _Dialed(Line):
    """Carrier of one connection."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: Keys,
        server_public: str,
        hello: bytes,
        max_message: int,
        timeouts: Patience,
    ) -> None:
        super().__init__(context, zmq.DEALER, _EVENTS)
        self.counts = {"foreign": 0, "malformed": 0, "replayed": 0, "version": 0}
        self.endpoint = endpoint
        # ZMQ's own names of peers begin with a zero, so this one does not.
        self.connection = Connection(
            self, b"c" + secrets.token_bytes(16), endpoint, hello, max_message, timeouts
        )
        self._tcp_number, self._welcomed, self._failures = 0, False, 0
        self._refusal: LazyGTError | None = None
        self._inbox: deque[zmq.Frame] = deque()
        try:
            self._connect(keys, server_public, max_message, timeouts.grace)
        except BaseException:
            self.release(self.connection)
            raise

    def _connect(self, keys: Keys, server_public: str, max_message: int, grace: float) -> None:
        """Configure the socket, with the keys of both ends, and connect it."""
        configure(self._socket, max_message, grace)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.ROUTING_ID, self.connection.id)
        try:
            self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
        except (zmq.ZMQError, ValueError) as error:
            raise SecurityError(
                f"{self.endpoint}: a key is not one of CURVE's, which have 40 characters: make "
                f"one with `lazygt keys new`"
            ) from error
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise ConnectionLost(
                self.endpoint, f"{error}: expected an endpoint such as tcp://HOST:PORT"
            ) from error

    # -- dialing -------------------------------------------------------------------------------

    def wait(self, deadline: float) -> None:
        """Wait for the welcome, or raise the reason of its absence."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while True:
            with self.lock:
                self.pump()
                if self._refusal is not None:
                    raise self._refusal
                if self._welcomed:
                    return
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ConnectionLost(
                    self.endpoint,
                    "nobody answers there in time. Is it the right address and port, does the "
                    "host run, and does a firewall let it through?",
                )
            poller.poll(1000 * remaining + 1)

    # -- interface of a carrier ----------------------------------------------------------------

    def pump(self) -> None:
        """Handle the events of the monitor, arrived frames, and an expired timer."""
        if not self._open:
            return
        for event, value in self._monitor.events():
            self._handle_event(event, value)
            if not self._open:
                return
        receive: Callable[..., zmq.Frame] = self._socket.recv
        while self._has_input():
            # `extend` over `map` moves a frame between the queues in C, so a KeyboardInterrupt
            # can't lose it. A frame that is handled twice has a known number the second time.
            self._inbox.extend(map(receive, (zmq.NOBLOCK,), (False,)))
            while self._inbox:
                self._handle_frame(self._inbox[0].buffer)
                self._inbox.popleft()
        if self.connection.closed is None and self._timer.clear():
            self.connection.tick(time.monotonic())

    def transmit(self, connection: Connection, message: bytes | bytearray) -> bool:
        """See ``Line.transmit``."""
        if not self._open:
            return False
        try:
            queue_message(self._socket, message)
        except zmq.Again:  # ZMQ has given up
            return False
        # ZMQ queues messages while there is no peer.
        return connection._disconnected_at is None

    def detach(self, connection: Connection) -> None:
        """See ``Line.detach``."""
        if self._open:
            self._close_socket()
            self._timer.schedule()

    def release(self, connection: Connection) -> None:
        """See ``Line.release``."""
        self.detach(connection)
        if not self._epoll.closed:
            self._close_descriptor()

    # -- events --------------------------------------------------------------------------------

    def _handle_event(self, event: int, value: int) -> None:
        """Handle one event of the monitor."""
        if event == zmq.EVENT_CONNECTED:
            self.connection.tcp = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
            self.connection.mark_connected()
            self._send_hello()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse(Refusal("access", "it does not know our key, or knows it no longer"))
        elif event & FAILED:
            self._failures += 1
            if self._failures >= _DISTRUST_AFTER:
                self._refuse(
                    Refusal("access", "it does not have the key that we expect, or is no lazygt")
                )
        elif event == zmq.EVENT_DISCONNECTED:
            self.connection.tcp = -1
            if self._welcomed:
                self.connection.mark_disconnected()

    def _send_hello(self) -> None:
        """Send a hello on a new TCP connection, with the number of the last received message."""
        self._tcp_number += 1
        connection = self.connection
        is_first = not self._welcomed
        queue_message(
            self._socket,
            pack_hello(self._tcp_number, is_first, connection.hello, connection.last_received),
        )

    def _handle_frame(self, frame: memoryview) -> None:
        """Handle a welcome, a refusal or a message; malformed frames are counted."""
        try:
            number, acknowledged, kind, view = parse(frame)
            if kind == WELCOME:
                self._handle_welcome(number, acknowledged)
            elif kind == REFUSED:
                self._refuse(read_refusal(view))
            else:
                self.connection.receive(number, acknowledged, kind, view)
        except ProtocolError:
            self.counts["malformed"] += 1

    def _handle_welcome(self, turn: int, received: int) -> None:
        """Handle the answer to a hello; answers to older hellos only count as a welcome."""
        self._welcomed = True
        if turn == self._tcp_number:
            self.connection.resume(received)

    def _refuse(self, refusal: Refusal) -> None:
        """Record the listener's refusal; it ends a connection that was established."""
        self._refusal = _error_of(self.endpoint, refusal)
        if self._welcomed:
            self.connection.given_up = refusal.kind == "over"
            self.connection.end(str(self._refusal))


def _error_of(endpoint: str, refusal: Refusal) -> LazyGTError:
    """Return the exception for a refusal."""
    if refusal.kind == "version":
        peer_versions = refusal.versions
        differences = (
            versions_here().differences(peer_versions) if peer_versions is not None else []
        )
        return VersionMismatch(endpoint, differences, refusal.why)
    if refusal.kind == "access":
        return AccessDenied(endpoint, refusal.why)
    return ConnectionLost(endpoint, refusal.why)


__all__ = ["Connection", "Listener", "dial"]
