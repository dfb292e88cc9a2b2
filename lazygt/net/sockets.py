"""UNIX sockets between ranks of one host that share an axis; only their user can connect.

Connections to other hosts are encrypted (see ``rendezvous``). Gloo would listen on a TCP port
instead, where anybody may connect, and hand each message to a thread on either side: for 32 KiB
between two ranks on four cores that took 170 us, and 4 ms in one of ten; a socket takes 11 us.

Messages of a socket are read in order. A send never waits: bytes beyond the socket's buffer are
sent by a thread, so ranks that send to each other cannot deadlock.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

_SEND_BUFFER_BYTES = (
    1 << 20
)  # bytes that a socket is asked to take without a reader; the host may allow fewer
_NUMBER = struct.Struct("<Q")
_HELLO = struct.Struct("<QII")  # number of the group, rank, index of its socket
_WELCOME = b"w"
_CREDENTIALS = struct.Struct("iII")  # pid, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds


class Peer(ABC):
    """Another rank, at the other end of a connection that carries bytes in order.

    Args:
        timeout: seconds to wait for a message.

    Attributes:
        awaited: True if a thread waits in ``receive``.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank, self._timeout, self.awaited = rank, timeout, False

    @property
    def has_sent(self) -> bool | None:
        """True if there is data to receive, or the peer has left; None if unknown.

        Thread-safe.
        """
        return None

    @abstractmethod
    def send(self, data: memoryview, *, given: bool = False) -> None:
        """Send bytes. Does not wait; they may be overwritten as soon as this returns.

        Args:
            given: True if the caller never overwrites them, so that no copy is needed.

        Raises:
            ConnectionError: the other rank has left.
        """

    @abstractmethod
    def receive(self, room: memoryview) -> None:
        """Fill the buffer ``room`` with the next bytes from the peer.

        Raises:
            ConnectionError: the other rank has left.
            TimeoutError: nothing came in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave: the peer reads all sent bytes, and then the end of the connection.

        Does not wait: unsent bytes are sent in the background.
        """

    def send_text(self, text: str) -> None:
        """Send a text of any length; as ``send``."""
        data = text.encode()
        self.send(memoryview(_NUMBER.pack(len(data)) + data))

    def receive_text(self) -> str:
        """Receive a text that the peer sent with ``send_text``; as ``receive``."""
        number = bytearray(_NUMBER.size)
        self.receive(memoryview(number))
        data = bytearray(*_NUMBER.unpack(number))
        self.receive(memoryview(data))
        return data.decode()

    def _left_error(self) -> ConnectionError:
        return ConnectionError(f"rank {self.rank} has left: the connection to it is closed")

    def _timeout_error(self) -> TimeoutError:
        return TimeoutError(f"rank {self.rank} sent nothing for {self._timeout:g} seconds")


