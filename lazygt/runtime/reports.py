"""Reports of the workers besides answers, and the client's records of runs in flight."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any

from lazygt.errors import DeviceLost, ExecutionError, ProtocolError, WorkerDied
from lazygt.graph.node import Graph
from lazygt.recovery.recover import Recovery, RecoveryRecord
from lazygt.runtime.compiling.artifacts import Installs
from lazygt.runtime.console import Observer
from lazygt.runtime.failures import Describe, Failures, FirstFailed
from lazygt.runtime.launch.link import Link
from lazygt.runtime.messages import (
    Captured,
    Done,
    Failure,
    Installed,
    Left,
    Lost,
    Relaid,
    Snapped,
)
from lazygt.runtime.plan_records import PlanRecord, PlanRecords
from lazygt.runtime.values import Answer, Fetches, Uploads

_log = logging.getLogger("lazygt")

#: Number of answered runs that are remembered.
_LAUNCHED = 64


@dataclass(slots=True)
class InFlightRun:
    """A run that some ranks have not answered yet."""

    entry: PlanRecord | None
    describe: Describe | None
    #: id of its first output
    base: int
    waiting: set[int]
    #: ranks with answers to read, and the number of values that each of them sends
    asked: frozenset[int]
    fetches: int
    answers: dict[int, Answer] = field(default_factory=dict)
    abandoned: bool = False
    #: errors of the ranks
    errors: list[ExecutionError] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Messages and bytes so far."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_uploaded: int = 0
    bytes_fetched: int = 0
    fetches: int = 0
    plans_sent: int = 0
    largest_run: int = 0
    last_run: int = 0
    snapshot_bytes: int = 0


class Reports:
    """The client's knowledge of its workers.

    Args:
        uploads: values on their way to the workers.
        max_ahead: runs that may be unanswered before another one waits.
        launches_ahead: workers answer when kernels are launched, not when they have ended.
    """

    def __init__(
        self,
        link: Link,
        observer: Observer | None,
        uploads: Uploads,
        max_ahead: int,
        launches_ahead: bool,
    ) -> None:
        self.link = link
        self._everyone = frozenset(range(link.world_size))
        self._launches_ahead = launches_ahead
        #: observer of messages, waits and timed runs, if there is one
        self.observer = observer
        self.counts = Counts()
        self.entries = PlanRecords(link.world_size)
        #: (plan, error) of swaps that failed
        self.swap_errors: list[tuple[bytes, str]] = []
        #: artifacts on their way to other hosts; None: no other hosts
        self.installs: Installs | None = None
        #: the ``pending`` of ``installs``
        self.installing: Set[tuple[str, int]] = frozenset()
        #: called when a rank could not swap a plan
        self.swap_failed: Callable[[], object] = _nothing_to_undo
        #: errors for which workers capture no more CUDA graphs
        self.capture_errors: list[str] = []
        #: (graph, rows of a Relaid message): results with other strides than inferred
        self.relaid: list[tuple[Graph, Sequence[tuple[int, int, tuple[int, ...]]]]] = []
        self._death: WorkerDied | None = None
        #: error for which no answer will come any more
        self._no_answers: ProtocolError | DeviceLost | None = None
        self._max_ahead = max_ahead
        #: see ``RunsInFlight``
        self.quiet_until = inf
        self.recovery: Recovery | None = None
        #: called before an error is raised: rolls back to before a failed op, and returns the
        #: op's error
        self.undo: Callable[[], ExecutionError | None] = _nothing_to_undo
        #: the recovery that was turned off
        self._former: Recovery | None = None
        #: reason for turning recovery off when the current one has ended
        self._no_more = ""
        self.recoveries: list[RecoveryRecord] = []
        #: called when workers were replaced
        self.on_recovery: list[Callable[[RecoveryRecord], object]] = []
        self._uploads, self._fetches, self._failures = uploads, Fetches(link), Failures()
        #: number of the last run
        self._seq = 0
        self._in_flight: OrderedDict[int, InFlightRun] = OrderedDict()
        #: answered runs that may still fail: their kernels were launched, and not waited for
        self._launched: dict[int, InFlightRun] = {}
        #: answered runs that may not have been waited for yet
        self._early: dict[int, InFlightRun] = {}
        self._written: list[tuple[Any, ...]] = []
        #: the epoch in which workers were asked to write
        self._writing = 0
        #: number of the workers' process group
        self._group = 0
        #: id of the first value for which ranks may not have met, once one has left the group
        self._broken_since: int | None = None

    @property
    def next_run(self) -> int:
        """Number of the next run."""
        return self._seq + 1

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """Number of unanswered runs, and the ranks that owe the oldest one. For any thread."""
        runs = list(self._in_flight.values())
        return len(runs), tuple(sorted(runs[0].waiting)) if runs else ()

    @property
    def oldest_open(self) -> int:
        """The oldest run that is not answered by all ranks, has failed, or may still fail."""
        first = self._failures.first_failed()
        failed = self.next_run if first is None else first.seq
        launched = [seq for seq in self._launched if seq > self._seq - _LAUNCHED]
        return min(next(iter(self._in_flight), self.next_run), failed, *launched)

    def _note_launched(self, seq: int, run: InFlightRun) -> None:
        """Remember a run that devices may not have finished."""
        self._launched[seq] = run
        if len(self._launched) > _LAUNCHED:
            del self._launched[next(iter(self._launched))]

    def _note_ended(self, seq: int) -> None:
        """Note that all devices have finished a run, and those before it."""
        for launched in [each for each in self._launched if each <= seq]:
            del self._launched[launched]

    @property
    def failed(self) -> bool:
        """True if an op has failed and the user has not been told."""
        return self._failures.first_failed() is not None

    def first_failed(self) -> FirstFailed | None:
        """Return the failures of the oldest run that has unreported ones."""
        return self._failures.first_failed()

    def _left(self, told: Left) -> None:
        """Note that a rank has left the group in a run; others may still do earlier runs."""
        if told.number != self._group or not self._in_flight:
            raise ProtocolError(f"it left process group {told.number} in no run")
        if self._broken_since is None:
            self._broken_since = next(run.base for run in self._in_flight.values())

    def _relaid(self, rank: int, told: Relaid) -> None:
        entry = next((each for each in self.entries if each.name(rank) == told.digest), None)
        if entry is None:
            return  # forgotten meanwhile
        graph = entry.plans[entry.of(rank)].steps.graph
        for number, position, strides in told.rows:
            fresh = graph.nodes[number].fresh if number < len(graph.nodes) else ()
            meta = fresh[position] if position < len(fresh) else None
            if meta is None or len(meta.shape) != len(strides):
                raise ProtocolError(
                    f"plan {told.digest.hex()[:12]} has no result {told.rows!r:.80}"
                )
        self.relaid.append((graph, told.rows))

    def _captured(self, rank: int, told: Captured) -> None:
        entry = next((each for each in self.entries if each.name(rank) == told.digest), None)
        if entry is not None:
            entry.captures[rank] = told
        if told.failed:
            self.capture_errors.append(f"worker {rank}: {told.error}")

    def _swapped(self, rank: int, digest: bytes, error: str) -> None:
        self.entries.swapped(rank, digest)
        if error:
            self.swap_errors.append((digest, f"worker {rank}: {error}"))
            self.swap_failed()

    def _installed(self, rank: int, told: Installed) -> None:
        if self.installs is None:
            raise ProtocolError("it was not asked for compiled code")
        self.installs.answered(rank, told)

    def _snapped(self, rank: int, told: Snapped) -> None:
        if self.recovery is None:
            return
        if told.error:
            self._recover_no_more(f"worker {rank} could not take a snapshot: {told.error}")
            return
        self.counts.snapshot_bytes += told.nbytes
        if self.observer is not None:
            self.observer.snapped(rank, told)
        covered = self.recovery.took(rank, told)
        if covered is not None:
            self._uploads.covered(covered)

    def _recover_no_more(self, why: str) -> None:
        """Turn recovery off and warn, once: from here on a worker's death loses values."""
        assert self.recovery is not None
        if self.recovery.under_way:  # it needs its snapshots
            self._no_more = why
            return
        self.recovery.doubts.believe()
        self._former, self.recovery, self.quiet_until = self.recovery, None, inf
        self._uploads.keep_no_more()
        warnings.warn(
            f"lazygt: {why}. From here on the death of a worker loses values: save what matters. "
            f"lazygt.session(recover='off') takes no snapshots.",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- for a recovery ------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Number of the workers' process group."""
        return self._group

    def new_group(self) -> int:
        """Return the number of the process group that the workers form next."""
        self._broken_since, self._group = None, self._group + 1
        return self._group

    def under_way(self, rank: int) -> int | None:
        """Return the oldest run that a rank has not answered."""
        return next((seq for seq, run in self._in_flight.items() if rank in run.waiting), None)

    def will_fail(self, rank: int, failure: Failure) -> None:
        """Note that an op can't be repeated: its run fails on all ranks."""
        seq = failure.seq
        run = self._in_flight.get(seq) or self._launched.get(seq)
        describe, errors = (None, []) if run is None else (run.describe, run.errors)
        self._failures.note_for_all(rank, failure, describe, errors, self.link.world_size)

    def device_lost(self, rank: int, told: Lost) -> DeviceLost:
        """Return the error for a worker with a device that can't be used any more."""
        failure, at = told.failure, ""
        run = self._in_flight.get(failure.seq)
        if run is not None and run.describe is not None and failure.node >= 0:
            op, inputs, where = run.describe(failure.node, rank)
            at = f"{op}({', '.join(inputs)}), recorded at {where}"
        lost = DeviceLost(rank, self.link.pids[rank], failure.detail.partition("\n")[0], at)
        lost.culprit = failure if told.exact else None
        return lost

    def step_of(self, seq: int, rank: int, step: int | None) -> str:
        """Describe a step of a run: its op, the bytes it makes and the user's line.

        Args:
            step: None: it is not known.
        """
        run = self._in_flight[seq]
        if run.entry is None or run.describe is None:
            return "the upload of its values"
        if step is None:
            return f"one of its {len(run.entry.plans[run.entry.of(rank)].steps.graph.nodes)} steps"
        op, inputs, where = run.describe(step, rank)
        nodes = run.entry.plans[run.entry.of(rank)].steps.graph.nodes
        fresh = nodes[step].fresh if step < len(nodes) else ()
        asked = sum(meta.nbytes for meta in fresh if meta is not None)
        return f"{op}({', '.join(inputs)}), which makes {asked:,} bytes, recorded at {where}"

    def waiting_for(self, seq: int) -> Set[int]:
        """Return the ranks that have not answered a run."""
        run = self._in_flight.get(seq)
        return set() if run is None else run.waiting

    def forget_fetches(self, rank: int) -> None:
        """Forget the values that a rank had left in its arena: it is gone."""
        self._fetches.renew(rank)

    def drop_answer(self, rank: int, done: Done) -> None:
        """Drop an answer that will be given again."""
        self._fetches.drop(rank, done)

    def restored(self) -> None:
        """Note that all ranks have a snapshot's state; messages sent after it are lost."""
        if self.installs is not None:
            self.installs.again()

    def recovered(self, record: RecoveryRecord) -> None:
        """Note that workers were replaced, and that everything is as before."""
        self.entries.swapping.clear()
        self.recoveries.append(record)
        _log.warning("%s", record)
        if self.observer is not None:
            self.observer.recovered(self._seq, record)
        for told in self.on_recovery:
            told(record)

    def settled(self) -> None:
        """Note that all journaled runs have been repeated."""
        if self._no_more:
            self._recover_no_more(self._no_more)


def _nothing_to_undo() -> None:
    return None
