"""Failure detector for workers: a state machine that finds dead and frozen ones by heartbeats.

`Watch` is pure: it takes events with their times (seconds, any monotonic origin), and returns
instructions. `process_link` has the clock and the sockets.

The kernel reports deaths. A worker is frozen if no message came from it for the full deadline,
although a thread of its own answers pings and it was sent one early enough, and if meanwhile its
threads neither used a processor nor waited for one. A worker that uses the processor is busy inside
code that holds the interpreter lock, or its machine is crowded, or its cgroup throttled: the
deadline is extended, by a bounded amount of the worker's processor time.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

# -- death watch -----------------------------------------------------------------------------------
# A wait for workers notices a death itself. But a program may compute for seconds between two
# waits, and in that time a replacement process can already start and load its modules.


class DeathWatch(threading.Thread):
    """Thread that calls a handler at its start and after each end of a process.

    Args:
        living: returns the pidfds of the processes that have not ended.
        on_death: the handler; it may be called without a new end, and must find the ended
            processes.
    """

    def __init__(self, living: Callable[[], Sequence[int]], on_death: Callable[[], object]) -> None:
        super().__init__(name="lazygt-deaths", daemon=True)
        self._living, self._on_death = living, on_death
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False

    def run(self) -> None:
        """Call the handler, and wait for the next end of a process, until `end`."""
        try:
            while not self._ended:
                living = self._living()  # a later death ends the wait
                self._on_death()
                self._wait(living)
        finally:
            os.close(self._eventfd)

    def _wait(self, living: Sequence[int]) -> None:
        """Wait until a process ends, or until `processes_changed` or `end` is called."""
        poller = select.poll()
        for descriptor in (self._eventfd, *living):
            poller.register(descriptor, select.POLLIN)
        if self._eventfd in [descriptor for descriptor, _ in poller.poll()]:
            os.eventfd_read(self._eventfd)

    def processes_changed(self) -> None:
        """Have the thread read the set of processes again, after it has changed."""
        os.eventfd_write(self._eventfd, 1)

    def end(self) -> None:
        """Stop watching: once this returns, ``on_death`` is not running."""
        self._ended = True
        self.processes_changed()
        self.join()


# -- failure detector ------------------------------------------------------------------------------

TICK_SECONDS = 0.5
"""Longest interval between two `Tick` events during a wait."""

_LONGEST_SILENCE = 5.0  # seconds until a quiet worker is pinged
_BUSY_DEADLINES = 6  # deadlines of processor time granted to a worker that works without answering
_WORK_SECONDS = 0.05  # processor time that counts as work; waiting for the interpreter takes less
_ABSENT_AFTER = 3 * TICK_SECONDS  # gap between two ticks after which no frozen worker is reported


class Heard(Struct, frozen=True):
    """Event: a message came from the worker, so it has started: a welcome, a reply, a pong."""

    rank: int


class Used(Struct, frozen=True):
    """Event: processor usage of a worker since its ping, or since the last such event."""

    rank: int
    seconds: float  # processor time of all its threads
    runnable: bool  # True if a thread ran or waited for a processor all the while


class Started(Struct, frozen=True):
    """Event: another process was started in the worker's place."""

    rank: int


class Ended(Struct, frozen=True):
    """Event: the worker's process has ended."""

    rank: int


class Tick(Struct, frozen=True):
    """Event: time has passed in a wait, and all arrived messages have been taken."""


class Ping(Struct, frozen=True):
    """Instruction: send a ping to the worker."""

    rank: int


class ReportDied(Struct, frozen=True):
    """Instruction: raise WorkerDied; given once per worker."""

    rank: int


class ReportFrozen(Struct, frozen=True):
    """Instruction: raise WorkerFrozen; repeated after every further silent deadline."""

    rank: int
    deadline: float


Event = Heard | Used | Started | Ended | Tick
Instruction = Ping | ReportDied | ReportFrozen


@dataclass(slots=True)
class _State:
    """State of one worker."""

    started: bool = False
    dead: bool = False
    frozen: bool = False
    answered: float = 0.0  # time of the last sign of life
    #: time from which the pinged worker counts as frozen; None: no ping is unanswered
    due: float | None = None
    #: processor time that may still extend ``due``
    spare_usage: float = 0.0
    #: time of the last usage report, and the processor time that has not extended ``due`` yet
    usage_at: float = 0.0
    uncounted_usage: float = 0.0


