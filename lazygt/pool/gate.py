"""Admission gate of a session: its agent's connection, in which runs wait for their turn.

Only a message's kind and the number of its run are decoded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from lazygt.errors import ProtocolError
from lazygt.runtime.cluster.agent import Connected
from lazygt.runtime.cluster.protocol import Closed, Died, Look, Opened, Said, Tell, read
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.messages import Done, Run
from lazygt.runtime.wire import Buffer, Count, size_of

#: Seconds that workers may take to start. Until their first answer, so long at most, their runs
#: take no room and no run-seconds.
_START_SECONDS = 60.0


class Gate:
    """Forwarder of a client's messages that counts its workers' answers; see ``Connected``.

    All methods are for the gateway's thread, except ``send``, which is for any: workers' answers
    are sent on the threads that wait for them.

    Args:
        connection: connection to the client.
        may_pass: returns whether the next run may go on, given the number with the workers.
        changed: called after an answer, on the thread that sends it.
    """

    def __init__(
        self,
        connection: Connected,
        may_pass: Callable[[int], bool],
        changed: Callable[[], None],
    ) -> None:
        self.fd = connection.fd
        self._connection, self._may_pass, self._changed = connection, may_pass, changed
        self._waiting: deque[list[memoryview]] = deque()
        self._lock = threading.Lock()
        #: run -> workers that have not answered it
        self._running: dict[int, int] = {}
        #: the last forwarded run, and its workers so far; its messages to others pass, too
        self._last, self._told = 0, set[int]()
        #: run-seconds count from here: the first answer, or the end of the time for a start
        self._begins = time.monotonic() + _START_SECONDS
        self._busy_since = 0.0
        self._seconds = 0.0
        #: process ids of the workers, by part
        self.pids: dict[int, tuple[int, ...]] = {}

    @property
    def closed(self) -> str | None:
        """Reason for the connection's end, or None."""
        return self._connection.closed

    def close(self, reason: str = "done") -> None:
        """Do nothing: the connection is the gateway's."""

    @property
    def held(self) -> int:
        """Bytes of the waiting messages."""
        return sum(map(size_of, self._waiting))

    def put(self, frames: list[memoryview]) -> None:
        """Queue a message from the client for the agent.

        Raises:
            ProtocolError: it is a malformed run.
        """
        run_told(frames)
        if Look.begins(frames[0]):  # status requests don't wait behind runs
            self._waiting.appendleft(frames)
        else:
            self._waiting.append(frames)

    def take(self) -> list[memoryview] | None:
        """Return the next message that may go on; None: there is none."""
        if not self._waiting:
            return None
        frames = self._waiting[0]
        told = run_told(frames)
        if told is not None and not self._pass(*told):
            return None
        return self._waiting.popleft()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message to the client, and then count it."""
        self._connection.send(frames)
        header = bytes(frames[0])
        if Said.begins(header):
            if Done.begins(frames[1]):
                self._answered(sequence_number(frames[1]))
        elif Opened.begins(header):
            opened = read([header], (Opened,))
            assert isinstance(opened, Opened)
            self.pids = {**self.pids, opened.part: tuple(opened.pids)}
        elif Died.begins(header) or Closed.begins(header):
            self._forget()

    def load(self) -> tuple[float, int, int]:
        """Return the run time since the last call, and the numbers of running and waiting runs.

        The run time is in seconds.
        """
        now = time.monotonic()
        with self._lock:
            self._count(now)
            seconds, self._seconds = self._seconds, 0.0
            running = len(self._running) if now >= self._begins else 0
        held = sum(run_told(frames) is not None for frames in self._waiting)
        return seconds, running, held

    def _pass(self, number: int, workers: tuple[int, ...]) -> bool:
        with self._lock:
            running = len(self._running)
        if number != self._last or not self._told.isdisjoint(workers):
            if not self._may_pass(running):
                return False
            self._last, self._told = number, set()
        self._told.update(workers)
        with self._lock:
            self._count(time.monotonic())
            self._running[number] = self._running.get(number, 0) + len(workers)
        return True

    def _answered(self, number: int) -> None:
        with self._lock:
            self._begins = min(self._begins, time.monotonic())
            self._count(time.monotonic())
            left = self._running.get(number, 0) - 1
            if left > 0:
                self._running[number] = left
            else:
                self._running.pop(number, None)
        self._changed()

    def _forget(self) -> None:
        """Forget the running runs: their answers may never come."""
        with self._lock:
            self._count(time.monotonic())
            self._running.clear()
        self._changed()

    def _count(self, now: float) -> None:
        """Add the time until now to the run time, if something ran."""
        if self._running:
            self._seconds += max(now - max(self._busy_since, self._begins), 0.0)
        self._busy_since = now


def run_told(frames: Sequence[Buffer]) -> tuple[int, tuple[int, ...]] | None:
    """Return the run's number and the workers of a message to an agent; None for others.

    Raises:
        ProtocolError: the message is malformed.
    """
    if len(frames) < 2 or not Tell.begins(frames[0]) or not Run.begins(frames[1]):
        return None
    told = read(frames, (Tell,))
    assert isinstance(told, Tell)
    return sequence_number(frames[1]), told.workers


class _Numbered(msgspec.Struct, array_like=True):
    """The beginning of a `Run` or a `Done`."""

    kind: int
    seq: Count


def sequence_number(header: Buffer) -> int:
    """Return the number of a run, from the header of its message or of the answer to it.

    Raises:
        ProtocolError: there is none.
    """
    try:
        return msgspec.msgpack.decode(header, type=_Numbered).seq
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a run without a number: {error}") from error
