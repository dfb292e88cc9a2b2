"""Sockets between the client and a worker, and their access rules.

A channel is one ZMQ socket pair: the worker's `WorkerChannel` (ROUTER) and the client's
`ClientChannel` (DEALER).
The client makes the listening socket and the worker inherits it, so there is no race for a port or
a path, and messages sent before the worker runs are queued.

A message is one ZMQ frame: a kind (one byte), a count, the lengths, and the frames. It is one frame
because one ZMQ call is atomic for Python: a Ctrl-C can fall before it or after it, never inside.

Every connection begins with HELLO: the protocol version and the session's secret token. The first
peer with the right token owns the channel. Any other peer gets one ERROR and is ignored from then
on.

If client and worker have mailboxes, small messages of kind DATA go there once the channel has an
owner. All messages arrive in the order of sending: to ensure that, each end counts the socket's
messages.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from lazygt.errors import ProtocolError, SecurityError
from lazygt.host.files import bind
from lazygt.net.mailbox import Cores, Frame, Mailboxes, spin

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 30

HELLO, WELCOME, DATA, ERROR, SHUTDOWN, PING, PONG = (bytes([code]) for code in b"HWDESPO")

_RECONNECT_MS = 10
_RECEIVE_QUEUE = 1000  # messages; beyond it the sender's own queue grows, not the worker's memory
_REMEMBERED_STRANGERS = 4096
COPY_BELOW = 64 << 10  # bytes; pyzmq's zero-copy path costs more than it saves for less


# -- messages ----------------------------------------------------------------------------------


def pack(kind: bytes, frames: Sequence[Frame] = ()) -> bytes:
    """Return one message as bytes: 5 bytes, 4 bytes a frame, and the frames."""
    views = [memoryview(frame).cast("B") for frame in frames]
    header = struct.pack(f"<cI{len(views)}I", kind, len(views), *(len(view) for view in views))
    return b"".join((header, *views))


def length_of(frames: Sequence[Frame]) -> int:
    """Return the size in bytes of the message that `pack` makes of the frames."""
    return 5 + sum(4 + memoryview(frame).nbytes for frame in frames)


def check_length(nbytes: int, most: int) -> None:
    """Raise ValueError if a message is longer than ``most`` bytes."""
    if nbytes > most:
        raise ValueError(f"a message of {nbytes} bytes is over the limit of {most}")


def unpack(message: Frame) -> tuple[bytes, list[memoryview]]:
    """Return the kind and the frames of a message; the frames are views into it.

    Raises:
        ProtocolError: the message was not made by `pack`.
    """
    view = memoryview(message)
    try:
        kind, count = struct.unpack_from("<cI", view)
        lengths = struct.unpack_from(f"<{count}I", view, 5)
    except struct.error as error:
        raise ProtocolError(f"a message of {len(view)} bytes is cut short") from error
    begin = 5 + 4 * count
    if begin + sum(lengths) != len(view):
        raise ProtocolError(f"a message of {len(view)} bytes contradicts its own lengths")
    frames = []
    for length in lengths:
        frames.append(view[begin : begin + length])
        begin += length
    return kind, frames


# -- keys and addresses ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE keys of one worker's channels (Z85 text); the client keeps its own pair to itself."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> Keys:
        """Generate a random key pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Address:
    """Endpoint of a worker, and the inherited descriptor of its listening socket."""

    endpoint: str
    fd: int


def new_token() -> bytes:
    """Return the session's secret, 32 random bytes, which makes a peer the owner."""
    return secrets.token_bytes(32)


