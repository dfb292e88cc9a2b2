"""Reports: what the client knows of runs in flight, and what workers say besides answers."""

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
from lazygt.runtime.compiling.installs import Installs
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
from lazygt.runtime.recovery.recover import Recovery, RecoveryRecord
from lazygt.runtime.values import Answer, Fetches, Uploads

_log = logging.getLogger("lazygt")

#: Runs that are remembered though they are answered.
_LAUNCHED = 64


@dataclass(slots=True)
class InFlightRun:
    """A run that some ranks have not answered yet."""

    entry: PlanRecord | None
    describe: Describe | None
    #: id of its first output
    base: int
    waiting: set[int]
    #: ranks whose answers are looked at, and how many values each of them sends
    asked: frozenset[int]
    fetches: int
    answers: dict[int, Answer] = field(default_factory=dict)
    abandoned: bool = False
    #: what has failed on some rank
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
    """What the client knows of its workers.

    Args:
        uploads: what is on its way to the workers.
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
        #: who is told of messages, waits and timed runs, if anybody looks
        self.observer = observer
        self.counts = Counts()
        self.entries = PlanRecords(link.world_size)
        #: (plan, what went wrong) of swaps
        self.swap_errors: list[tuple[bytes, str]] = []
        #: what is compiled, on its way to other hosts; None: there are none
        self.installs: Installs | None = None
        #: its ``pending``
        self.installing: Set[tuple[str, int]] = frozenset()
        #: called when a rank could not swap a plan
        self.swap_failed: Callable[[], object] = _nothing_to_undo
        #: why workers capture no more CUDA graphs
        self.capture_errors: list[str] = []
        #: (graph, rows of a Relaid message): results that lie otherwise than was inferred
        self.relaid: list[tuple[Graph, Sequence[tuple[int, int, tuple[int, ...]]]]] = []
        self._death: WorkerDied | None = None
        #: why it is no use to wait for an answer any more
        self._no_answers: ProtocolError | DeviceLost | None = None
        self._max_ahead = max_ahead
        #: see ``RunsInFlight``
        self.quiet_until = inf
        self.recovery: Recovery | None = None
        #: called before an error is raised: has all as it was before an op failed, whose error it
        #: returns
        self.undo: Callable[[], ExecutionError | None] = _nothing_to_undo
        #: the one that was turned off
        self._former: Recovery | None = None
        #: why it is to be turned off when it has come to its end
        self._no_more = ""
        self.recoveries: list[RecoveryRecord] = []
        #: called when workers were replaced
        self.on_recovery: list[Callable[[RecoveryRecord], object]] = []
        self._uploads, self._fetches, self._failures = uploads, Fetches(link), Failures()
        #: number of the last run
        self._seq = 0
        self._in_flight: OrderedDict[int, InFlightRun] = OrderedDict()
        #: what is answered, and may still fail: its kernels were launched, and nobody has waited
        self._launched: dict[int, InFlightRun] = {}
        #: what is answered, and may not have been waited for yet
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
        """The number of the next run."""
        return self._seq + 1

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """How many runs some rank has not answered, and which ranks the oldest. For any thread."""
        runs = list(self._in_flight.values())
        return len(runs), tuple(sorted(runs[0].waiting)) if runs else ()

    @property
    def oldest_open(self) -> int:
        """The oldest run that some rank has not answered, or in which something has failed, or
        may."""
        first = self._failures.first_failed()
        failed = self.next_run if first is None else first.seq
        launched = [seq for seq in self._launched if seq > self._seq - _LAUNCHED]
        return min(next(iter(self._in_flight), self.next_run), failed, *launched)

    def _note_launched(self, seq: int, run: InFlightRun) -> None:
        """Remember what runs were, of which devices may still have something to do."""
        self._launched[seq] = run
        if len(self._launched) > _LAUNCHED:
            del self._launched[next(iter(self._launched))]

    def _note_ended(self, seq: int) -> None:
        """All devices have done a run, and those before it."""
        for launched in [each for each in self._launched if each <= seq]:
            del self._launched[launched]

    @property
    def failed(self) -> bool:
        """Whether an op has failed and nobody is told."""
        return self._failures.first_failed() is not None

    def first_failed(self) -> FirstFailed | None:
        """What failed in the oldest run in which anything has, unless somebody is told."""
        return self._failures.first_failed()

    def _left(self, told: Left) -> None:
        """A rank has left the group in a run; those before it may be under way on other ranks."""
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
        """From here on a worker's death loses values; say so, once."""
        assert self.recovery is not None
        if self.recovery.under_way:  # it needs what it has
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

    # -- what a recovery asks for --------------------------------------------------------

    @property
    def group(self) -> int:
        """Number of the workers' process group."""
        return self._group

    def new_group(self) -> int:
        """The number of the process group that the workers form next."""
        self._broken_since, self._group = None, self._group + 1
        return self._group

    def under_way(self, rank: int) -> int | None:
        """The oldest run that a rank has not answered."""
        return next((seq for seq, run in self._in_flight.items() if rank in run.waiting), None)

    def will_fail(self, rank: int, failure: Failure) -> None:
        """An op can't be done again: its run fails on all ranks."""
        seq = failure.seq
        run = self._in_flight.get(seq) or self._launched.get(seq)
        describe, errors = (None, []) if run is None else (run.describe, run.errors)
        self._failures.note_for_all(rank, failure, describe, errors, self.link.world_size)

    def device_lost(self, rank: int, told: Lost) -> DeviceLost:
        """The error for a worker whose device can't be used any more."""
        failure, at = told.failure, ""
        run = self._in_flight.get(failure.seq)
        if run is not None and run.describe is not None and failure.node >= 0:
            op, inputs, where = run.describe(failure.node, rank)
            at = f"{op}({', '.join(inputs)}), recorded at {where}"
        lost = DeviceLost(rank, self.link.pids[rank], failure.detail.partition("\n")[0], at)
        lost.culprit = failure if told.exact else None
        return lost

    def step_of(self, seq: int, rank: int, step: int | None) -> str:
        """What a step of a run is, what it asks for, and the user's line; None: it is not known."""
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
        """The ranks that have not answered a run."""
        run = self._in_flight.get(seq)
        return set() if run is None else run.waiting

    def forget_fetches(self, rank: int) -> None:
        """The arena in which a rank had left values is gone."""
        self._fetches.renew(rank)

    def drop_answer(self, rank: int, done: Done) -> None:
        """An answer comes that will be given again."""
        self._fetches.drop(rank, done)

    def restored(self) -> None:
        """All ranks are as a snapshot has them, and have not been told what came after it."""
        if self.installs is not None:
            self.installs.again()

    def recovered(self, record: RecoveryRecord) -> None:
        """Workers were replaced, and all is as it was."""
        self.entries.swapping.clear()
        self.recoveries.append(record)
        _log.warning("%s", record)
        if self.observer is not None:
            self.observer.recovered(self._seq, record)
        for told in self.on_recovery:
            told(record)

    def settled(self) -> None:
        """All journaled runs are done again."""
        if self._no_more:
            self._recover_no_more(self._no_more)


def _nothing_to_undo() -> None:
    return None
