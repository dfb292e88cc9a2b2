"""Timeline of a session in Chrome's trace format, for Perfetto and chrome://tracing.

All times are in nanoseconds of the host's monotonic clock, which its processes share; workers send
their times with the answers of timed runs.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from lazygt.graph.collectives import Communication, communications_by_node
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.graph.source import expand
from lazygt.host.files import write_output
from lazygt.printing.tables import summed
from lazygt.recovery.recover import RecoveryRecord
from lazygt.runtime.client.client import Client
from lazygt.runtime.client.console import Observer
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.runtime.messages import Snapped, Timings
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord
from lazygt.session import Session
from lazygt.submit.history import Flush

# -- collectives in timed runs: exposed seconds, and seconds that overlap with work ----------------

_LAUNCHES = frozenset({LAUNCH, LAUNCH_})


class ExchangeTime(NamedTuple):
    """Collectives of one kind on one axis, over all workers.

    Attributes:
        times: number of collectives.
        nbytes: payload in bytes.
        exposed: seconds in which workers launched collectives or waited for them, and computed
            nothing.
        hidden: seconds between launch and wait, in which workers computed; the collective may have
            ended earlier.
    """

    kind: str
    axis: str
    times: int
    nbytes: int
    exposed: float
    hidden: float


def exchange_times(runs: Iterable[tuple[Graph, Timings]]) -> list[ExchangeTime]:
    """Sum up the collectives of timed runs by kind and axis, the most exposed first.

    Args:
        runs: graph of a plan's steps and their timings, for each run.
    """
    rows = (row for graph, timings in runs for row in _times_of_run(graph, timings))
    totals = summed(rows, "times", "nbytes", "exposed", "hidden")
    return sorted(totals, key=lambda row: (-row.exposed, row.kind, row.axis))


class Flight(NamedTuple):
    """A collective of a timed run, from its launch to its wait.

    Attributes:
        launched, waited: (begin, end) of its launch and of its wait, in nanoseconds; ``waited`` is
            None for a blocking collective.
    """

    collective: Communication
    launched: tuple[int, int]
    waited: tuple[int, int] | None

    @property
    def nanoseconds(self) -> tuple[int, int]:
        """Begin of the launch and end of the wait; the collective may have ended earlier."""
        return self.launched[0], (self.waited or self.launched)[1]


def flights(graph: Graph, timings: Timings) -> list[Flight]:
    """Return the collectives of a timed run, in the order of their launches."""
    communications = communications_by_node(graph)
    if not communications:
        return []
    results = [values for _, values in graph.numbered()]
    collectives: list[Flight] = []
    #: value in flight -> index of its collective in ``collectives``
    in_flight: dict[int, int] = {}
    for number, _, begin, end in timings.steps:
        node = graph.nodes[number]
        if node.op == WAIT and node.args[0].index in in_flight:
            flight = in_flight.pop(node.args[0].index)
            collectives[flight] = collectives[flight]._replace(waited=(begin, end))
        elif number in communications:
            if node.op in _LAUNCHES:
                in_flight[results[number][0]] = len(collectives)
            collectives.append(Flight(communications[number], (begin, end), None))
    return collectives


def _times_of_run(graph: Graph, timings: Timings) -> Iterable[ExchangeTime]:
    """Yield the exposed and hidden seconds of each collective of a run."""
    for collective, launched, waited in flights(graph, timings):
        exposed, hidden = launched[1] - launched[0], 0
        if waited is not None:
            exposed += waited[1] - waited[0]
            hidden = waited[0] - launched[1]
        yield ExchangeTime(
            collective.kind, collective.mesh_dim, 1, collective.nbytes, exposed / 1e9, hidden / 1e9
        )


# -- events of Chrome's trace format ---------------------------------------------------------------


def track_name(pid: int, track: int, text: str, of: str = "thread") -> dict[str, Any]:
    """Return the event that names a track, or a process."""
    return {"ph": "M", "name": f"{of}_name", "pid": pid, "tid": track, "args": {"name": text}}


def box(
    pid: int, track: int, name: str, begin: float, length: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the event of a box on a track; times are microseconds."""
    return {"ph": "X", "name": name, "cat": "lazygt", "pid": pid, "tid": track, "ts": begin,
            "dur": length, "args": dict(args)}  # fmt: skip


def write_trace(
    path: str | os.PathLike[str], events: Iterable[dict[str, Any]], **other: Any
) -> None:
    """Write a trace to a JSON file, for Perfetto and chrome://tracing."""
    write_output(
        path, json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": other})
    )