def listen_local(path: Path) -> Address:
    """Listen on a UNIX socket. Its directory's permissions control access."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bind(listener, path)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return Address(f"ipc://{path}", listener.detach())


def listen_tcp(host: str, keys: Keys | None, port: int = 0) -> Address:
    """Listen on TCP, on a free port by default.

    Raises:
        SecurityError: there are no keys.
    """
    check_exposure(host, keys)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A service that is started anew gets its port back at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    name = f"[{host}]" if family is socket.AF_INET6 else host
    return Address(f"tcp://{name}:{listener.getsockname()[1]}", listener.detach())


def probe(sock: zmq.Socket[bytes], seconds: float) -> None:
    """Enable TCP keepalive on a ZMQ socket.

    The kernel probes a quiet connection about once a second, and closes it after ``seconds``
    without an answer.
    """
    interval = max(1, math.ceil(seconds / 100))  # seconds; the kernel probes 127 times at most
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, round(seconds / interval)))


def check_exposure(host: str, keys: Keys | None) -> None:
    """Raise SecurityError for an address that strangers can reach without keys.

    That is any TCP address, since all users of the machine can reach the loopback interface.
    """
    if keys is None:
        raise SecurityError(
            f"refusing to listen on {host!r} without CURVE keys: anyone who reaches it could run "
            f"code in the worker. Use the local transport, or a session with keys."
        )


class Doorbell:
    """State of a ZMQ socket's edge-triggered descriptor.

    ZMQ's descriptor signals an arrival once, and any use of the socket may clear the signal. The
    state shows if a receive can succeed: a failed one costs an exception.

    Attributes:
        drained: True if a receive found nothing and the socket has not been used since.
        has_signalled: poll function; its result is not empty if the descriptor has signalled since.
    """

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self.fd = int(sock.getsockopt(zmq.FD))
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        self.has_signalled = partial(poller.poll, 0)
        self.drained = False


# -- the worker's end --------------------------------------------------------------------------


class WorkerChannel:
    """Worker's end of a channel, used by one thread.

    Args:
        context: the process's ZMQ context.
        address: result of `listen_local` or `listen_tcp`; the server closes its descriptor.
        token: the session's secret.
        keys: CURVE keys of this worker; required if the address is TCP.
        max_message: bytes; a peer that announces a longer message is disconnected before it is
            stored.
        mailboxes: the worker's end of the mailboxes, if there are any.
        cores: decides whether to spin for the mailbox's next message.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: Address,
        token: bytes,
        keys: Keys | None = None,
        max_message: int = MAX_MESSAGE_BYTES,
        mailboxes: Mailboxes | None = None,
        cores: Cores | None = None,
    ) -> None:
        if address.endpoint.startswith("tcp://"):
            check_exposure(address.endpoint[6:].rpartition(":")[0], keys)
        self._token = token
        self._owner: bytes | None = None
        self._strangers: dict[bytes, None] = {}
        self.socket = context.socket(zmq.ROUTER)
        _configure(self.socket, max_message)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.setsockopt(zmq.USE_FD, address.fd)
        self.socket.bind(address.endpoint)
        self._mailboxes, self._cores = mailboxes, cores
        #: message read from the socket, and not yet returned by `receive`
        self._next_message: list[bytes] = []
        self._doorbell = Doorbell(self.socket)
        self._poller = select.poll()
        self._poller.register(self._doorbell.fd, select.POLLIN)
        self._watched_eventfd: int | None = None
        if mailboxes is not None:
            self._poller.register(mailboxes.wakes, select.POLLIN)

    def watch(self, eventfd: int) -> None:
        """Let ``receive`` also return None after a write to an eventfd, which it reads."""
        self._watched_eventfd = eventfd
        self._poller.register(eventfd, select.POLLIN)

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """Wait for a message; return its kind and frames if the owner sent it.

        Returns:
            None if the message was a hello or another peer's, which is handled here, or if the
            watched eventfd was written.
        """
        waits_in_zmq = self._mailboxes is None and self._watched_eventfd is None
        if waits_in_zmq or self._owner is None:
            message, self._next_message = self._next_message, []
            return self._unpack_from_owner(message or self._receive_multipart(0))
        while True:
            try:
                frames = None if self._mailboxes is None else self._next_in_mailbox(self._mailboxes)
            except ProtocolError as error:
                self._drop(self._owner, str(error))
                return None
            if frames is not None:
                return DATA, frames
            if self._next_message:
                message, self._next_message = self._next_message, []
                return self._unpack_from_owner(message)
            if not self._doorbell.drained:
                # Read the mailbox once more: its messages may precede this one.
                with suppress(zmq.Again):
                    self._next_message = self._receive_multipart(zmq.NOBLOCK)
                    continue
                self._doorbell.drained = True
            for fd, _ in self._poller.poll():
                if fd == self._doorbell.fd:
                    self._doorbell.drained = False
                elif fd == self._watched_eventfd:
                    os.eventfd_read(fd)
                    return None
                elif self._mailboxes is not None:
                    self._mailboxes.clear_wakeup()

    def _next_in_mailbox(self, mailboxes: Mailboxes) -> list[memoryview] | None:
        """Take the mailbox's next message, spinning briefly for it; None if there is none."""
        if not self._next_message and self._cores is not None and self._cores.enough:
            spin((mailboxes,), self._doorbell.has_signalled)
        return mailboxes.take()

    def _receive_multipart(self, flags: int) -> list[bytes]:
        """Read one message from the socket: the sender's identity and the ZMQ frames."""
        self._doorbell.drained = False
        return self.socket.recv_multipart(flags)

    def _unpack_from_owner(self, message: list[bytes]) -> tuple[bytes, list[memoryview]] | None:
        """Unpack a message of the owner's; None for another peer's, which is admitted or refused.

        Args:
            message: the sender's identity and the ZMQ frames.
        """
        identity, *zmq_frames = message
        if identity in self._strangers:
            return None
        try:
            kind, frames = _unpack_single(zmq_frames)
            if identity != self._owner:
                self._admit(identity, kind, frames)
                return None
        except ProtocolError as error:
            self._drop(identity, str(error))
            return None
        if self._mailboxes is not None and kind == DATA:
            self._mailboxes.received += 1
        return kind, frames

    def reply(self, kind: bytes, frames: Sequence[Frame] = ()) -> None:
        """Send to the owner. Does nothing without an owner, or if it has gone."""
        if self._owner is None:
            return
        mailboxes = self._mailboxes if kind == DATA else None
        if mailboxes is None:
            self._send(self._owner, kind, frames)
        elif not mailboxes.put(frames):
            self._send(self._owner, kind, frames)
            mailboxes.sent += 1

    def drop_owner(self, reason: str) -> None:
        """Send the owner an ERROR with the reason, and ignore it from now on."""
        if self._owner is not None:
            self._drop(self._owner, reason)

    def close(self) -> None:
        self.socket.close(0)

    def _admit(self, identity: bytes, kind: bytes, frames: list[memoryview]) -> None:
        """Make the sender of a valid hello the owner; raise ProtocolError otherwise."""
        check_hello(kind, frames, self._token)
        if self._owner is not None:
            raise ProtocolError("this worker already has an owner")
        self._owner = identity
        self._send(identity, WELCOME, ())

    def _drop(self, identity: bytes, reason: str) -> None:
        """Send a peer an ERROR with the reason, and ignore its later messages."""
        self._send(identity, ERROR, (reason.encode(),))
        if identity == self._owner:
            self._owner = None
        if len(self._strangers) >= _REMEMBERED_STRANGERS:
            # A peer that was dropped from the table gets one more error reply.
            del self._strangers[next(iter(self._strangers))]
        self._strangers[identity] = None

    def _send(self, identity: bytes, kind: bytes, frames: Sequence[Frame]) -> None:
        """Send a message to a peer; a peer that has gone is ignored."""
        message = pack(kind, frames)
        self._doorbell.drained = False
        try:
            self.socket.send(identity, zmq.SNDMORE)
            self.socket.send(message, 0, copy=len(message) < COPY_BELOW)
        except zmq.ZMQError as error:
            # The peer has gone between its message and the answer.
            if error.errno != zmq.EHOSTUNREACH:
                raise


