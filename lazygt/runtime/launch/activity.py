"""Activity: what this worker does, for its status page.

The main thread notes when a message comes and when it is done with. All else the control thread
finds out a few times a second, from outside: nothing that a run goes through gets longer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.status_file import MOST_RANKS, StatusFile, WorkerPage

#: Seconds between two looks at what the main thread does.
EVERY = 0.25
_WEIGH_EVERY = 1.0  # seconds, at the least
_WEIGH_BUSY = 3.0  # for so many seconds a moment is waited for at which no run is under way
_WEIGHED_TIMES = 5
_WEIGH_SHARE = 500  # so many times longer than it takes is until it is done again
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
#: Where code lies that no user wrote.
_LIBRARIES = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<")
#: What is further out on the stack is how the process was started.
_OUTERMOST = str(Path(__file__).with_name("process.py"))
_MOST_DOING = 200  # characters


class Activity:
    """What the main thread notes: the message under way, and when it came; how many are done.

    Attributes:
        last: the header of the last message.
    """

    __slots__ = ("begun", "done", "frames", "last")

    def __init__(self) -> None:
        self.frames: Sequence[Frame] | None = None
        self.last: Frame = b""
        self.begun = self.done = 0

    def begin(self, frames: Sequence[Frame]) -> None:
        """A message has come."""
        self.begun = time.monotonic_ns()
        self.frames = frames

    def end(self, frames: Sequence[Frame]) -> None:
        """It is done with."""
        self.frames = None
        self.done += 1
        if frames:
            self.last = frames[0]


class Insight(Protocol):
    """What knows more of a worker than its messages."""

    def run_named(self, header: Frame) -> tuple[int, str] | None:
        """The number of a run and the name of its plan, in hex; None: it is another message."""

    def waits_for(self) -> tuple[int, ...]:
        """The ranks that a collective waits for."""

    def step(self, run: int) -> int:
        """The step of a run that is timed; -1: it is not known."""

    def memory(self) -> tuple[int, int, int, int]:
        """Bytes living, allocated, at the peak and resident."""


class Reporter:
    """Writes a worker's page.

    Args:
        fd: of the status file; it is closed.
        activity: of the thread that this is made in.

    Attributes:
        rank: None: the process has not been told yet, and writes nothing.
        started: whether it is ready for messages.
        insight: None: nothing but messages is known.
    """

    def __init__(self, fd: int, rank: int | None, activity: Activity) -> None:
        self.rank, self.started = rank, False
        self.insight: Insight | None = None
        self._file, self._activity = StatusFile(fd), activity
        os.close(fd)
        self._thread = threading.get_ident()
        self._next = self._weigh_at = 0.0
        self._run: tuple[int, str] = 0, ""
        self._memory = (0, 0, 0, 0)
        self._weighed = 0
        #: a run has some values out of the store, so of several times the most counts
        self._living: deque[int] = deque(maxlen=_WEIGHED_TIMES)

    def begin(self, rank: int, handler: object) -> None:
        """The process has its rank, and what handles its messages; that may know more of them."""
        self.rank = rank
        insight = getattr(handler, "insight", None)
        self.insight = None if insight is None else insight()
        self.started = True

    def look(self) -> None:
        """Write what the main thread does, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next or self.rank is None:
            return
        self._next = now + EVERY
        self._file.write(1 + self.rank, self._page(self.rank, now))

    def _page(self, rank: int, now: float) -> WorkerPage:
        if not self.started:
            return WorkerPage(rank, os.getpid(), "starting")
        activity, insight = self._activity, self.insight
        frames, begun, done = activity.frames, activity.begun, activity.done
        state, step, doing, waits = "idle", -1, "", tuple[int, ...]()
        if insight is not None:
            self._run = insight.run_named(frames[0] if frames else activity.last) or self._run
            due = now - self._weigh_at
            if due >= 0 and (frames is None or due >= _WEIGH_BUSY) and self._file.watched:
                self._weigh(insight, frames is None)
        if frames is not None:
            state = "busy"
            doing = users_function(sys._current_frames().get(self._thread))
            if insight is not None:
                waits, step = insight.waits_for()[:MOST_RANKS], insight.step(self._run[0])
        return WorkerPage(
            rank, os.getpid(), state, *self._run, step, doing, begun if frames else 0, waits, done,
            *self._memory, self._weighed,
        )  # fmt: skip

    def _weigh(self, insight: Insight, idle: bool) -> None:
        begin = time.monotonic()
        if idle:
            self._living.clear()
        living, allocated, peak, resident = insight.memory()
        self._living.append(living)
        self._memory = max(self._living), allocated, peak, resident
        took = time.monotonic() - begin
        self._weighed = time.monotonic_ns()
        self._weigh_at = begin + max(_WEIGH_EVERY, _WEIGH_SHARE * took)


def users_function(frame: FrameType | None) -> str:
    """The innermost function on a stack that is neither lazygt's nor a library's, with the line
    that it is at; empty: there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _OUTERMOST:
            break
        if not name.startswith(_LIBRARIES) and "site-packages" not in name:
            return f"{frame.f_code.co_qualname} {name}:{frame.f_lineno}"[-_MOST_DOING:]
        frame = frame.f_back
    return ""
