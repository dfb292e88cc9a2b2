"""The control connection: small messages beside the data, over a local socket.

A message is 4 bytes of length and a msgpack map with a ``kind``. The socket lies in a directory
that only its user can enter. The kernel names the peer's process, and its end is noticed at once
even if a child that it forked still holds the socket.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from lazygt.errors import ProtocolError, SecurityError
from lazygt.host.files import bind
from lazygt.runtime.launch.session_directory import SessionDirectory

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
_LONGEST_SECONDS = 2_000_000  # poll takes no longer ones
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

ControlMessage = Mapping[str, Any]


class PeerGone(Exception):
    """The other end's process or connection has ended."""


class Deadline:
    """A point in time, ``seconds`` after its construction.

    Raises:
        ValueError: the seconds are no number, negative, or above 2,000,000.
    """

    def __init__(self, seconds: float) -> None:
        try:
            fits = 0 <= seconds <= _LONGEST_SECONDS
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"timeout={seconds!r}: expected seconds, 0 to {_LONGEST_SECONDS:g}")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def expired(self) -> bool:
        return self.remaining == 0.0


def readable(fds: Iterable[int], seconds: float | None) -> set[int]:
    """Return the descriptors with data or an end; wait at most ``seconds`` (None: for ever)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1e3)}


class ControlConnection:
    """One end of a control connection; used by one thread.

    Attributes:
        pid: process id of the peer.

    Raises:
        SecurityError: the peer belongs to another user.
        PeerGone: the peer has ended already.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._torn = False
        sock.setblocking(False)
        size = _CREDENTIALS.size
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            sock.close()
            raise SecurityError(f"process {self.pid} of another user ({uid}) asked for weights")
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            sock.close()
            raise PeerGone from error
        except OSError:  # there are no descriptors left
            sock.close()
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors to poll for reading: the socket, and the peer's pidfd."""
        return self._sock.fileno(), self._pidfd

    def send(self, message: ControlMessage, deadline: Deadline) -> None:
        """Send a message.

        Raises:
            PeerGone: the peer has gone, or an earlier message was interrupted.
            TimeoutError: the peer has not read earlier messages by the deadline.
        """
        body = msgspec.msgpack.encode(message)
        if self._torn:
            raise PeerGone
        self._torn = True  # until all of it is on its way
        data = memoryview(_LENGTH.pack(len(body)) + body)
        while data:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                self._wait_for_room(deadline)
                continue
            except OSError as error:
                raise PeerGone from error
            data = data[sent:]
        self._torn = False

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have arrived; does not wait.

        Raises:
            PeerGone: the peer has gone, and all its messages have been yielded.
            ProtocolError: the peer does not follow the protocol.
        """
        ended = self._fill()
        while (message := self._take()) is not None:
            yield message
        if ended or self.has_ended(0.0):
            raise PeerGone

    def has_ended(self, seconds: float) -> bool:
        """Return whether the peer's process has ended; wait at most ``seconds`` for it."""
        return bool(readable([self._pidfd], seconds))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._pidfd < 0:
            return
        self._sock.close()
        os.close(self._pidfd)
        self._pidfd = -1

    def _wait_for_room(self, deadline: Deadline) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        poller.register(self._pidfd, select.POLLIN)
        ready = dict(poller.poll(deadline.remaining * 1e3))
        if self._pidfd in ready:
            raise PeerGone
        if not ready:
            raise TimeoutError(f"process {self.pid} does not read its messages")

    def _fill(self) -> bool:
        """Read all available bytes; return whether the connection has ended."""
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._received += data

    def _take(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a control message of {length} bytes is too long")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = msgspec.msgpack.decode(body, type=dict[str, Any])
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            raise ProtocolError(f"a control message cannot be read: {error}") from error
        if not isinstance(message.get("kind"), str):
            raise ProtocolError("a control message must be a map with a kind")
        return message


class ControlListener:
    """Listening socket in a directory that only its user can enter.

    Attributes:
        address: path of the socket.
    """

    def __init__(self) -> None:
        self._directory = SessionDirectory()
        self.address = str(self._directory.path / "transfer")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind(self._sock, self.address)
        self._sock.listen(64)
        self._sock.setblocking(False)

    @property
    def fd(self) -> int:
        """Descriptor to poll for reading; -1 after `close`."""
        return self._sock.fileno()

    def accept(self) -> ControlConnection | None:
        """Accept a connection; None if none waits, or if it has ended or is another user's."""
        try:
            return ControlConnection(self._sock.accept()[0])
        except (BlockingIOError, PeerGone, SecurityError):
            return None

    def close(self) -> None:
        """Close and remove the socket."""
        self._sock.close()
        self._directory.close()


def connect(address: str) -> ControlConnection:
    """Connect to the socket at a path.

    Raises:
        OSError: nobody listens there.
        PeerGone, SecurityError: see `ControlConnection`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return ControlConnection(sock)