class Watch:
    """Supervision of the workers of one session.

    Args:
        world_size: number of workers.
        now: start time of the workers.
        frozen_after: seconds without a sign of life after which a worker counts as frozen.
        start_timeout: the same while a worker starts: loading torch from a cold disk holds the
            interpreter, so it cannot answer then.
    """

    def __init__(
        self, world_size: int, now: float, frozen_after: float, start_timeout: float
    ) -> None:
        self._frozen_after = frozen_after
        self._start_timeout = max(start_timeout, frozen_after)
        #: seconds until a quiet worker is pinged
        self.silence = min(frozen_after / 4, _LONGEST_SILENCE)
        self._states = [_State(answered=now) for _ in range(world_size)]
        self._last_tick = now
        #: no worker is reported as frozen before this time
        self._no_report_before = now

    @property
    def dead(self) -> tuple[int, ...]:
        return tuple(rank for rank, state in enumerate(self._states) if state.dead)

    @property
    def awaiting_pong(self) -> tuple[int, ...]:
        """Living ranks with an unanswered ping; their processor usage must be reported."""
        states = enumerate(self._states)
        return tuple(rank for rank, state in states if state.due is not None and not state.dead)

    def is_started(self, rank: int) -> bool:
        return self._states[rank].started

    def is_frozen(self, rank: int) -> bool:
        return self._states[rank].frozen

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event seen at ``now``; return the instructions. Times never run backwards."""
        match event:
            case Heard(rank):
                self._record_sign_of_life(rank, now)
            case Used(rank, seconds, runnable):
                self._record_usage(self._states[rank], seconds, runnable, now)
            case Started(rank):
                self._states[rank] = _State(answered=now)
            case Ended(rank):
                return self._end(rank)
            case Tick():
                return self._tick(now)
        return []

    def _record_sign_of_life(self, rank: int, now: float) -> None:
        """Record a message of a worker: it has started, and no ping is unanswered."""
        state = self._states[rank]
        state.started, state.answered, state.due, state.frozen = True, now, None, False

    def _record_usage(self, state: _State, seconds: float, runnable: bool, now: float) -> None:
        """Extend a pinged worker's deadline by its processor usage."""
        if state.due is None:
            return
        # parallel threads may use more processor time than has passed
        seconds, state.usage_at = min(seconds, now - state.usage_at), now
        state.spare_usage -= seconds
        state.uncounted_usage += seconds
        if runnable or state.uncounted_usage >= _WORK_SECONDS:
            state.uncounted_usage = 0.0
            extension = min(self._deadline(state) - self.silence, state.spare_usage)
            state.due = max(state.due, now + extension)

    def _end(self, rank: int) -> list[Instruction]:
        """Record the end of a worker's process; the first one is reported."""
        state = self._states[rank]
        if state.dead:
            return []
        state.dead = True
        return [ReportDied(rank)]

    def _tick(self, now: float) -> list[Instruction]:
        """Check all living workers; none is frozen right after a gap between ticks."""
        if now - self._last_tick > _ABSENT_AFTER:
            # This process was stopped, or did not wait: an answer may still be on its way.
            self._no_report_before = now + TICK_SECONDS
        self._last_tick = now
        living = ((rank, state) for rank, state in enumerate(self._states) if not state.dead)
        return [step for rank, state in living for step in self._check_worker(rank, state, now)]

    def _check_worker(self, rank: int, state: _State, now: float) -> list[Instruction]:
        """Ping a quiet worker; report a pinged one that has not answered in time as frozen."""
        deadline = self._deadline(state)
        if state.due is None:
            if now - state.answered < self.silence:
                return []
            state.due = now + deadline - self.silence
            state.spare_usage, state.usage_at, state.uncounted_usage = (
                _BUSY_DEADLINES * deadline,
                now,
                0.0,
            )
            return [Ping(rank)]
        if now < state.due or now < self._no_report_before:
            return []
        state.due, state.frozen = now + deadline, True
        return [ReportFrozen(rank, deadline)]

    def _deadline(self, state: _State) -> float:
        """Return the silence in seconds after which a worker counts as frozen."""
        return self._frozen_after if state.started else self._start_timeout

    def seconds_to_next(self, now: float) -> float:
        """Return the longest wait allowed before the next `Tick`."""
        due = [self._due(state) - now for state in self._states if not state.dead]
        return max(min([*due, TICK_SECONDS]), 0.0)

    def _due(self, state: _State) -> float:
        """Return the time of the next check at which a worker may be pinged or frozen."""
        if state.due is None:
            return state.answered + self.silence
        return max(state.due, self._no_report_before)