def check_hello(kind: bytes, frames: Sequence[Frame], token: bytes) -> None:
    """Raise ProtocolError unless this is a hello of our version with the right token."""
    if kind != HELLO or len(frames) != 2:
        raise ProtocolError("the first message of a connection must be a hello")
    version = bytes(frames[0])
    if version != _version():
        raise ProtocolError(f"this worker speaks protocol version {PROTOCOL_VERSION}")
    if not hmac.compare_digest(bytes(frames[1]), token):
        raise ProtocolError("the token is not this session's")


def _unpack_single(zmq_frames: list[bytes]) -> tuple[bytes, list[memoryview]]:
    """Unpack a message of exactly one ZMQ frame."""
    if len(zmq_frames) != 1:
        raise ProtocolError(f"a message is one frame, not {len(zmq_frames)}")
    return unpack(zmq_frames[0])


# -- the client's end --------------------------------------------------------------------------


class ClientChannel:
    """Client's end of a channel's socket.

    `send` may be called from any thread, also in a finalizer. Nothing here waits: `send` queues a
    message, `take` returns messages that have arrived. To wait, poll ``fd`` for reading, after a
    `take` that found nothing. A send may clear that signal, since ZMQ's descriptors are
    edge-triggered; it then returns True.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        token: bytes,
        server_key: str | None = None,
        max_message: int = MAX_MESSAGE_BYTES,
        mailboxes: Mailboxes | None = None,
    ) -> None:
        self._max_message, self._mailboxes = max_message, mailboxes
        self._lock = threading.RLock()
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, max_message)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if server_key is not None:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
        self._endpoint = endpoint
        self._socket.connect(endpoint)
        self.doorbell = Doorbell(self._socket)
        self.fd = self.doorbell.fd
        self.send(HELLO, (_version(), token))

    def send(self, kind: bytes, frames: Sequence[Frame] = ()) -> bool:
        """Queue a message; return True if a message has arrived, so a waiting thread must wake.

        Raises:
            ValueError: the message is longer than ``max_message`` bytes.
            zmq.ZMQError: the channel is closed.
        """
        message = pack(kind, frames)
        check_length(len(message), self._max_message)
        mailboxes = self._mailboxes if kind == DATA else None
        with self._lock:
            self.doorbell.drained = False
            try:
                self._socket.send(message, zmq.NOBLOCK, copy=len(message) < COPY_BELOW)
            except zmq.Again:
                return False  # disconnected: there is no one to send to
            if mailboxes is not None:
                mailboxes.sent += 1
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take(self, inbox: deque[bytes]) -> bool:
        """Move one arrived message to ``inbox``; False if there is none."""
        with self._lock:
            try:
                # `extend` over `map` receives and appends in C: a KeyboardInterrupt between the
                # two would lose the message.
                self.doorbell.drained = False
                inbox.extend(map(self._socket.recv, (zmq.NOBLOCK,)))
            except zmq.Again:
                self.doorbell.drained = True
                return False
        return True

    def disconnect(self) -> None:
        """Stop connecting to a dead worker; messages sent from now on are lost."""
        with self._lock:
            self._socket.disconnect(self._endpoint)

    def close(self) -> None:
        with self._lock:
            self._socket.close(0)


def _configure(sock: zmq.Socket[bytes], max_message: int) -> None:
    """Set the options that both ends' sockets share."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, max_message)
    sock.setsockopt(zmq.IPV6, 1)


def _version() -> bytes:
    return b"lazygt" + PROTOCOL_VERSION.to_bytes(2, "little")
