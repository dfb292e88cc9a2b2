"""Answers: the runs that are in flight, and what the client does with what workers say."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any

from lazygt.errors import ExecutionError, ProtocolError
from lazygt.graph.node import Graph
from lazygt.runtime.console import Observer
from lazygt.runtime.conversation import Conversation
from lazygt.runtime.failures import Describe, Failures
from lazygt.runtime.launch.link import Link
from lazygt.runtime.messages import (
    TO_CLIENT,
    Captured,
    Done,
    Left,
    Need,
    Relaid,
    Snapped,
    Swapped,
    Wrote,
)
from lazygt.runtime.plan_records import PlanRecord, PlanRecords, again_message, swap_message
from lazygt.runtime.recovery.doubts import Told
from lazygt.runtime.recovery.recover import RecoveryRecord
from lazygt.runtime.values import Answer, Fetches, Uploads
from lazygt.runtime.wire import Buffer, Part, decode, size_of

_log = logging.getLogger("lazygt")


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


class Answers(Conversation):
    """Takes answers. Nothing here waits.

    Args:
        max_ahead: runs that may be unanswered before another one waits.
        uploads: what is on its way to the workers.
    """

    def __init__(
        self, link: Link, observer: Observer | None, max_ahead: int, uploads: Uploads
    ) -> None:
        super().__init__(link, observer)
        self.entries = PlanRecords(link.world_size)
        #: (plan, what went wrong) of swaps
        self.swap_errors: list[tuple[bytes, str]] = []
        #: why workers capture no more CUDA graphs
        self.capture_errors: list[str] = []
        #: (graph, rows of a Relaid message): results that lie otherwise than was inferred
        self.relaid: list[tuple[Graph, Sequence[tuple[int, int, tuple[int, ...]]]]] = []
        #: called when workers were replaced
        self.on_recovery: list[Callable[[RecoveryRecord], object]] = []
        self._max_ahead = max_ahead
        self._uploads, self._fetches, self._failures = uploads, Fetches(link), Failures()
        self._in_flight: OrderedDict[int, InFlightRun] = OrderedDict()
        #: what is answered, and may not have been waited for yet
        self._early: dict[int, InFlightRun] = {}
        self._written: list[tuple[Any, ...]] = []
        #: the epoch in which workers were asked to write
        self._writing = 0
        #: number of the workers' process group
        self._group = 0
        #: id of the first value for which ranks may not have met, once one has left the group
        self._broken_since: int | None = None

    def expect(
        self,
        seq: int,
        entry: PlanRecord | None,
        describe: Describe | None,
        base: int,
        fetches: int,
        ranks: Collection[int] = (0,),
    ) -> None:
        """A run is about to be sent, or was sent by C++: its answers will come."""
        everyone = set(range(self.link.world_size))
        self._in_flight[seq] = InFlightRun(
            entry, describe, base, everyone, frozenset(ranks), fetches
        )

    def _take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on what a worker says.

        Raises:
            ProtocolError: it makes no sense. What that worker was asked may never be answered, so
                every later wait raises this again.
        """
        rank, frames = message
        size = size_of(frames)
        self.counts.messages_received += 1
        self.counts.bytes_received += size
        try:
            told = decode(frames, TO_CLIENT)
            if self.observer is not None:
                kind = type(told).__name__.lower()
                self.observer.message("receive", kind, rank, _number(told), size, "")
            for believed in self._relied_on(Told(rank, told, frames[1:])):
                self._act(*believed)
        except ProtocolError as error:
            self._nonsense = ProtocolError(
                f"worker {rank} sent what makes no sense: {error}. Leave the session and open a "
                f"new one; please report this, if nobody tampered with the worker"
            )
            raise self._nonsense from error

    def _relied_on(self, told: Told) -> Iterable[Told]:
        """What to act on by now: perhaps not this, since a rank may be dying."""
        if self.recovery is None or self.link.world_size == 1:
            return (told,)
        return self.recovery.doubts.sort_out(told)

    def _act(self, rank: int, told: Part, buffers: list[memoryview]) -> None:
        match told:
            case Done():
                self._done(rank, told, buffers)
            case Need():
                self._resend(rank, told)
            case Left():
                self._left(told)
            case Relaid():
                self._relaid(rank, told)
            case Wrote():
                checks, handles = told.checks, told.handles
                self._written.append((rank, told.number, checks, told.error, handles))
            case Captured():
                self._captured(rank, told)
            case Swapped():
                self._swapped(rank, told.digest, told.error)
            case Snapped():
                self._snapped(rank, told)

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

    def _snapped(self, rank: int, told: Snapped) -> None:
        if self.recovery is None:
            return
        if told.error:
            self._recover_no_more(f"worker {rank} could not take a snapshot: {told.error}")
            return
        covered = self.recovery.took(rank, told)
        if covered is not None:
            self._uploads.covered(covered)

    def _recover_no_more(self, why: str) -> None:
        """From here on a worker's death loses values; say so, once."""
        self.recovery, self.quiet_until = None, inf
        self._uploads.keep_no_more()
        warnings.warn(
            f"lazygt: {why}. From here on the death of a worker loses values: save what matters. "
            f"lazygt.session(recover='off') takes no snapshots.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _done(self, rank: int, done: Done, buffers: list[memoryview]) -> None:
        run = self._in_flight.get(done.seq)
        if self.recovery is not None:
            self.recovery.answered(rank, done.seq)
            if (run is None or rank not in run.waiting) and self.recovery.is_again(done.seq):
                for offset in done.releases:
                    self._uploads.read_again(offset, rank, done.seq)
                return
        if run is None or rank not in run.waiting:
            raise ProtocolError(f"it answers run {done.seq}, which it was not asked")
        wanted = run.fetches if rank in run.asked else 0
        self._fetches.check(rank, done, buffers, wanted)
        run.waiting.discard(rank)
        if done.timings is not None and self.observer is not None:
            self.observer.ran(rank, done.seq, run.entry, run.describe, done.timings)
        for offset in done.releases:
            self._uploads.was_read(offset, rank, done.seq)
        if rank in run.asked:
            run.answers[rank] = done, buffers
            if run.abandoned:
                self._fetches.drop(rank, done)
        for failure in done.failures:
            self._failures.note(done.seq, rank, failure, run.describe, run.errors)
        if not run.waiting:
            del self._in_flight[done.seq]
            if run.fetches or run.describe is not None:
                self._keep_early(done.seq, run)

    def _keep_early(self, seq: int, run: InFlightRun) -> None:
        """In a recovery answers come before anybody waits for them."""
        if self.recovery is not None and self.recovery.under_way and not run.abandoned:
            old = [key for key in self._early if key < seq - 2 * self._max_ahead]
            for key in old:  # nobody has waited for it, nor will
                del self._early[key]
            self._early[seq] = run

    # -- plans that a worker lacks ---------------------------------------------------------

    def _resend(self, rank: int, need: Need) -> None:
        """A rank has forgotten the plan of a run."""
        run = self._in_flight.get(need.seq)
        entry = None if run is None else run.entry
        if entry is None and self.recovery is not None:
            entry = self.recovery.journal.entry_of(need.seq)
        if entry is None or entry.name(rank) != need.digest:
            raise ProtocolError("it asks for a plan that was never sent")
        frames = again_message(entry, rank)
        self._send("plan", rank, frames, f"worker {rank} had forgotten it")
        self._shipped(entry, frames, 1)
        later = self.recovery is not None and self.recovery.journal.swaps_later(entry, need.seq)
        if entry.swap and not later:
            self._send("swap", rank, swap_message(entry, rank), "compiled")

    def _shipped(self, entry: PlanRecord, frames: Sequence[Buffer], times: int) -> None:
        self.counts.plans_sent += 1
        entry.ships += times
        entry.size = size_of(frames)

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

    def step_of(self, seq: int, rank: int, step: int) -> str:
        """What a step of a run is, what it asks for, and the user's line."""
        run = self._in_flight[seq]
        if run.entry is None or run.describe is None:
            return "the upload of its values"
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

    def take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on what a worker says."""
        self._take(message)

    def recovered(self, record: RecoveryRecord) -> None:
        """Workers were replaced, and all is as it was."""
        self.entries.swapping.clear()
        _log.warning("%s", record)
        if self.observer is not None:
            self.observer.message("recover", "runs", record.ranks[0], self._seq, 0, str(record))
        for told in self.on_recovery:
            told(record)


def _number(told: Part) -> int:
    """Of the run, or of what else a worker speaks of."""
    match told:
        case Done() | Need():
            return told.seq
        case Wrote() | Left():
            return told.number
    return 0