# -- timeline of a session -------------------------------------------------------------------------

#: Limit of events, as viewers get too slow; events beyond it are dropped.
MAX_EVENTS = 1_000_000
_RECORDING, _MESSAGES, _COMPILES, _WORKERS = range(4)
_TRACKS = {_RECORDING: "recording", _MESSAGES: "messages", _COMPILES: "compiles"}


class TimedRun(NamedTuple):
    """A timed run of one worker."""

    pid: int  # the worker's process
    track: int  # the worker's track in the timeline
    number: int  # number of the run
    plan: Plan | None
    lines: Callable[[], Sequence[str]]  # returns the user's line of each step of the plan
    timings: Timings


class Timeline:
    """Events of client and workers, with their times.

    Attributes:
        dropped: number of events beyond the limit.
        snapshots: snapshots of workers.
        recoveries: replacements of workers.
    """

    def __init__(self) -> None:
        self.begin = time.monotonic_ns()
        self.dropped = 0
        self._events: list[dict[str, Any]] = []
        self._runs: list[TimedRun] = []
        self.snapshots: list[Snapped] = []
        self.recoveries: list[RecoveryRecord] = []
        self._count = 0
        self._sessions = 0

    @property
    def full(self) -> bool:
        """True if the limit of events is reached."""
        return self._count >= MAX_EVENTS

    @property
    def runs(self) -> int:
        """Number of timed runs over all workers."""
        return len(self._runs)

    @property
    def timed(self) -> Sequence[TimedRun]:
        """The timed runs, in order of arrival."""
        return self._runs

    def new_session_number(self) -> int:
        """Return the next number, from 0, for a session that draws into this timeline."""
        self._sessions += 1
        return self._sessions - 1

    def name(self, pid: int, track: int, process: str, thread: str) -> None:
        """Name a process and one of its tracks."""
        self._events += [
            track_name(pid, 0, process, of="process"), track_name(pid, track, thread)
        ]  # fmt: skip

    def span(
        self, pid: int, track: int, name: str, begin: int, end: int, args: Mapping[str, Any]
    ) -> None:
        """Add a box from ``begin`` to ``end``."""
        if self._reserve(1):
            self._events.append(self._span_event(pid, track, name, begin, end, args))

    def instant(self, pid: int, track: int, name: str, args: Mapping[str, Any]) -> None:
        """Add an instant event at this moment."""
        if self._reserve(1):
            now = self._micro(time.monotonic_ns())
            self._events.append({"ph": "i", "s": "t", "name": name, "cat": "lazygt", "pid": pid,
                                 "tid": track, "ts": now, "args": dict(args)})  # fmt: skip

    def arrow(self, pid: int, track: int, number: int, at: int, head: bool) -> None:
        """Add the tail or the head of the arrow ``number``, in the box at the time ``at``."""
        kind = {"ph": "f", "bp": "e"} if head else {"ph": "s"}
        if self._reserve(1):
            self._events.append({**kind, "name": "run", "cat": "run", "id": number, "pid": pid,
                                 "tid": track, "ts": self._micro(at)})  # fmt: skip

    def add(self, run: TimedRun) -> None:
        """Add a timed run, with a box a step."""
        if self._reserve(1 + len(run.timings.steps)):
            self._runs.append(run)

    def events(self) -> list[dict[str, Any]]:
        """Return all events in Chrome's trace format."""
        return [*self._events, *(event for run in self._runs for event in self._run_events(run))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a JSON file."""
        write_trace(path, self.events(), dropped_events=self.dropped)

    def by_line(self) -> list[tuple[str, int, float]]:
        """List (user's line, steps, seconds on all workers), the slowest line first.

        The time of a compiled group counts for its first step's line.
        """
        steps: Counter[str] = Counter()
        spent: Counter[str] = Counter()
        for run in self._runs:
            lines = run.lines()
            for number, count, begin, end in run.timings.steps:
                steps[lines[number]] += count
                spent[lines[number]] += end - begin
        return [(line, steps[line], nanoseconds / 1e9) for line, nanoseconds in spent.most_common()]

    def collectives(self) -> list[ExchangeTime]:
        """List the collectives of all workers, the most exposed first; see ``ExchangeTime``."""
        return exchange_times(
            (run.plan.steps.graph, run.timings) for run in self._runs if run.plan is not None
        )

    def beside(self) -> list[tuple[str, int, float]]:
        """List work other than runs (snapshots, recoveries): (description, count, seconds)."""
        rows = []
        if self.snapshots:
            copied = sum(snapshot.nbytes for snapshot in self.snapshots)
            spent = sum(snapshot.nanoseconds for snapshot in self.snapshots) / 1e9
            rows.append((f"snapshots ({copied:,} bytes copied)", len(self.snapshots), spent))
        if self.recoveries:
            spent = sum(each.seconds for each in self.recoveries)
            rows.append(("recoveries", len(self.recoveries), spent))
        return rows

    def __repr__(self) -> str:
        return f"<lazygt timeline: {self.runs} runs, {self._count} events>"

    def _reserve(self, count: int) -> bool:
        """Count events, and return True if the limit allows them; else count them as dropped."""
        if self.full:
            self.dropped += count
            return False
        self._count += count
        return True

    def _micro(self, at: int) -> float:
        """Return a time in microseconds since the timeline began."""
        return (at - self.begin) / 1e3

    def _span_event(
        self, pid: int, track: int, name: str, begin: int, end: int, args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the event of a box from ``begin`` to ``end``, in nanoseconds."""
        return box(pid, track, name, self._micro(begin), (end - begin) / 1e3, args)

    def _run_events(self, run: TimedRun) -> Iterable[dict[str, Any]]:
        """Yield the events of a run: a span of the run, and nested spans of its steps."""
        plan = run.plan
        name = f"plan {plan.digest.hex()[:12]}" if plan is not None else "no plan"
        about = {"run": run.number, "steps": len(run.timings.steps)}
        yield self._span_event(run.pid, run.track, name, run.timings.begin, run.timings.end, about)
        if plan is None:
            return
        nodes, lines = plan.steps.graph.nodes, run.lines()
        for number, count, begin, end in run.timings.steps:
            ops = [node.op for node in nodes[number : number + count]]
            results = [str(meta) for meta in nodes[number + count - 1].results]
            args = {"op": ", ".join(ops), "line": lines[number], "step": number,
                    "results": results}  # fmt: skip
            name = ops[0] if count == 1 else f"compiled: {count} ops"
            yield self._span_event(run.pid, run.track, name, begin, end, args)


@contextmanager
def profile(session: Session, into: Timeline | None = None) -> Iterator[Timeline]:
    """Timeline of a session's work during a ``with`` block; ``save`` it for Perfetto.

    During the block workers run plans node by node; a compiled group is one node. The end of the
    block is a sync point.

    Args:
        into: timeline to draw into; by default a new one.

    Raises:
        RuntimeError: a profile is being taken already.
    """
    if not isinstance(session, Session):
        raise TypeError(f"lazygt.profile: expected a session, not {type(session).__name__}")
    timeline = Timeline() if into is None else into
    with session.observed(partial(TimelineProbe, timeline)):
        yield timeline


class TimelineProbe(Observer):
    """Observer that draws one session's work into a timeline."""

    def __init__(self, timeline: Timeline, client: Client) -> None:
        self.timeline, self._client = timeline, client
        self._restored, self._previous = client.observer, client.observer or Observer()
        self.interval = self._previous.interval
        self._pid = os.getpid()
        self._pids = tuple(client.link.pids)
        self._session = timeline.new_session_number()
        self._attached_at = self._last_flush_end = time.monotonic_ns()

    def attach(self) -> None:
        """Name the tracks, and request timed runs from now on."""
        for track, name in _TRACKS.items():
            self.timeline.name(self._pid, self._track(track), "client", self._thread_name(name))
        for rank, pid in enumerate(self._pids):
            process = "client" if pid == self._pid else f"worker {rank}"
            track = self._track(_WORKERS) + rank
            self.timeline.name(pid, track, process, self._thread_name(f"worker {rank}"))
        self._client.observer, self.wants_timings = self, True

    def detach(self, compiles: Iterable[CompileRecord]) -> None:
        """Draw the compiles that ended since ``attach``, and restore the previous observer."""
        self._client.observer = self._restored
        for compile in compiles:
            end = int((compile.at + compile.took) * 1e9)
            if compile.took and end >= self._attached_at:
                begin = end - int(compile.seconds * 1e9)
                about = {**asdict(compile), "tier": compile.tier}
                name = f"compile {compile.ops} ops: {compile.status}"
                self._span(_COMPILES, name, begin, end, about)

    @contextmanager
    def flush(self, recent: Sequence[Flush]) -> Iterator[None]:
        """Observation of a flush: draws the one added to ``recent`` in the block, if any."""
        begin, last = time.monotonic_ns(), recent[-1] if recent else None
        try:
            yield
        finally:
            if recent and recent[-1] is not last:
                self._draw_flush(recent[-1], begin, time.monotonic_ns())

    def _draw_flush(self, flush: Flush, begin: int, end: int) -> None:
        """Draw the recording since the last flush, the flush, and the tail of its run's arrow."""
        about = {
            "line": expand(flush.call_site), "ops": flush.ops, "run": flush.run, "hit": flush.hit,
            "plan": None if flush.digest is None else flush.digest.hex()[:12],
        }  # fmt: skip
        self._span(_RECORDING, f"record {flush.ops} ops", self._last_flush_end, begin, about)
        self._span(_RECORDING, f"flush: {flush.reason}", begin, end, about)
        self.timeline.arrow(
            self._pid, self._track(_RECORDING), self._arrow_id(flush.run), begin, False
        )
        self._last_flush_end = end

    def record(self, what: str, begin: int, args: Mapping[str, Any]) -> None:
        """Draw a phase of a flush, from ``begin`` to now."""
        self._span(_RECORDING, what, begin, time.monotonic_ns(), args)

    def message(self, direction: str, kind: str, rank: int, run: int, size: int, why: str) -> None:
        """Draw a message that was sent or received."""
        self._previous.message(direction, kind, rank, run, size, why)
        about = {"rank": rank, "run": run, "bytes": size, "why": why}
        self.timeline.instant(self._pid, self._track(_MESSAGES), f"{direction} {kind}", about)

    def waiting(self, what: str) -> None:
        """Notify the previous observer that a wait has begun."""
        self._previous.waiting(what)

    def wait_ended(self) -> None:
        """Notify the previous observer that the wait has ended."""
        self._previous.wait_ended()

    def ran(
        self, rank: int, run: int, entry: PlanRecord | None, describe: Any, timings: Timings
    ) -> None:
        """Draw a timed run of a rank.

        Args:
            entry: the run's plan; None: it had none.
            describe: the ops of the run, for the user's lines.
        """
        plan: Plan | None = None
        lines: Callable[[], Sequence[str]] = tuple  # without a plan there are no steps
        if entry is not None:
            plan, lines = entry.plans[entry.index_of(rank)], partial(describe.lines, rank)
        pid, track = self._pids[rank], self._track(_WORKERS) + rank
        self.timeline.arrow(pid, track, self._arrow_id(run), timings.begin, True)
        self.timeline.add(TimedRun(pid, track, run, plan, lines, timings))
        if self.timeline.full:
            self.wants_timings = False

    def snapped(self, rank: int, snapped: Snapped) -> None:
        """Draw a worker's snapshot."""
        self.timeline.snapshots.append(snapped)
        about = {"values": len(snapped.values), "bytes copied": snapped.nbytes}
        end = snapped.begin + snapped.nanoseconds
        self._on_worker(rank, f"snapshot {snapped.number}", snapped.begin, end, about)

    def recovered(self, run: int, record: RecoveryRecord) -> None:
        """Draw a recovery, on the replaced workers."""
        self._previous.recovered(run, record)
        self.timeline.recoveries.append(record)
        end = time.monotonic_ns()
        begin = end - int(record.seconds * 1e9)
        for rank in record.ranks:
            about = {"why": record.why, "runs again": record.runs}
            self._on_worker(rank, f"recovery of worker {rank}", begin, end, about)

    def _on_worker(
        self, rank: int, name: str, begin: int, end: int, args: Mapping[str, Any]
    ) -> None:
        """Draw a span on the track of a worker."""
        track = self._track(_WORKERS) + rank
        self.timeline.span(self._pids[rank], track, name, begin, end, args)

    def _span(self, track: int, name: str, begin: int, end: int, args: Mapping[str, Any]) -> None:
        """Draw a span on one of the client's tracks."""
        self.timeline.span(self._pid, self._track(track), name, begin, end, args)

    def _track(self, track: int) -> int:
        """Return the id of a track, which is unique over sessions."""
        return self._session * 1_000 + track

    def _arrow_id(self, number: int) -> int:
        """Return the id of the arrow of run ``number``, which is unique over sessions."""
        return self._session << 32 | number

    def _thread_name(self, name: str) -> str:
        return f"session {self._session}: {name}"
