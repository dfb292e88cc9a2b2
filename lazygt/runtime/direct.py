"""A socket between each two ranks that share an axis: what is small goes straight to the other.

Gloo hands a message to a thread of its own on either side. For 32 KiB between two ranks on four
cores that took 170 us, and 4 ms in one of ten; a socket takes 11 us. All ranks are on one host:
the launchers start them there.

A socket carries the messages of one axis, and each is read in its turn. A send never waits: what
the socket has no room for is sent by a thread, so ranks that send to each other cannot get stuck.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

_ROOM = 1 << 20  # bytes that a socket is asked to take without a reader; the host may allow fewer
_NUMBER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")  # pid, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds


class Peer:
    """Another rank, at the other end of a socket.

    Args:
        timeout: seconds that a message may take to come.
    """

    def __init__(self, end: socket.socket, rank: int, timeout: float) -> None:
        self.rank = rank
        self._end, self._timeout = end, timeout
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        # the kernel's own timeout: Python's costs a poll a message
        whole = int(timeout)
        limit = _TIME.pack(whole, int((timeout - whole) * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        #: one is counted by the sender, one by the thread: equal when the socket has it all
        self._queued = self._sent = 0
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        self._closing = False

    def send(self, data: memoryview) -> None:
        """Send bytes. Does not wait; they may be overwritten as soon as this returns.

        Raises:
            ConnectionError: the other rank has left.
        """
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
            self._later(bytes(data[done:]))

    def receive(self, room: memoryview) -> None:
        """Fill ``room`` with what the other sent next.

        Raises:
            ConnectionError: it has left.
            TimeoutError: nothing came in time.
        """
        while len(room):
            try:
                count = self._end.recv_into(room, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError(
                    f"rank {self.rank} sent nothing for {self._timeout:g} seconds"
                ) from None
            except OSError as error:
                raise self._left() from error
            if not count:
                raise self._left()
            room = room[count:]

    def send_text(self, text: str) -> None:
        """Send a text of any length; as ``send``."""
        data = text.encode()
        self.send(memoryview(_NUMBER.pack(len(data)) + data))

    def receive_text(self) -> str:
        """What the other sent with ``send_text``; as ``receive``."""
        number = bytearray(_NUMBER.size)
        self.receive(memoryview(number))
        data = bytearray(*_NUMBER.unpack(number))
        self.receive(memoryview(data))
        return data.decode()

    def close(self) -> None:
        """Leave: the other reads what was sent, and then that this rank has left.

        Does not wait: what is still to be sent is sent by the thread, which then hangs up.
        """
        self._closing = True
        self._late.put(None)
        if self._thread is None or not self._thread.is_alive() or self._queued == self._sent:
            self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):  # the other has left before
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _left(self) -> ConnectionError:
        return ConnectionError(f"rank {self.rank} has left: the connection to it is closed")

    def _later(self, data: bytes) -> None:
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


class Door:
    """Where other ranks find this one. Has a name before anybody comes."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # a free name that is no file, chosen by the kernel
        self._listener.listen(socket.SOMAXCONN)
        self._listener.settimeout(timeout)

    @property
    def name(self) -> str:
        """What to tell the others; as text."""
        address: bytes = self._listener.getsockname()
        return address.hex()

    def meet(self, others: Collection[int], name_of: Callable[[int], str]) -> dict[int, Peer]:
        """Connect with other ranks, all of which do the same; the door is closed then.

        Raises:
            OSError: one could not be reached, or did not come in time.
        """
        found: dict[int, Peer] = {}
        try:
            for rank in others:
                if rank < self._rank:
                    found[rank] = self._visit(rank, name_of(rank))
            while len(found) < len(others):
                rank, end = self._visited()
                found[rank] = Peer(end, rank, self._timeout)
        finally:
            self._listener.close()
        return found

    def _visit(self, rank: int, name: str) -> Peer:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(self._timeout)
        end.connect(bytes.fromhex(name))
        end.sendall(_NUMBER.pack(self._rank))
        return Peer(end, rank, self._timeout)

    def _visited(self) -> tuple[int, socket.socket]:
        """The next rank that comes. Others than this user's processes are not let in."""
        while True:
            end, _ = self._listener.accept()
            asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(asked)[1] == os.geteuid():
                end.settimeout(self._timeout)
                (rank,) = _NUMBER.unpack(end.recv(_NUMBER.size, socket.MSG_WAITALL))
                return rank, end
            end.close()
