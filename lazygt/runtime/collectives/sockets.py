"""UNIX sockets between each two ranks that share an axis; only their user can reach them.

They are for ranks on one host; `encrypted` connections lead to other hosts. Gloo would listen on a
TCP port instead, where anybody may connect, and hand each message to a thread of its own on either
side: for 32 KiB between two ranks on four cores that took 170 us, and 4 ms in one of ten; a socket
takes 11 us.

Each message of a socket is read in its turn. A send never waits: bytes beyond the socket's room are
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
from itertools import product
from typing import Any, NamedTuple

_ROOM = 1 << 20  # bytes that a socket is asked to take without a reader; the host may allow fewer
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
        """True if there is something to receive, or the other has left; None if unknown.

        For any thread.
        """
        return None

    @abstractmethod
    def send(self, data: memoryview, *, given: bool = False) -> None:
        """Send bytes. Does not wait; they may be overwritten as soon as this returns.

        Args:
            given: True if they never will be, so that no copy is needed.

        Raises:
            ConnectionError: the other rank has left.
        """

    @abstractmethod
    def receive(self, room: memoryview) -> None:
        """Fill ``room`` with the next bytes from the other.

        Raises:
            ConnectionError: the other rank has left.
            TimeoutError: nothing came in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave: the other reads all sent bytes, and then that this rank has left.

        Does not wait: unsent bytes are sent in the background.
        """

    def send_text(self, text: str) -> None:
        """Send a text of any length; as ``send``."""
        data = text.encode()
        self.send(memoryview(_NUMBER.pack(len(data)) + data))

    def receive_text(self) -> str:
        """Receive a text that the other sent with ``send_text``; as ``receive``."""
        number = bytearray(_NUMBER.size)
        self.receive(memoryview(number))
        data = bytearray(*_NUMBER.unpack(number))
        self.receive(memoryview(data))
        return data.decode()

    def _left(self) -> ConnectionError:
        return ConnectionError(f"rank {self.rank} has left: the connection to it is closed")

    def _silent(self) -> TimeoutError:
        return TimeoutError(f"rank {self.rank} sent nothing for {self._timeout:g} seconds")


class PeerSocket(Peer):
    """Another rank of this host, at the other end of a UNIX socket."""

    def __init__(self, end: socket.socket, rank: int, timeout: float) -> None:
        super().__init__(rank, timeout)
        self._end = end
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        # the kernel's own timeout: Python's costs a poll a message
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(timeout))
        self._late: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        #: one is counted by the sender, one by the thread: equal when the socket has it all
        self._queued = self._sent = 0
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        self._closing = False

    @property
    def has_sent(self) -> bool:
        """See `Peer`."""
        if self._end.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(0))

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._end.fileno()

    def send(self, data: memoryview, *, given: bool = False) -> None:
        """See `Peer`: bytes beyond the socket's room are sent by a thread."""
        if self._failure is not None:
            raise self._left() from self._failure
        done = 0
        if self._queued == self._sent and len(data):
            try:
                done = self._end.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                done = 0
            except OSError as error:
                raise self._left() from error
        if done < len(data):
            self._later(data[done:] if given else bytes(data[done:]))

    def receive(self, room: memoryview) -> None:
        """See `Peer`."""
        self.awaited = True
        try:
            while len(room):
                try:
                    count = self._end.recv_into(room, 0, socket.MSG_WAITALL)
                except BlockingIOError:
                    raise self._silent() from None
                except OSError as error:
                    raise self._left() from error
                if not count:
                    raise self._left()
                room = room[count:]
        finally:
            self.awaited = False

    def send_descriptor(self, fd: int) -> None:
        """Send a file descriptor, before anything else; as ``send``."""
        try:
            socket.send_fds(self._end, [_WELCOME], [fd])
        except OSError as error:
            raise self._left() from error

    def receive_descriptor(self) -> int:
        """Receive the other's descriptor, as this process's own; as ``receive``."""
        try:
            _, fds, _, _ = socket.recv_fds(self._end, len(_WELCOME), 1)
        except BlockingIOError:
            raise self._silent() from None
        except OSError as error:
            raise self._left() from error
        if not fds:
            raise self._left()
        os.set_inheritable(fds[0], False)
        return fds[0]

    def close(self) -> None:
        """See `Peer`: the thread hangs up when it has sent the rest."""
        self._closing = True
        self._late.put(None)
        if self._thread is None or not self._thread.is_alive() or self._queued == self._sent:
            self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other has left before
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _later(self, data: bytes | memoryview) -> None:
        self._queued += 1
        self._late.put(data)
        if self._thread is None:
            name = f"lazygt-send-{self.rank}"
            self._thread = threading.Thread(target=self._send_late, name=name, daemon=True)
            self._thread.start()

    def _send_late(self) -> None:
        while (data := self._late.get()) is not None:
            try:
                self._end.sendall(data)
            except OSError as error:
                self._failure = error
                break
            self._sent += 1
        if self._closing:
            self._hang_up()


