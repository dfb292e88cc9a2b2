"""Training steps of an unmodified script.

A step ends when the optimizer that steps first has stepped again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lazygt.observe.timeline import Timeline, profile
from lazygt.record.context import current_session
from lazygt.runtime.launch.interrupts import DEFER_INTERRUPT
from lazygt.runtime.messages import Memory
from lazygt.session import Session


class StepsDone(BaseException):
    """A script has done as many steps as somebody wanted, and is not needed any more.

    No ``Exception``: a script that catches those has no business with it.
    """


class Window(NamedTuple):
    """Measured steps of a run: ``steps``, after ``warmup`` others.

    Then ``profiled`` steps are timed op by op, which makes them slower.
    """

    warmup: int = 5
    steps: int = 20
    profiled: int = 5

    @property
    def total(self) -> int:
        """Steps of a run."""
        return sum(self)


class Steps:
    """Counts steps, and ends the script after the last one.

    Args:
        last: as many are done.
        after: called with the session and the number of steps done, after each.

    Attributes:
        done: how many.
        session: that they are done in; None: no optimizer has stepped.
    """

    def __init__(self, last: int, after: Callable[[Session, int], object]) -> None:
        self.done = 0
        self.session: Session | None = None
        self._last, self._after = last, after
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: RemovableHandle | None = None

    def opened(self, session: Session) -> None:
        """Follow a session that has been opened; its own hooks after a step come first."""
        self.close()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        """Count no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        session = current_session()
        if not isinstance(session, Session):
            return
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._optimizer, self.session = weakref.ref(optimizer), session
        elif counted is not optimizer or session is not self.session:
            return
        self.done += 1
        self._after(session, self.done)
        if self.done >= self._last:
            raise StepsDone


class Stopwatch:
    """Measures a window of steps.

    Args:
        window: begins after at least one step.
        tick: called after each step.

    Attributes:
        step_seconds: the mean over the window; None: it has not ended.
        peak_bytes: peak bytes of values on rank 0. On GPUs torch's allocator's; on CPUs the peak of
            resident memory in the window, without the process's own when that began.
        timeline: of the profiled steps; None: they are not done.
    """

    def __init__(self, window: Window, tick: Callable[[], object]) -> None:
        self.window, self.steps = window, Steps(window.total, self._after)
        self.step_seconds: float | None = None
        self.peak_bytes: int | None = None
        self.timeline: Timeline | None = None
        self._tick, self._begin = tick, 0.0
        self._timeline: Timeline | None = None
        self._besides = 0
        self._profile = ExitStack()

    def opened(self, session: Session) -> None:
        """Follow a session that has been opened."""
        self.steps.opened(session)

    def close(self) -> None:
        """Measure no more."""
        self.steps.close()
        self._profile.close()

    def _after(self, session: Session, done: int) -> None:
        self._tick()
        window = self.window
        if done in (window.warmup - 1, window.warmup):
            session.compiled()  # compiled code was run once more before the window begins
        if done == window.warmup:
            _settled(session)
            self._forget_peak(session)
            self._begin = time.perf_counter()
        if done == window.warmup + window.steps:
            self.step_seconds = (_settled(session) - self._begin) / window.steps
            self._note_peak(session)
            self._timeline = self._profile.enter_context(profile(session))
        if done == window.total:
            _settled(session)
            self.timeline = self._timeline

    def _forget_peak(self, session: Session) -> None:
        pid = session.worker_pids[0]
        if session.device_type == "cpu":
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)
            memory = _memory(session)
            self._besides = memory.resident - sum(memory.living)

    def _note_peak(self, session: Session) -> None:
        self.peak_bytes = _memory(session).peak - self._besides


def _memory(session: Session) -> Memory:
    """Return rank 0's memory, as in ``Session.memory``, without a sync point."""
    with session.recorder.lock, DEFER_INTERRUPT:
        memory, *_ = session._client.memory([()])  # no kind in particular
    return memory


def _settled(session: Session) -> float:
    """Return the time when the workers have done all runs that were sent.

    Ops recorded by then are not sent: that would split a step.
    """
    with session.recorder.lock, DEFER_INTERRUPT:
        session._client.synchronize()
        session._client.raise_failure()
    return time.perf_counter()