class PeerSocket(Peer):
    """Another rank of this host, at the other end of a UNIX socket."""

    def __init__(self, connection: socket.socket, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self._socket = connection
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # the kernel's own timeout: Python's costs a poll a message
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
        self._unsent: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        #: chunks queued by the sender, and sent by the thread; equal: nothing is unsent
        self._queued = self._sent = 0
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        self._closing = False

    @property
    def has_sent(self) -> bool:
        """See `Peer`."""
        if self._socket.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, data: memoryview, *, given: bool = False) -> None:
        """See `Peer`: bytes beyond the socket's buffer are sent by a thread."""
        if self._failure is not None:
            raise self._left_error() from self._failure
        done = 0
        if self._queued == self._sent and len(data):
            try:
                done = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                done = 0
            except OSError as error:
                raise self._left_error() from error
        if done < len(data):
            self._queue_for_thread(data[done:] if given else bytes(data[done:]))

    def receive(self, remaining: memoryview) -> None:
        """See `Peer`."""
        self.awaited = True
        try:
            while len(remaining):
                try:
                    count = self._socket.recv_into(remaining, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    raise self._timeout_error() from None
                except OSError as error:
                    raise self._left_error() from error
                if not count:
                    raise self._left_error()
                remaining = remaining[count:]
        finally:
            self.awaited = False

    def send_descriptor(self, fd: int) -> None:
        """Send a file descriptor, before anything else; as ``send``."""
        try:
            socket.send_fds(self._socket, [_WELCOME], [fd])
        except OSError as error:
            raise self._left_error() from error

    def receive_descriptor(self) -> int:
        """Receive the other's descriptor, as this process's own; as ``receive``."""
        try:
            _, fds, _, _ = socket.recv_fds(self._socket, len(_WELCOME), 1)
        except BlockingIOError:
            raise self._timeout_error() from None
        except OSError as error:
            raise self._left_error() from error
        if not fds:
            raise self._left_error()
        os.set_inheritable(fds[0], False)
        return fds[0]

    def close(self) -> None:
        """See `Peer`: the thread hangs up when it has sent the rest."""
        self._closing = True
        self._unsent.put(None)
        if self._thread is None or not self._thread.is_alive() or self._queued == self._sent:
            self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other has left before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _queue_for_thread(self, data: bytes | memoryview) -> None:
        self._queued += 1
        self._unsent.put(data)
        if self._thread is None:
            name = f"lazygt-send-{self.rank}"
            self._thread = threading.Thread(target=self._send_unsent, name=name, daemon=True)
            self._thread.start()

    def _send_unsent(self) -> None:
        while (data := self._unsent.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._failure = error
                break
            self._sent += 1
        if self._closing:
            self._hang_up()


def late(peers: Sequence[Peer | None]) -> list[int]:
    """Return the ranks that a thread waits for, given peers that are read one after another.

    These have sent nothing yet. Empty if no thread waits.
    """
    remote = [peer for peer in peers if peer is not None]
    for index, peer in enumerate(remote):
        if peer.awaited:
            silent = [other.rank for other in remote[index + 1 :] if other.has_sent is False]
            return silent if peer.has_sent else [peer.rank, *silent]
    return []


def first_to_leave(peers: Sequence[Peer], is_over: Callable[[], bool]) -> int | None:
    """Wait until a rank of this host has closed its socket; return the rank.

    The kernel closes the socket of a process that dies.

    Args:
        is_over: returns whether to stop waiting; called twice a second.

    Returns:
        The rank; None if the wait is over.
    """
    poller = select.poll()
    ranks = {peer.fileno(): peer.rank for peer in peers if isinstance(peer, PeerSocket)}
    for descriptor in ranks:
        poller.register(descriptor, select.POLLRDHUP)
    while not is_over():
        for descriptor, _ in poller.poll(500):
            return None if is_over() else ranks[descriptor]
    return None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Rendezvous settings of a process group."""

    backend: str  # name of the collectives' backend, see ``runtime.collectives.group``
    directory: str  # directory of the rendezvous; only its user can enter it
    timeout: float  # seconds that a rank waits for the others
    mesh: str = ""  # the ranks as a grid, as ``graph.mesh`` reads it; empty: no axes
    #: the endpoint of the session's ``StoreServer`` if ranks are on several hosts; empty if all are
    #: on this one
    store: str = ""
    host: str = ""  # the id of this worker's host: the same for ranks that can open ``directory``
    #: the IP address of the interface at which ranks of other hosts reach this one
    address: str = ""
    #: the secret, as hex, that admits a rank to the store
    token: str = field(default="", repr=False)

    def rendezvous(self, rank: int) -> str:
        """Return the path of a rank's rendezvous socket."""
        return f"{self.directory}/rendezvous{rank}"


class Ends(NamedTuple):
    """Sockets to another rank, one for each independent order of reading."""

    small: Peer  # carries collectives of small values
    large: Peer  # carries the offsets of large values in shared memory; between hosts, the values
    single: Peer  # carries point-to-point values


class Rendezvous:
    """Listener for the connections of other ranks of this host, in this and all later groups.

    The client creates the listening sockets before any rank starts, in a directory that only its
    user can enter. So no rank waits for a socket to appear, and no other user can connect.

    Args:
        listener: a descriptor of this rank's own socket, closed with this.
        path_of: returns the path of a rank's socket.
        timeout: seconds to wait for another rank.
    """

    store: Any = None  # the session's store, for ranks on several hosts; None: there is none

    def __init__(
        self, rank: int, listener: int, path_of: Callable[[int], str], timeout: float
    ) -> None:
        self._rank, self._path_of, self._timeout = rank, path_of, timeout
        self._listener = socket.socket(fileno=listener)
        self._listener.set_inheritable(False)
        #: accepted connections, by the group's number, rank and index of its socket
        self._accepted: dict[tuple[int, int, int], socket.socket] = {}

    def meet(self, number: int, others: Collection[int]) -> dict[int, Ends]:
        """Connect with other ranks, all of which do the same for the group of this number.

        Raises:
            OSError: a rank could not be reached, or did not come in time.
        """
        for key in [key for key in self._accepted if key[0] < number]:
            self._accepted.pop(key).close()  # came for a group that was abandoned
        connections: dict[tuple[int, int], socket.socket] = {}
        try:
            for rank, index in product(others, range(len(Ends._fields))):
                if rank < self._rank:
                    connections[rank, index] = self._connect(number, rank, index)
            for rank, index in product(others, range(len(Ends._fields))):
                if rank > self._rank:
                    connections[rank, index] = self._await_connection(number, rank, index)
            for (rank, _), connection in connections.items():
                if rank < self._rank:
                    self._await_welcome(connection, rank)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        indices = range(len(Ends._fields))
        return {
            rank: Ends(
                *(PeerSocket(connections[rank, index], rank, self._timeout) for index in indices)
            )
            for rank in others
        }

    def close(self) -> None:
        """Stop accepting other ranks. Idempotent."""
        self._listener.close()
        for end in self._accepted.values():
            end.close()
        self._accepted.clear()

    def _connect(self, number: int, rank: int, index: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # again the kernel's: with Python's a socket at which many wait would turn this one away
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(self._timeout))
            connection.connect(self._path_of(rank))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
            connection.settimeout(self._timeout)
            connection.sendall(_HELLO.pack(number, self._rank, index))
        except BlockingIOError:
            connection.close()
            raise self._late_error(rank) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _await_welcome(self, connection: socket.socket, rank: int) -> None:
        """Wait until the connected rank has accepted the connection for this group."""
        try:
            answer = connection.recv(len(_WELCOME))
        except TimeoutError:
            raise self._late_error(rank) from None
        if answer != _WELCOME:
            raise ConnectionError(f"rank {rank} has left")

    def _await_connection(self, number: int, rank: int, index: int) -> socket.socket:
        """Accept connections until an expected one has come; cache the others."""
        deadline = time.monotonic() + self._timeout
        while (number, rank, index) not in self._accepted:
            self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise self._late_error(rank) from None
            self._admit(connection, number)
            if any(later > number and other == rank for later, other, _ in self._accepted):
                raise ConnectionError(f"rank {rank} came for a later group: it had died before")
        connection = self._accepted.pop((number, rank, index))
        connection.sendall(_WELCOME)
        return connection

    def _admit(self, connection: socket.socket, number: int) -> None:
        """Accept a connection of this user's processes, unless their group has been left."""
        connection.settimeout(self._timeout)
        if (
            is_same_user(connection)
            and len(hello := connection.recv(_HELLO.size, socket.MSG_WAITALL)) == _HELLO.size
        ):
            key = _HELLO.unpack(hello)
            if key[0] >= number:
                self._accepted[key] = connection
                return
        connection.close()

    def _late_error(self, rank: int) -> TimeoutError:
        return TimeoutError(f"rank {rank} did not come within {self._timeout:g} seconds")


def _timeval(seconds: float) -> bytes:
    """Return seconds as the kernel's timeval; 0: for ever."""
    full_seconds = int(seconds)
    return _TIME.pack(full_seconds, int((seconds - full_seconds) * 1e6))


def is_same_user(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user == os.geteuid()
