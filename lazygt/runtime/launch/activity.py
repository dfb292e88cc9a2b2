"""Activity of a worker, for its status page.

The main thread notes the arrival and the completion of each message. The control thread samples
everything else from outside, a few times a second, so a run gets no slower.
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
from typing import TYPE_CHECKING

from lazygt.net.mailbox import Frame
from lazygt.net.status_file import MOST_RANKS, StatusFile, WorkerPage

if TYPE_CHECKING:
    from lazygt.runtime.worker.worker_requests import WorkerInsight

#: Seconds between two samples of the main thread.
EVERY = 0.25
_MEASURE_SECONDS = 1.0  # minimum interval between two measurements of memory
_MEASURE_BUSY_SECONDS = 3.0  # delay after which memory is also measured during a run
_LIVE_SAMPLES = 5  # number of measurements whose maximum is shown
_MEASURE_SHARE = 500  # interval to the next measurement, in durations of one measurement
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
#: Prefixes of the paths of library code.
_LIBRARIES = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<")
#: Frames further out on the stack belong to the start of the process.
_OUTERMOST = str(Path(__file__).with_name("process.py"))
_LONGEST_DOING = 200  # characters of the user's current function on the page


class Activity:
    """Record of the main thread: message under way, its arrival, messages done.

    Attributes:
        frames: frames of the message under way; None: the thread is idle.
        begun: arrival of that message, in nanoseconds of the monotonic clock.
        done: number of messages done.
        last: header of the last message.
    """

    __slots__ = ("begun", "done", "frames", "last")

    def __init__(self) -> None:
        self.frames: Sequence[Frame] | None = None
        self.last: Frame = b""
        self.begun = self.done = 0

    def begin(self, frames: Sequence[Frame]) -> None:
        """Note that a message has arrived."""
        self.begun = time.monotonic_ns()
        self.frames = frames

    def end(self, frames: Sequence[Frame]) -> None:
        """Note that the message is done."""
        self.frames = None
        self.done += 1
        if frames:
            self.last = frames[0]


class Reporter:
    """Writer of a worker's status page.

    Args:
        fd: descriptor of the status file; it is closed.
        activity: record of the thread that creates the reporter.

    Attributes:
        rank: the worker's rank; None: not known yet, so nothing is written.
        started: True if the worker is ready for messages.
        insight: details beyond messages; None: there are none.
    """

    def __init__(self, fd: int, rank: int | None, activity: Activity) -> None:
        self.rank, self.started = rank, False
        self.insight: WorkerInsight | None = None
        self._file, self._activity = StatusFile(fd), activity
        os.close(fd)
        self._thread = threading.get_ident()
        self._next = self._measure_at = 0.0
        self._run: tuple[int, str] = 0, ""
        self._memory = (0, 0, 0, 0)
        self._measured_at = 0
        #: bytes living in the last samples; a run removes values from the store while it uses them,
        #: so the page shows the maximum
        self._live_samples: deque[int] = deque(maxlen=_LIVE_SAMPLES)

    def begin(self, rank: int, handler: object) -> None:
        """Set the rank of the process, now ready, and read the ``insight`` of its handler."""
        self.rank = rank
        insight = getattr(handler, "insight", None)
        self.insight = None if insight is None else insight()
        self.started = True

    def update(self) -> None:
        """Write the worker's page, unless it was written less than `EVERY` seconds ago."""
        now = time.monotonic()
        if now < self._next or self.rank is None:
            return
        self._next = now + EVERY
        self._file.write(1 + self.rank, self._page(self.rank, now))

    def _page(self, rank: int, now: float) -> WorkerPage:
        """Sample the main thread, and memory if that is due; return the page."""
        if not self.started:
            return WorkerPage(rank, os.getpid(), "starting")
        activity, insight = self._activity, self.insight
        frames, begun, done = activity.frames, activity.begun, activity.done
        state, step, doing, waits_for = "idle", -1, "", tuple[int, ...]()
        if insight is not None:
            self._run = insight.run_named(frames[0] if frames else activity.last) or self._run
            overdue = now - self._measure_at
            if (
                overdue >= 0
                and (frames is None or overdue >= _MEASURE_BUSY_SECONDS)
                and self._file.watched
            ):
                self._measure_memory(insight, frames is None)
        if frames is not None:
            state = "busy"
            doing = users_function(sys._current_frames().get(self._thread))
            if insight is not None:
                waits_for, step = insight.waits_for()[:MOST_RANKS], insight.step(self._run[0])
        return WorkerPage(
            rank, os.getpid(), state, *self._run, step, doing, begun if frames else 0, waits_for,
            done, *self._memory, self._measured_at,
        )  # fmt: skip

    def _measure_memory(self, insight: WorkerInsight, idle: bool) -> None:
        """Measure the worker's memory, and set the time of the next measurement.

        The interval grows with the duration, so measuring takes a fixed share of the time at most.

        Args:
            idle: True if no run is under way, so earlier samples are obsolete.
        """
        begin = time.monotonic()
        if idle:
            self._live_samples.clear()
        living, allocated, peak, resident = insight.memory()
        self._live_samples.append(living)
        self._memory = max(self._live_samples), allocated, peak, resident
        seconds = time.monotonic() - begin
        self._measured_at = time.monotonic_ns()
        self._measure_at = begin + max(_MEASURE_SECONDS, _MEASURE_SHARE * seconds)


def users_function(frame: FrameType | None) -> str:
    """Return the innermost function of the user's on a stack, with its current line.

    Frames of lazygt and of libraries are skipped. Empty if none is left.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _OUTERMOST:
            break
        if not name.startswith(_LIBRARIES) and "site-packages" not in name:
            return f"{frame.f_code.co_qualname} {name}:{frame.f_lineno}"[-_LONGEST_DOING:]
        frame = frame.f_back
    return ""