def late(peers: Sequence[Peer | None]) -> list[int]:
    """Return the awaited ones of ranks that are read one after another.

    They have sent nothing yet. Empty if no thread waits.
    """
    others = [peer for peer in peers if peer is not None]
    for place, peer in enumerate(others):
        if peer.awaited:
            later = [other.rank for other in others[place + 1 :] if other.has_sent is False]
            return later if peer.has_sent else [peer.rank, *later]
    return []


def first_to_leave(peers: Sequence[Peer], is_over: Callable[[], bool]) -> int | None:
    """Wait until a rank of this host has closed its end; return the rank.

    The kernel closes the end of one that dies.

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


class Ends(NamedTuple):
    """Sockets to another rank, one for each independent order of reading.

    Attributes:
        small: carries collectives of small values.
        large: carries the places of large values in shared memory; between hosts, the values.
        single: carries point-to-point values.
    """

    small: Peer
    large: Peer
    single: Peer


class Rendezvous:
    """Socket at which other ranks find this one, in this group and in all later ones.

    The client has made the sockets before any rank starts, in a directory that only its user can
    enter; so no rank waits for a socket to appear, and no one else can connect.

    Args:
        listener: a descriptor of this rank's own socket, closed with this.
        place_of: returns the path of a rank's socket.
        timeout: seconds to wait for another rank.

    Attributes:
        store: the session's store, for ranks on several hosts; None: there is none.
    """

    store: Any = None

    def __init__(
        self, rank: int, listener: int, place_of: Callable[[int], str], timeout: float
    ) -> None:
        self._rank, self._place_of, self._timeout = rank, place_of, timeout
        self._listener = socket.socket(fileno=listener)
        self._listener.set_inheritable(False)
        #: accepted connections, by the group's number, rank and index of its socket
        self._visitors: dict[tuple[int, int, int], socket.socket] = {}

    def meet(self, number: int, others: Collection[int]) -> dict[int, Ends]:
        """Connect with other ranks, all of which do the same for the group of this number.

        Raises:
            OSError: a rank could not be reached, or did not come in time.
        """
        for key in [key for key in self._visitors if key[0] < number]:
            self._visitors.pop(key).close()  # came for a group that never was
        found: dict[tuple[int, int], socket.socket] = {}
        try:
            for rank, which in product(others, range(len(Ends._fields))):
                if rank < self._rank:
                    found[rank, which] = self._visit(number, rank, which)
            for rank, which in product(others, range(len(Ends._fields))):
                if rank > self._rank:
                    found[rank, which] = self._visited(number, rank, which)
            for (rank, _), end in found.items():
                if rank < self._rank:
                    self._welcomed(end, rank)
        except BaseException:
            for end in found.values():
                end.close()
            raise
        ends = range(len(Ends._fields))
        return {
            rank: Ends(*(PeerSocket(found[rank, which], rank, self._timeout) for which in ends))
            for rank in others
        }

    def close(self) -> None:
        """Stop accepting other ranks. Idempotent."""
        self._listener.close()
        for end in self._visitors.values():
            end.close()
        self._visitors.clear()

    def _visit(self, number: int, rank: int, which: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # again the kernel's: with Python's a socket at which many wait would turn this one away
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(self._timeout))
            end.connect(self._place_of(rank))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(0))
            end.settimeout(self._timeout)
            end.sendall(_HELLO.pack(number, self._rank, which))
        except BlockingIOError:
            end.close()
            raise self._too_late(rank) from None
        except BaseException:
            end.close()
            raise
        return end

    def _welcomed(self, end: socket.socket, rank: int) -> None:
        """Wait until a visited rank has begun to meet, too."""
        try:
            said = end.recv(len(_WELCOME))
        except TimeoutError:
            raise self._too_late(rank) from None
        if said != _WELCOME:
            raise ConnectionError(f"rank {rank} has left")

    def _visited(self, number: int, rank: int, which: int) -> socket.socket:
        """Return the connection of an expected rank; earlier ones of others are kept."""
        until = time.monotonic() + self._timeout
        while (number, rank, which) not in self._visitors:
            self._listener.settimeout(max(until - time.monotonic(), 1e-3))
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                raise self._too_late(rank) from None
            self._admit(end, number)
            if any(later > number and who == rank for later, who, _ in self._visitors):
                raise ConnectionError(f"rank {rank} came for a later group: it had died before")
        end = self._visitors.pop((number, rank, which))
        end.sendall(_WELCOME)
        return end

    def _admit(self, end: socket.socket, number: int) -> None:
        """Accept a connection of this user's processes, unless their group has been left."""
        end.settimeout(self._timeout)
        if is_own(end) and len(hello := end.recv(_HELLO.size, socket.MSG_WAITALL)) == _HELLO.size:
            key = _HELLO.unpack(hello)
            if key[0] >= number:
                self._visitors[key] = end
                return
        end.close()

    def _too_late(self, rank: int) -> TimeoutError:
        return TimeoutError(f"rank {rank} did not come within {self._timeout:g} seconds")


def _time(seconds: float) -> bytes:
    """Return seconds as the kernel's timeval; 0: for ever."""
    whole = int(seconds)
    return _TIME.pack(whole, int((seconds - whole) * 1e6))


def is_own(end: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(asked)[1]
    return user == os.geteuid()
