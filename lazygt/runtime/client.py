"""Client: the one who talks to the workers. Numbers runs and values, keeps what is in flight."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, NoReturn

import torch

from lazygt.errors import ExecutionError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph
from lazygt.runtime.console import Observer
from lazygt.runtime.failures import Describe, Failures
from lazygt.runtime.launch.link import Link
from lazygt.runtime.messages import (
    TO_CLIENT,
    Captured,
    Done,
    Failure,
    Left,
    Need,
    Relaid,
    Renew,
    Run,
    Snapped,
    Swapped,
    Write,
    Wrote,
)
from lazygt.runtime.plan_records import PlanRecord, PlanRecords, again_message, swap_message
from lazygt.runtime.quick_numbers import number_reader
from lazygt.runtime.recovery.doubts import Told
from lazygt.runtime.recovery.journal import Renewed, SwappedIn
from lazygt.runtime.recovery.recover import Recovery, RecoveryRecord
from lazygt.runtime.values import (
    Answer,
    Fetches,
    Freed,
    Regions,
    RemoteValue,
    Uploads,
    new_values,
    wanted,
)
from lazygt.runtime.wire import Buffer, Part, bits, decode, size_of

_log = logging.getLogger("lazygt")


@dataclass(slots=True)
class _InFlightRun:
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


class Client:
    """Sends plans and runs over a link and takes the answers.

    Args:
        max_ahead: runs that may be unanswered before ``run`` waits.
        shm_threshold: bytes from which an upload goes through the shared-memory arena.
        recover: (share of the time, bytes) that recovery may take; None: there is none.
    """

    def __init__(
        self,
        link: Link,
        max_ahead: int,
        shm_threshold: int,
        observer: Observer | None = None,
        recover: tuple[float, int] | None = None,
    ) -> None:
        self.link = link
        #: who is told of messages, waits and timed runs, if anybody looks
        self.observer = observer
        self.counts = Counts()
        self.entries = PlanRecords(link.world_size)
        #: (plan, what went wrong) of swaps
        self.swap_errors: list[tuple[bytes, str]] = []
        #: why workers capture no more CUDA graphs
        self.capture_errors: list[str] = []
        #: (graph, rows of a Relaid message): results that lie otherwise than was inferred
        self.relaid: list[tuple[Graph, Sequence[tuple[int, int, tuple[int, ...]]]]] = []
        self._death: WorkerDied | None = None
        #: why no worker's answers can be relied on any more
        self._nonsense: ProtocolError | None = None
        self._max_ahead = max_ahead
        #: see ``RunsInFlight``
        self.quiet_until = inf
        self.recovery = None if recover is None else Recovery(self, link, *recover)
        #: called when workers were replaced
        self.on_recovery: list[Callable[[RecoveryRecord], object]] = []
        keeps = recover is not None
        self._uploads = Uploads(link.upload, link.world_size, shm_threshold, keeps)
        self._fetches = Fetches(link)
        self._failures = Failures()
        #: takes a number out of an answer that is nothing else
        self.numbers: Any = number_reader() if link.world_size == 1 else None
        self._seq = 0
        self._next_id = 1
        self._freed = Freed()
        self._in_flight: OrderedDict[int, _InFlightRun] = OrderedDict()
        #: what is answered, and may not have been waited for yet
        self._early: dict[int, _InFlightRun] = {}
        self._written: list[tuple[Any, ...]] = []
        #: the epoch in which workers were asked to write
        self._writing = 0
        #: number of the workers' process group
        self._group = 0
        #: id of the first value for which ranks may not have met, once one has left the group
        self._broken_since: int | None = None

    def close(self) -> None:
        """Forget what failed: a raised error holds the frames that it went through, and these the
        user's tensors, and they the session."""
        self._failures = Failures()
        self._in_flight.clear()

    @property
    def snapshots(self) -> int:
        """How many snapshots all workers have taken."""
        return 0 if self.recovery is None else self.recovery.journal.committed.number

    # -- values --------------------------------------------------------------------------

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Copy a CPU tensor now; it travels with the next run. Its layout will be ``meta``'s."""
        self.counts.bytes_uploaded += meta.nbytes
        key = self._new_ids(1)
        self._uploads.add(key, source, meta)
        return RemoteValue(key, self._freed)

    def adopt(self, key: int) -> RemoteValue:
        """A value that a worker named itself (a data-dependent result)."""
        return RemoteValue(key, self._freed)

    def _new_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def next_output(self, position: int) -> int:
        """The id that output ``position`` of the next run will have."""
        return self._next_id + position

    @property
    def idle(self) -> bool:
        """Whether there is nothing that a message would have to carry."""
        return not self._uploads and not self._freed

    # -- runs ----------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Whether nothing is under way or waits to be said, so that C++ may send a run."""
        waits = self._in_flight or self.entries.swapping or self._uploads or self._fetches.waiting
        told = self.relaid or self.capture_errors or self._failures.unraised
        wrong = self._death or self._nonsense or not self.link.healthy
        return not (waits or told or wrong or self.observer) and monotonic() < self.quiet_until

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
        self._in_flight[seq] = _InFlightRun(
            entry, describe, base, everyone, frozenset(ranks), fetches
        )

    def go_on(self, unsent: list[Buffer] | None, told: list[memoryview] | None, why: str) -> None:
        """Do what is left to do of a run that is expected.

        Args:
            unsent: its message, if it has to go another way than C++'s.
            told: the answer, if it is there.
        """
        if unsent is not None:
            self._send("run", 0, unsent, why)
        elif told is not None:
            self._take((0, told))

    def run(
        self,
        entry: PlanRecord | None,
        inputs: Collection[int],
        params: tuple[Any, ...],
        fetches: tuple[int, ...] = (),
        describe: Describe | None = None,
        why: str = "",
        ranks: Collection[int] = (0,),
    ) -> tuple[int, Iterable[RemoteValue]]:
        """Send a run; returns its number and the values of the plan's outputs.

        Does not wait; see ``hold_back``.

        Args:
            ranks: those that send what is fetched, and whose answers are looked at.
        """
        self.pump()
        if self._broken_since is not None:
            self._renew(self._broken_since)
        outputs = 0
        if entry is not None:
            outputs = entry.outputs
            if not entry.sent:
                self._send_plan(entry, why)
        base = self._new_ids(outputs)
        self._seq += 1
        puts, buffers = self._uploads.take()
        run = Run(self._seq, base=base, puts=puts, fetches=fetches)
        run.timed = self.observer is not None and self.observer.wants_timings
        frees = self._freed.take()
        if entry is None:
            run.frees = (0, tuple(frees)) if frees else None
        else:
            run.inputs = entry.inputs.encode(inputs, base)
            run.frees = entry.frees.encode(frees, base)
            numbers = bits(params) if params else b""
            run.params = None if numbers == entry.numbers else params
            entry.numbers = numbers
            entry.runs += 1
        messages = self._encoded(run, buffers, entry, ranks)
        self.counts.last_run = size_of(messages[0][:1])
        self.counts.largest_run = max(self.counts.largest_run, self.counts.last_run)
        self.expect(self._seq, entry, describe, base, len(fetches), ranks)
        if self.recovery is not None:
            self.recovery.journal.entries.append((self._seq, entry, messages))
        self.tell_all("run", messages, why)
        if self.recovery is not None and self.recovery.is_due(self._uploads.kept_bytes):
            self._snap(self.recovery)
        return self._seq, new_values(base, outputs, self._freed)

    def _snap(self, recovery: Recovery) -> None:
        """Have the workers take a snapshot. What is told after it needs nothing of before."""
        for entry in self.entries:
            entry.begin_anew()
        recovery.snap(self._seq)

    def _renew(self, since: int) -> None:
        """Have the workers form a new process group, once all have answered what they were sent.

        Until then some may still meet in the old one. Ranks whose plans differ are not to meet.
        """
        if self._in_flight or self._failures.mismatched:
            return
        self._broken_since, self._group = None, self._group + 1
        self._failures.mended()
        if self.recovery is not None:
            self.recovery.journal.entries.append(Renewed(since))
        frames = self.link.encode(Renew(self._group, since))
        self.tell_all("renew", [frames] * self.link.world_size, "a rank has left the process group")

    def _encoded(
        self, run: Run, buffers: list[Buffer], entry: PlanRecord | None, ranks: Collection[int]
    ) -> list[list[Buffer]]:
        """The message to each rank; ranks that are told the same get one object."""
        fetches = run.fetches
        encoded: dict[Any, list[Buffer]] = {}
        messages = []
        names: Sequence[bytes | None] = (None,) if entry is None else entry.names
        for rank in range(self.link.world_size):
            run.digest = names[rank if len(names) > 1 else 0]
            run.fetches = fetches if rank in ranks else ()
            run.releases = self._fetches.releases(rank)
            told = run.digest, run.fetches, run.releases
            if told not in encoded:
                encoded[told] = self.link.encode(run, buffers)
            messages.append(encoded[told])
        return messages

    def hold_back(self) -> None:
        """Wait while more than ``max_ahead`` runs are unanswered.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while len(self._in_flight) > self._max_ahead:
            self._take_next()

    def wait(self, seq: int, as_number: bool = False) -> Any:
        """The answers to run ``seq`` of all ranks that were asked for something, by rank.

        Args:
            as_number: if the answer is nothing but a number, that will do.

        Raises:
            WorkerDied, WorkerFrozen: instead of an answer.
        """
        run = self._early.pop(seq, None) or self._in_flight[seq]
        try:
            if as_number and self.numbers is not None and self.observer is None:
                number = self._awaited_number(seq, run)
                if number is not None:
                    return number
            while len(run.answers) < len(run.asked):
                self._take_next()
        except BaseException:
            # Ctrl-C: the answer will come, and nobody will look at it
            run.abandoned = True
            for rank, (done, _) in run.answers.items():
                self._fetches.drop(rank, done)
            raise
        self._early.pop(seq, None)
        return run.answers

    def _awaited_number(self, seq: int, run: _InFlightRun) -> Any:
        """The number that run ``seq`` is answered with; None when there was more to its answer."""
        while not run.answers:
            message = self._receive(None)
            if message is None:
                continue
            frames = message[1]
            number = self.numbers.number(frames, seq)
            if number is not None:
                del self._in_flight[seq]
                counts, size = self.counts, len(frames[1])
                counts.messages_received += 1
                counts.bytes_received += len(frames[0]) + size
                counts.fetches += 1
                counts.bytes_fetched += size
                return number
            self._take(message)
        return None

    def synchronize(self) -> None:
        """Wait until every rank has answered every run.

        Raises:
            WorkerDied: a worker is gone, whether or not this was raised before.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        while self._in_flight:
            self._take_next()

    def wait_swapped(self) -> None:
        """Wait until every rank has answered every swap.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while self.entries.swapping:
            self._take_next()

    def pump(self) -> None:
        """Take the answers that are there already."""
        cutting = self.recovery is not None and self.recovery.journal.cutting
        while self._in_flight or self.entries.swapping or cutting:  # a look costs a system call
            message = self._receive(0)
            if message is None:
                return
            self._take(message)

    def wait_beside(self, descriptor: int, seconds: float) -> None:
        """Wait until a descriptor can be read, and take what workers send meanwhile.

        Waits at most so many seconds, and ends early when something comes.

        Raises:
            WorkerDied: a worker is gone, whether or not this was raised before.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        message = self._receive(seconds, descriptor)
        if message is not None:
            self._take(message)

    def _receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        if self._nonsense is not None:
            raise self._nonsense
        try:
            if self.recovery is not None:
                self.recovery.go_on()
            return self.link.receive(timeout, beside)
        except (WorkerDied, WorkerFrozen) as error:
            self._lost(error)
            return None

    def _lost(self, error: WorkerDied | WorkerFrozen) -> None:
        """A worker is gone: go on as if it had not, if that is possible.

        Raises:
            WorkerDied, WorkerFrozen: it is not.
        """
        if self.recovery is not None and self.recovery.active:
            raise error  # to the recovery, which begins anew
        try:
            if self.recovery is None or self._death is not None:
                raise error
            self.recovery.recover(error)
        except WorkerDied as death:
            self._death = death
            raise

    # -- plans ---------------------------------------------------------------------------

    def swap(self, entry: PlanRecord, groups: Sequence[Sequence[tuple[int, str]]]) -> None:
        """Have every worker run compiled code from its next run of a plan on.

        Args:
            groups: (fused node, artifact) pairs for each of ``entry.plans``.
        """
        if not entry.sent:
            self._send_plan(entry, "swap")
        entry.swap = tuple(groups)
        if self.recovery is not None:
            self.recovery.journal.entries.append(SwappedIn(entry))
        self.tell_all("swap", self.entries.swap_messages(entry), "compiled")

    def _send_plan(self, entry: PlanRecord, why: str) -> None:
        messages = self.entries.plan_messages(entry)
        self.tell_all("plan", messages, why)
        self._shipped(entry, messages[0], len(messages))
        entry.sent = True

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

    def tell_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None:
        """Send each rank its message, unless a recovery meanwhile has told all of them."""
        epoch = self._epoch
        for rank, frames in enumerate(messages):
            self._send(kind, rank, frames, why)
            if self._epoch != epoch:
                return

    @property
    def _epoch(self) -> int:
        return 0 if self.recovery is None else self.recovery.epoch

    def _send(self, kind: str, rank: int, frames: Sequence[Buffer], why: str) -> None:
        size, epoch = size_of(frames), self._epoch
        try:
            if self.recovery is not None:
                self.recovery.go_on()
                if self._epoch != epoch:
                    return  # it is told by now
            self.link.send(rank, frames)
        except WorkerDied as error:
            self._lost(error)
            return
        self.counts.messages_sent += 1
        self.counts.bytes_sent += size
        if self.observer is not None:
            self.observer.message("send", kind, rank, self._seq, size, why)

    def write(self, rank: int, number: int, request: tuple[Any, ...]) -> None:
        """Have a worker copy blocks for a transfer; ``written`` takes its answer.

        Raises:
            WorkerDied, WorkerFrozen: a worker had to be replaced.
        """
        self._writing = self._epoch
        self._send("write", rank, self.link.encode(Write(number, request)), "transfer_weights()")
        self._check_writing()

    def written(self, seconds: float) -> list[tuple[Any, ...]]:
        """(rank, number, checksums, error, handles) of what was asked for and is done.

        Waits at most ``seconds`` for something to come.

        Raises:
            WorkerDied, WorkerFrozen: a worker is gone, even if it was replaced meanwhile.
        """
        message = None if self._written else self._receive(seconds)
        while message is not None:
            self._take(message)
            message = self._receive(0)
        self._check_writing()
        written, self._written = self._written, []
        return written

    def _check_writing(self) -> None:
        """Raise what a worker was replaced for while it was asked to write."""
        if self.recovery is not None and self._writing != self._epoch:
            self._writing = self._epoch
            self._written.clear()
            raise self.recovery.last

    # -- answers -------------------------------------------------------------------------

    def _take_next(self) -> None:
        """Wait for one answer and take it, or for a recovery, which may have taken some."""
        observer, message, epoch = self.observer, None, self._epoch
        try:
            while message is None:
                message = self._receive(None if observer is None else observer.patience)
                if self._epoch != epoch:
                    break
                if message is None and observer is not None:
                    observer.waiting(
                        f"{len(self._in_flight)} runs of {self.link.world_size} worker(s)"
                    )
        finally:
            if observer is not None:
                observer.came()
        if message is not None:
            self._take(message)

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

    def _keep_early(self, seq: int, run: _InFlightRun) -> None:
        """In a recovery answers come before anybody waits for them."""
        if self.recovery is not None and self.recovery.under_way and not run.abandoned:
            old = [key for key in self._early if key < seq - 2 * self._max_ahead]
            for key in old:  # nobody has waited for it, nor will
                del self._early[key]
            self._early[seq] = run

    # -- errors --------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the first failure that has not been raised yet.

        Raises:
            ExecutionError: naming the op and the user's line.
        """
        if self._failures.unraised:
            self._raise(self._failures.unraised[0])

    def _raise(self, error: ExecutionError) -> NoReturn:
        """Raise a failure, or the one on another rank that is its cause, and neither again."""
        if self.link.world_size > 1:
            # The rank that is the cause may not have answered yet. And when all have, they can
            # form a new group: what the user does next does not come too late for that.
            self.synchronize()
        raise self._failures.take(error).with_traceback(None)  # it may have been raised before

    def drop_failure(self, rank: int, failure: Failure) -> None:
        """Do not raise this failure again: the caller reports it in another way."""
        self._failures.drop(self._failures.error(rank, failure))

    def raise_for(self, rank: int, failure: Failure) -> NoReturn:
        """Raise what a value failed with on a rank.

        Raises:
            ExecutionError: naming the op and the user's line.
        """
        self._raise(self._failures.error(rank, failure))

    # -- fetches -------------------------------------------------------------------------

    def fetched(
        self,
        answers: Mapping[int, Answer],
        meta: TensorMeta,
        regions: Regions | None,
        as_number: bool = False,
    ) -> Any:
        """A fetched value as a CPU tensor of its own.

        Args:
            answers: of rank 0, or of each rank in ``regions``.
            regions: what of the value each rank has sent; None: rank 0 has sent all of it.
            as_number: a Python number will do, where it is a single one.

        Raises:
            ExecutionError: the value could not be computed.
        """
        self.counts.fetches += 1
        for rank, block in wanted(answers, regions):
            if isinstance(block, Failure):
                for sender, (done, _) in answers.items():
                    self._fetches.drop(sender, done)
                self.raise_for(rank, block)
            self.counts.bytes_fetched += block.meta.nbytes
        number = self._fetches.number(answers[0]) if as_number and regions is None else None
        return self._fetches.value(answers, meta, regions) if number is None else number


def _number(told: Part) -> int:
    """Of the run, or of what else a worker speaks of."""
    match told:
        case Done() | Need():
            return told.seq
        case Wrote() | Left():
            return told.number
    return 0
