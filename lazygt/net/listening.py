"""Host's end of connections: a listener with one ROUTER socket for many clients."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from weakref import WeakKeyDictionary

import zmq
from zmq.auth.thread import ThreadAuthenticator

from lazygt.errors import ProtocolError
from lazygt.net.channel import Keys, check_exposure, listen_tcp
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
    HELLO,
    PROTOCOL_VERSION,
    WELCOME,
    Hello,
    Refusal,
    Strangers,
    close_in_children,
    pack,
    pack_refusal,
    parse,
    read_hello,
    set_number,
    versions_here,
)

# -- access control by public key ------------------------------------------------------------------
# ZMQ's authentication protocol (ZAP) calls `Guard` at each handshake, before it reads a message.

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_domains = count()
_RELEASE_SECONDS, _LOOK_SECONDS = 10.0, 0.005
#: Context -> its authenticator, of which it can have one, shared by all its listeners.
_shared: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator] = (
    WeakKeyDictionary()
)


class Guard:
    """Authenticator of one listener's peers, by their public keys.

    Args:
        context: context of the listener's socket.
        allowed: returns the name of a public key (Z85), or None.

    Attributes:
        domain: the ``ZAP_DOMAIN`` for the listener's socket.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: Callable[[str], str | None]
    ) -> None:
        self.domain = f"lazygt-{next(_domains)}"
        self._context, self._allowed = context, allowed
        with _lock:
            authenticator = _shared.get(context)
            if authenticator is None:
                authenticator = ThreadAuthenticator(context)
                # Other sockets of this context, without a domain, must accept everybody as before.
                authenticator.configure_curve_callback("*", _Everybody())
                _start(authenticator)
                _shared[context] = authenticator
            authenticator.configure_curve_callback(self.domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is allowed; called by pyzmq's authenticator."""
        try:
            return self._allowed(key.decode()) is not None
        except Exception:  # noqa: BLE001 - ZMQ's thread must go on; the client is refused
            _log.exception("a client was refused, since its key could not be looked up")
            return False

    def close(self) -> None:
        """Unregister; the last guard of a context ends the authenticator."""
        with _lock:
            authenticator = _shared[self._context]
            del authenticator.credentials_providers[self.domain]
            if len(authenticator.credentials_providers) == 1:
                del _shared[self._context]
                authenticator.stop()


def _start(authenticator: ThreadAuthenticator) -> None:
    """Start an authenticator, with retries until ZMQ has released its predecessor's address.

    Raises:
        zmq.ZMQError: the address is not released in time, or there are no sockets left.
    """
    until = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            authenticator.start()
        except zmq.ZMQError as error:
            authenticator.stop()
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
        else:
            return
        time.sleep(_LOOK_SECONDS)


class _Everybody:
    """Authentication callback that allows all keys."""

    def callback(self, domain: str, key: bytes) -> bool:
        return True


# -- listener --------------------------------------------------------------------------------------

_ID_BYTES = 17
_RECEIVE_QUEUE = 1000  # messages of a client; beyond it the sender's own queue grows
_READ_BATCH = 1000  # frames read in one call of `pump`
_MAX_REMEMBERED = 4096  # ids of ended connections, and refused peers
_CHECK_BUSY, _CHECK_IDLE = 0.1, 1.0  # seconds between two checks for revoked keys
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED
_CHECK_DELAY = 0.05  # seconds after which ZMQ's sender also knows of a TCP connection's end


class _Accepted(Connection):
    """Connection of a listener, with its key and the count of its TCP connections."""

    key: str
    turn: int


class Listener(Line):
    """TCP listener for clients with allowed keys; used by one thread, except `send`.

    Args:
        context: the process's ZMQ context.
        host: the address or name to listen on.
        port: the port; 0 for a free one.
        keys: keys of this listener; its clients must know the public one.
        allowed: returns the name of a client by its public key (Z85), or None. Called in a thread
            of its own for each handshake, and again while the client is there: a client with a
            revoked key is disconnected within a second.
        max_message: bytes of the longest message, with 4 for each of its frames and 21; a peer that
            announces a longer message is disconnected before it is stored.
        grace: seconds after which a link that is down counts as lost.
        gone_after: seconds within which a connection that has ended must be restored.

    Attributes:
        address: ``tcp://HOST:PORT``.
        fd: descriptor to poll; see `Connection`.
        counts: dropped frames by kind: ``foreign`` (of no connection, or of another's),
            ``malformed``, ``replayed``, ``version``; and ``handshake``, the TCP connections that
            proved no key.
        strangers: origins of the TCP connections that proved no key.
        other_versions: differences of peers that proved a key and run other versions, by address.

    Raises:
        SecurityError: there are no keys.
        OSError: the address can't be listened on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        keys: Keys,
        allowed: Callable[[str], str | None],
        max_message: int,
        *,
        grace: float = GRACE,
        gone_after: float = GONE_AFTER,
    ) -> None:
        check_exposure(host, keys)
        names = ("foreign", "malformed", "replayed", "version", "handshake")
        self.counts = dict.fromkeys(names, 0)
        self.strangers, self.other_versions = Strangers(), dict[str, str]()
        self._allowed, self._max_message = allowed, max_message
        self._timeouts = Patience(grace, gone_after)
        self._connections: dict[bytes, _Accepted] = {}
        self._new: deque[_Accepted] = deque()
        self._ended_ids: dict[bytes, None] = {}
        self._refused_ids: dict[bytes, None] = {}
        self._check_peers = False
        self._keys_checked = self._peers_checked = 0.0
        with ExitStack() as undo:
            address = listen_tcp(host, keys, port)
            undo.callback(os.close, address.fd)
            super().__init__(context, zmq.ROUTER, _EVENTS)
            undo.callback(self._close_descriptor)
            undo.callback(self._close_socket)
            configure(self._socket, max_message, grace)
            self._guard = Guard(context, allowed)
            undo.callback(self._guard.close)
            for option, value in (
                (zmq.RCVHWM, _RECEIVE_QUEUE),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.ROUTER_HANDOVER, 1),
                (zmq.CURVE_SERVER, 1),
                (zmq.ZAP_DOMAIN, self._guard.domain.encode()),
                (zmq.CURVE_SECRETKEY, keys.secret.encode()),
                (zmq.USE_FD, address.fd),
            ):
                self._socket.setsockopt(option, value)
            self._socket.bind(address.endpoint)
            undo.pop_all()
        self.address = address.endpoint
        #: the listening socket
        self.tcp = address.fd
        close_in_children(self)

    # -- for everybody -------------------------------------------------------------------------

    def accept(self) -> Connection | None:
        """Return a client that has connected, or None. Never waits."""
        with self.lock:
            self.pump()
            return self._new.popleft() if self._new else None

    def close(self, reason: str = "the host has closed") -> None:
        """Close all connections, and stop listening."""
        with self.lock:
            if not self._open:
                return
            for connection in list(self._connections.values()):
                connection.close(reason)
            self.tcp = -1
            self._close_socket()
            self._close_descriptor()
        self._guard.close()

    # -- interface of a carrier ----------------------------------------------------------------

    def pump(self) -> None:
        """Read all that has arrived. The caller holds the lock."""
        if not self._open:
            return
        for event, value in self._monitor.events():
            self.strangers.handle_event(event, value)
            if event & FAILED:
                self.counts["handshake"] += 1
            elif event == zmq.EVENT_DISCONNECTED and self._connections:
                self._check_peers = True
                self._timer.schedule(time.monotonic() + _CHECK_DELAY)
        self._check_keys(_CHECK_BUSY)
        self._read()
        if self._timer.clear():
            self._tick()

    def transmit(self, connection: Connection, message: bytes | bytearray) -> bool:
        """See ``Line.transmit``."""
        return self._open and self._send(connection.id, message)

    def detach(self, connection: Connection) -> None:
        """See ``Line.detach``."""
        if self._connections.pop(connection.id, None) is not None:
            _remember(self._ended_ids, connection.id)
            self._timer.schedule()  # a waiting thread must look at `closed`

    def release(self, connection: Connection) -> None:
        """Do nothing: a connection owns no resources here."""

    # -- arrivals ------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read and handle arrived frames, up to `_READ_BATCH`."""
        for _ in range(_READ_BATCH):
            if not self._has_input():
                return
            self._handle_frame(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        self._timer.schedule()

    def _handle_frame(self, zmq_frames: list[zmq.Frame]) -> None:
        """Check the sender of a frame by id and key, and handle the frame."""
        id = zmq_frames[0].bytes
        try:
            if len(zmq_frames) != 2:
                raise ProtocolError(f"a message is one frame, not {len(zmq_frames) - 1}")
            number, acknowledged, kind, view = parse(zmq_frames[1].buffer)
            key = _key_of(zmq_frames[1])
            connection = self._connections.get(id)
            if connection is not None and connection.key != key:
                # This peer could read the messages to that id.
                self.counts["foreign"] += 1
                connection.end(f"somebody with another key came with {connection.peer}'s id")
            elif kind == HELLO:
                self._handle_hello(id, key, zmq_frames[1], acknowledged, view)
            elif connection is not None:
                connection.receive(number, acknowledged, kind, view)
            else:
                self.counts["replayed" if id in self._ended_ids else "foreign"] += 1
        except ProtocolError as error:
            self.counts["malformed"] += 1
            _log.debug("dropped a frame: %s", error)

    def _handle_hello(
        self, id: bytes, key: str, frame: zmq.Frame, received: int, view: list[memoryview]
    ) -> None:
        """Welcome a client, or refuse it for its versions; ignore replayed hellos."""
        hello, user_data = read_hello(view)
        connection = self._connections.get(id)
        if not isinstance(hello, Hello) or versions_here().differences(hello.versions):
            self._record_versions(frame, hello)
            protocol = hello if isinstance(hello, int) else PROTOCOL_VERSION
            reason = f"it speaks protocol version {PROTOCOL_VERSION}, and this client {protocol}"
            self._refuse(id, "version", reason if protocol != PROTOCOL_VERSION else "")
        elif connection is None:
            connection = self._admit(id, key, hello, user_data, received)
            if connection is not None:
                self._welcome(connection, hello.turn, received, frame)
        elif hello.turn <= connection.turn:
            self.counts["replayed"] += 1
        else:
            self._welcome(connection, hello.turn, received, frame)

    def _record_versions(self, frame: zmq.Frame, hello: Hello | int) -> None:
        """Record the versions of a peer that has proved a key and runs other versions."""
        self.counts["version"] += 1
        if len(self.other_versions) < _MAX_REMEMBERED:
            differences = (
                versions_here().differences(hello.versions) if isinstance(hello, Hello) else []
            )
            texts = [
                f"{name} is {here} here and {there} there" for name, here, there in differences
            ]
            address = str(frame.get("Peer-Address"))
            self.other_versions[address] = ", ".join(texts) or "its protocol is another"

    def _welcome(self, connection: _Accepted, turn: int, received: int, frame: zmq.Frame) -> None:
        """Answer a hello, and continue from its sender's position."""
        connection.turn = turn
        connection.tcp = int(frame.get(zmq.SRCFD))
        welcome = pack(WELCOME)
        set_number(welcome, turn, connection.last_received)
        if self._send(connection.id, welcome):
            connection.resume(received)

    def _admit(
        self, id: bytes, key: str, hello: Hello, user_data: bytes, received: int
    ) -> _Accepted | None:
        """Create a connection for a new client; None if the client is refused."""
        name = self._name_of(key, None)
        if len(id) != _ID_BYTES or (received and hello.fresh):
            self.counts["foreign"] += 1
        elif id in self._ended_ids or not hello.fresh:
            self.counts["replayed" if id in self._ended_ids else "foreign"] += 1
            self._refuse(id, "over", "the host has given this connection up, or was started anew")
        elif name is None:
            self.counts["foreign"] += 1
            self._refuse(id, "access", "the host knows our key no longer")
        else:
            connection = _Accepted(self, id, name, user_data, self._max_message, self._timeouts)
            connection.key, connection.turn = key, 0
            self._connections[id] = connection
            self._new.append(connection)
            self._timer.schedule(time.monotonic() + _CHECK_IDLE)
            return connection
        return None

    def _refuse(self, id: bytes, kind: str, reason: str) -> None:
        """Send a peer the reason once: unread messages would fill our memory."""
        if id not in self._refused_ids:
            _remember(self._refused_ids, id)
            self._send(id, pack_refusal(Refusal(kind, reason, versions_here())))

    def _send(self, id: bytes, message: bytes | bytearray) -> bool:
        """Send a message to a peer; False if the peer is not connected."""
        try:
            self._socket.send(id, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        queue_message(self._socket, message)
        return True

    # -- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Check for lost peers and revoked keys, and tick all connections."""
        now = time.monotonic()
        # Peers are also checked at intervals: ZMQ's sender may learn of an end after the event.
        checks_peers = self._check_peers or now >= self._peers_checked + _CHECK_IDLE
        self._check_peers, self._peers_checked = False, now if checks_peers else self._peers_checked
        self._check_keys(_CHECK_IDLE / 2)
        for connection in list(self._connections.values()):
            if checks_peers and not connection.acknowledge():
                connection.mark_disconnected()
            connection.tick(now)
        if self._connections:
            self._timer.schedule(now + _CHECK_IDLE)

    def _name_of(self, key: str, default: str | None) -> str | None:
        """Return the name of a key's client; ``default`` if it can't be looked up now."""
        try:
            return self._allowed(key)
        except OSError as error:
            _log.warning("a client's key could not be looked up: %s", error)
            return default

    def _check_keys(self, interval: float) -> None:
        """Disconnect clients with revoked keys."""
        now = time.monotonic()
        if now < self._keys_checked + interval:
            return
        self._keys_checked = now
        for connection in list(self._connections.values()):
            if self._name_of(connection.key, connection.peer) is None:
                reason = f"the key of {connection.peer} was revoked"
                self._send(connection.id, pack_refusal(Refusal("access", reason)))
                connection.end(reason)


def _key_of(frame: zmq.Frame) -> str:
    """Return the public key (Z85) that the sender of a frame has proved."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError as error:
        raise ProtocolError("a frame of nobody's") from error


def _remember(ids: dict[bytes, None], id: bytes) -> None:
    """Add an id, and drop the oldest beyond `_MAX_REMEMBERED`."""
    if len(ids) >= _MAX_REMEMBERED:
        del ids[next(iter(ids))]
    ids[id] = None
