"""Broadcasts between processes of one host: the sender of a group writes to a pipe a receiver.

The pipes have names in the transfer sender's directory, which only its user can enter; nobody
listens anywhere. Whoever comes first makes a pipe, so no one waits for another in order to join.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from torch import Tensor

from lazygt.transfer.control import Deadline

_ROOM = 1 << 20  # bytes that a pipe is asked to take without a reader; the host may allow fewer

Move = Callable[[int, memoryview], int]


class Pipes:
    """One rank's end of a group; rank 0 sends.

    Args:
        place: where the pipes lie; the rank of the receiver is added to it.

    Raises:
        OSError: a pipe could not be made.
    """

    def __init__(self, place: str, rank: int, size: int) -> None:
        paths = [f"{place}-{other}" for other in range(1, size)]
        if rank == 0:
            self._ends = [_End(_opened(path, os.O_RDWR), os.write, "") for path in paths]
        else:
            path = paths[rank - 1]
            self._ends = [_End(_opened(path, os.O_RDONLY), _read, path)]

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Broadcast:
        """Begin to broadcast bytes from rank 0; ``wake`` is called when it is done."""
        data = run.numpy().data
        return Broadcast([end.begin(data, deadline, wake) for end in self._ends])

    def close(self) -> None:
        """Leave; what is under way fails. Does not wait."""
        for end in self._ends:
            end.close()


class Broadcast:
    """A broadcast under way."""

    def __init__(self, moves: Sequence[Future[None]]) -> None:
        self._moves = moves

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return all(move.done() for move in self._moves)

    def wait(self) -> None:
        """Wait for it.

        Raises:
            RuntimeError: it failed.
        """
        for move in self._moves:
            try:
                move.result()
            except OSError as error:
                raise RuntimeError(str(error)) from error


class _End:
    """One end of one pipe, and the thread that moves bytes through it, in their turn.

    Args:
        fd: of the pipe, not blocking; closed with the end.
        move: writes or reads some bytes, as many as it says.
        name: a file that is of no use once bytes have come through.
    """

    def __init__(self, fd: int, move: Move, name: str) -> None:
        self._fd, self._move, self._name = fd, move, name
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._failure: OSError | None = None
        self._begun: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT if move is os.write else select.POLLIN)
        self._poll.register(self._stop, select.POLLIN)
        threading.Thread(target=self._run, name="lazygt-pipe", daemon=True).start()

    def begin(
        self, data: memoryview, deadline: Deadline, wake: Callable[[], object]
    ) -> Future[None]:
        """Move bytes after those that were begun before."""
        made: Future[None] = Future()
        made.add_done_callback(lambda _: wake())

        def run() -> None:
            try:
                self._through(data, deadline)
            except OSError as error:
                self._failure = error  # the other end may have some of the bytes
                made.set_exception(error)
            else:
                made.set_result(None)

        self._begun.put(run)
        return made

    def close(self) -> None:
        """End the thread; what is under way fails. Called once."""
        self._closing = True
        os.eventfd_write(self._stop, 1)
        self._begun.put(None)  # the thread closes the descriptors then

    def _run(self) -> None:
        while (run := self._begun.get()) is not None:
            run()
            del run
        os.close(self._fd)
        os.close(self._stop)

    def _through(self, data: memoryview, deadline: Deadline) -> None:
        while data:
            if self._failure is not None:
                raise self._failure
            ready = [fd for fd, _ in self._poll.poll(deadline.remaining * 1e3)]
            if self._closing:
                raise ConnectionError("this process has left the group")
            if not ready:
                raise TimeoutError(f"the others were not there within {deadline.seconds:g} s")
            try:
                moved = self._move(self._fd, data)
            except BlockingIOError:
                continue
            if not moved:
                raise ConnectionError("the sender of the group has left it")
            data = data[moved:]
            if self._name:
                with suppress(FileNotFoundError):
                    os.unlink(self._name)
                self._name = ""


def _opened(path: str, flags: int) -> int:
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    with suppress(OSError):  # the user has many pipes: this one stays small
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _ROOM)
    return fd


def _read(fd: int, room: memoryview) -> int:
    return os.readv(fd, [room])
