"""Counting and timing of training steps of an unmodified script, and the shares of a step's time.

A training step ends with each step of the optimizer that has stepped first."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lazygt.graph.mesh import Mesh
from lazygt.machine import Machine
from lazygt.machine.prices import axis_group_seconds
from lazygt.observe.timeline import (
    ExchangeTime,
    TimedRun,
    Timeline,
    exchange_times,
    flights,
    profile,
)
from lazygt.record.context import current_session
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.messages import MemoryUse
from lazygt.session import Session
from lazygt.simulation import CollectiveTime, Prediction

# -- shares of a step's time (compute, exposed collectives, host), simulated or measured -----------

#: Idle share of a step above which the host is the bottleneck; gaps between runs take less.
_HOST_BOUND = 0.1


class Shares(NamedTuple):
    """Shares of a step's time, from 0 to 1.

    Attributes:
        in_collectives: share with a collective in flight. In a measured step: from its launch to
            its wait; the collective may have ended earlier.
        compute: share in which the rank computes.
        bandwidth, latency: exposed share, split into waiting for bytes and waiting that does not
            depend on the number of bytes, by the machine's cost model.
        host: share in which the rank is idle, because the client still records, or kernels have
            to be launched.
        collectives: number of collectives of a step.
    """

    in_collectives: float
    compute: float
    bandwidth: float
    latency: float
    host: float
    collectives: int

    @property
    def exposed(self) -> float:
        """Share in which a rank only waits for collectives."""
        return self.bandwidth + self.latency

    @property
    def bound(self) -> str:
        """Bottleneck of a step."""
        if self.host > _HOST_BOUND:
            return "host"
        shares = {"compute": self.compute, "exposed bandwidth": self.bandwidth,
                 "latency x count": self.latency}  # fmt: skip
        return max(shares, key=shares.__getitem__)


def simulated_shares(prediction: Prediction) -> Shares:
    """Compute the shares of a predicted step, of the rank with the most exposed time.

    Collectives are *exposed* while their rank waits for them instead of computing.
    """
    step, mesh, machine = prediction.step_seconds, prediction.mesh, prediction.machine
    rows = prediction.collectives
    exposed = sum(row.exposed for row in rows)
    latency_seconds = _latency_seconds(machine, mesh, rows)
    in_flight = busy = 0.0
    for run in prediction.runs:
        slowest = max(run.simulated.classes, key=lambda c: sum(span.exposed for span in c.spans))
        in_flight += union_length((s.begin, s.end) for s in slowest.spans if s.lane != "compute")
        busy += slowest.busy
    return Shares(
        in_flight / step,
        busy / step,
        (exposed - latency_seconds) / step,
        latency_seconds / step,
        max(step - busy - exposed, 0.0) / step,
        sum(row.times for row in rows),
    )


def measured_shares(
    runs: Sequence[TimedRun], step_seconds: float, steps: int, mesh: Mesh, machine: Machine
) -> Shares:
    """Compute the mean shares of the ranks in measured steps.

    Args:
        runs: runs timed op by op, which slows the client down.
        step_seconds: duration of a step without that timing.
        steps: number of steps of the runs.
    """
    graphs = [(run.plan.steps.graph, run.timings) for run in runs if run.plan is not None]
    ranks = len({(run.pid, run.track) for run in runs})
    busy = sum(run.timings.end - run.timings.begin for run in runs) / 1e9
    total = max(step_seconds * steps * ranks, busy)
    rows = exchange_times(graphs)
    exposed = sum(row.exposed for row in rows)
    latency_seconds = _latency_seconds(machine, mesh, rows)
    in_flight = sum(
        union_length(flight.nanoseconds for flight in flights(graph, timings))
        for graph, timings in graphs
    )
    return Shares(
        in_flight / 1e9 / total,
        max(busy - exposed, 0.0) / total,
        (exposed - latency_seconds) / total,
        latency_seconds / total,
        (total - busy) / total,
        round(sum(row.times for row in rows) / (steps * ranks)),
    )


def _latency_seconds(
    machine: Machine, mesh: Mesh | None, rows: Sequence[CollectiveTime] | Sequence[ExchangeTime]
) -> float:
    """Return the exposed seconds of collectives that do not depend on their bytes.

    Args:
        rows: collectives of a step, with their exposed seconds.
    """
    return sum(
        row.exposed * latency_share(machine, mesh, row.axis, row.kind, row.times, row.nbytes)
        for row in rows
        if mesh is not None
    )


def latency_share(
    machine: Machine, mesh: Mesh, axis: str, name: str, times: int, nbytes: int
) -> float:
    """Return the share of the time of collectives that does not depend on their bytes.

    Args:
        axis: axis of the mesh along which they run.
        name: kind of the collectives, perhaps with the reduction, such as ``all_reduce sum``.
        times: number of collectives.
        nbytes: payload of all of them.
    """
    kind, group = name.split(" ")[0], mesh.axis_groups(axis)[0]
    if kind in ("send", "receive"):
        kind, group = "send_recv", group[:2]
    total = axis_group_seconds(machine, kind, round(nbytes / times), group)
    return min(axis_group_seconds(machine, kind, 0, group) / total, 1.0) if total else 0.0


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = covered_until = 0.0
    for begin, end in sorted(spans):
        total += max(end - max(begin, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total


# -- counting and timing of training steps of an unmodified script ---------------------------------


class StepsDone(BaseException):
    """Raised inside a script to end it after the requested number of steps.

    Not an ``Exception``, so that ``except Exception`` in a script does not catch it.
    """


class Window(NamedTuple):
    """Phases of a measured run: ``warmup`` steps, then ``steps`` that are measured.

    Then ``profiled`` steps are timed op by op, which makes them slower.
    """

    warmup: int = 5
    steps: int = 20
    profiled: int = 5

    @property
    def total(self) -> int:
        """Number of steps of a run."""
        return sum(self)


class Steps:
    """Counter of steps that ends the script after the last one, by raising ``StepsDone``.

    Args:
        last: number of steps to do.
        after_step: called after each step with the session and the number of steps done.

    Attributes:
        done: number of steps done.
        session: session of the steps; None while no optimizer has stepped.
    """

    def __init__(self, last: int, after_step: Callable[[Session, int], object]) -> None:
        self.done = 0
        self.session: Session | None = None
        self._last, self._after_step = last, after_step
        #: the optimizer that stepped first
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: RemovableHandle | None = None

    def on_session_opened(self, _session: Session) -> None:
        """Count the steps from here on.

        The counter is a hook on all optimizers. Hooks run in the order of registration, so it is
        registered again, behind those that the new session has registered on opening.
        """
        self.close()
        self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)

    def close(self) -> None:
        """Stop counting."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: object, kwargs: object
    ) -> None:
        """Count a step if the optimizer is the first one that stepped; end after the last."""
        session = current_session()
        if not isinstance(session, Session):
            return
        first_optimizer = None if self._optimizer is None else self._optimizer()
        if first_optimizer is None:
            self._optimizer, self.session = weakref.ref(optimizer), session
        elif first_optimizer is not optimizer or session is not self.session:
            return
        self.done += 1
        self._after_step(session, self.done)
        if self.done >= self._last:
            raise StepsDone


