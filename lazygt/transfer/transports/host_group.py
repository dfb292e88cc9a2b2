"""Broadcasts between processes of one host: rank 0 has a socket to each other rank.

The sockets have names in the transfer sender's directory, which only its user can enter. The end
that comes first listens there, so joining waits for no other rank. A pipe would take less code and
half as long again, because its writer and its reader wait for each other.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from torch import Tensor

from lazygt.files import bind
from lazygt.transfer.connection import Deadline

_ROOM = 4 << 20  # bytes that a socket is asked to take without a reader; the host may allow fewer

Transmit = Callable[[socket.socket, memoryview], int]


class HostGroup:
    """One rank's end of a group; rank 0 sends.

    Args:
        place: path prefix of the sockets; the rank of the receiver is appended.

    Raises:
        OSError: a socket could not be made.
    """

    def __init__(self, place: str, rank: int, size: int) -> None:
        others = range(1, size) if rank == 0 else [rank]
        transmit = _send if rank == 0 else _receive
        self._ends = [_End(f"{place}-{other}", transmit) for other in others]

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Broadcast:
        """Begin to broadcast bytes from rank 0; ``wake`` is called when it is done."""
        data = run.numpy().data
        return Broadcast([end.begin(data, deadline, wake) for end in self._ends])

    def close(self) -> None:
        """Leave the group; running broadcasts fail. Does not wait."""
        for end in self._ends:
            end.close()


class Broadcast:
    """A running broadcast."""

    def __init__(self, transmissions: Sequence[Future[None]]) -> None:
        self._transmissions = transmissions

    def is_completed(self) -> bool:
        """Return whether the broadcast has ended, in success or failure."""
        return all(transmission.done() for transmission in self._transmissions)

    def wait(self) -> None:
        """Wait for the end of the broadcast.

        Raises:
            RuntimeError: the broadcast failed.
        """
        for transmission in self._transmissions:
            try:
                transmission.result()
            except OSError as error:
                raise RuntimeError(str(error)) from error


class _End:
    """One end of one socket, with a thread that moves bytes through it in FIFO order.

    Args:
        path: path at which the two ends meet.
        transmit: function that sends or receives some bytes, and returns their number.
    """

    def __init__(self, path: str, transmit: Transmit) -> None:
        self._path, self._transmit = path, transmit
        self._socket, self._listens = _meet(path)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._failure: OSError | None = None
        self._begun: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lazygt-socket", daemon=True).start()

    def begin(
        self, data: memoryview, deadline: Deadline, wake: Callable[[], object]
    ) -> Future[None]:
        """Queue bytes to move, after those that were queued before."""
        moved: Future[None] = Future()
        moved.add_done_callback(lambda _: wake())

        def run() -> None:
            try:
                self._through(data, deadline)
            except OSError as error:
                self._failure = error  # the other end may have some of the bytes
                moved.set_exception(error)
            else:
                moved.set_result(None)

        self._begun.put(run)
        return moved

    def close(self) -> None:
        """End the thread; running transmissions fail. Called once."""
        self._closing = True
        os.eventfd_write(self._stop, 1)
        self._begun.put(None)  # the thread closes the descriptors then

    def _run(self) -> None:
        while (run := self._begun.get()) is not None:
            run()
            del run
        self._socket.close()
        os.close(self._stop)
        if self._listens:
            self._forget_name()

    def _forget_name(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _through(self, data: memoryview, deadline: Deadline) -> None:
        if self._failure is not None:
            raise self._failure
        if data and self._listens:
            self._wait(select.POLLIN, deadline)
            self._accept()
        events = select.POLLOUT if self._transmit is _send else select.POLLIN
        while data:
            try:
                moved = self._transmit(self._socket, data)
            except BlockingIOError:
                self._wait(events, deadline)
                continue
            if not moved:
                raise ConnectionError("the sender of the group has left it")
            data = data[moved:]
            if self._closing:
                raise ConnectionError("this process has left the group")

    def _wait(self, events: int, deadline: Deadline) -> None:
        poller = select.poll()
        poller.register(self._socket, events)
        poller.register(self._stop, select.POLLIN)
        ready = poller.poll(deadline.remaining * 1e3)
        if self._closing:
            raise ConnectionError("this process has left the group")
        if not ready:
            raise TimeoutError(f"the others were not there within {deadline.seconds:g} s")

    def _accept(self) -> None:
        """Accept the other end, and drop the listening socket and its name."""
        listener, self._listens = self._socket, False
        with listener:
            self._socket, _ = listener.accept()
        self._forget_name()
        _prepare(self._socket)


def _meet(path: str) -> tuple[socket.socket, bool]:
    """Connect to the socket at a path, or else listen there; return (socket, listens)."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    hidden = f"{path}-{os.getpid()}-{ours.fileno()}"
    try:
        bind(ours, hidden)
        ours.listen(1)
        try:
            os.link(hidden, path)  # nobody sees it before it listens, and only one can be there
        except FileExistsError:
            ours.close()
            ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.connect(path)
            _prepare(ours)
            return ours, False
        finally:
            os.unlink(hidden)
    except OSError:
        ours.close()
        raise
    return ours, True


def _prepare(ours: socket.socket) -> None:
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)


def _send(ours: socket.socket, data: memoryview) -> int:
    return ours.send(data)


def _receive(ours: socket.socket, room: memoryview) -> int:
    return ours.recv_into(room)