class Stopwatch:
    """Timer of a window of steps.

    Args:
        window: phases of the run; at least one step of warm-up.
        tick: called after each step.

    Attributes:
        step_seconds: mean over the window; None until it has ended.
        peak_bytes: peak bytes of values on rank 0: of torch's allocator on a GPU; on a CPU the peak
            resident memory in the window, less the process's own at its beginning.
        timeline: timeline of the profiled steps; None until they are done.
    """

    def __init__(self, window: Window, tick: Callable[[], object]) -> None:
        self.window, self.steps = window, Steps(window.total, self._after_step)
        self.step_seconds: float | None = None
        self.peak_bytes: int | None = None
        self.timeline: Timeline | None = None
        self._tick, self._window_begin = tick, 0.0
        #: timeline of the profiled steps so far
        self._timeline: Timeline | None = None
        #: resident bytes of the worker besides its values, at the beginning of the window
        self._process_bytes = 0
        #: context of the profile
        self._profile = ExitStack()

    def on_session_opened(self, session: Session) -> None:
        """Measure the steps from here on; see ``Steps.on_session_opened``."""
        self.steps.on_session_opened(session)

    def close(self) -> None:
        """Stop measuring."""
        self.steps.close()
        self._profile.close()

    def _after_step(self, session: Session, done: int) -> None:
        """Enter the next phase of the window if step number ``done`` ends one."""
        self._tick()
        window = self.window
        if done in (window.warmup - 1, window.warmup):
            session.compiled()  # await compiles one step early: they run before the window
        if done == window.warmup:
            _synchronized_time(session)
            self._reset_peak(session)
            self._window_begin = time.perf_counter()
        if done == window.warmup + window.steps:
            self.step_seconds = (_synchronized_time(session) - self._window_begin) / window.steps
            self._read_peak(session)
            self._timeline = self._profile.enter_context(profile(session))
        if done == window.total:
            _synchronized_time(session)
            self.timeline = self._timeline

    def _reset_peak(self, session: Session) -> None:
        """Reset rank 0's peak of resident memory, and note the process's own bytes (CPU only)."""
        pid = session.worker_pids[0]
        if session.device_type == "cpu":
            # resets the peak of resident memory, see proc(5)
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            memory = _memory(session)
            self._process_bytes = memory.resident - sum(memory.living)

    def _read_peak(self, session: Session) -> None:
        """Set ``peak_bytes`` to rank 0's peak since the reset."""
        self.peak_bytes = _memory(session).peak - self._process_bytes


def _memory(session: Session) -> MemoryUse:
    """Return rank 0's memory, as in ``Session.memory``, without a sync point."""
    with session.recorder.lock, DEFER_INTERRUPT:
        memory, *_ = session._client.memory([()])  # without categories
    return memory


def _synchronized_time(session: Session) -> float:
    """Wait until the workers have finished all sent runs, and return the time.

    Recorded ops are not flushed: that would split a step.
    """
    with session.recorder.lock, DEFER_INTERRUPT:
        session._client.synchronize()
        session._client.raise_failure()
    return time.perf_counter()
