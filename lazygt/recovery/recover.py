"""Recovery: when a worker dies, all ranks roll back to the last snapshot and replay.

Journaled runs are sent again unchanged, except for values that were fetched already: they are not
fetched again, and repeated answers are ignored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lazygt.errors import DeviceLost, WorkerDied, WorkerFrozen
from lazygt.recovery.journal import (
    Cut,
    Entry,
    Journal,
    Ran,
    Renewed,
    Snapshot,
    SwappedIn,
)
from lazygt.runtime.launch.link import Link
from lazygt.runtime.messages import (
    COLLECTIVE_ERROR,
    TO_CLIENT,
    TO_WORKER,
    Done,
    Failure,
    Lost,
    Renew,
    Restore,
    Restored,
    Run,
    Snap,
    Snapped,
)
from lazygt.runtime.plan_records import swap_message
from lazygt.runtime.wire import Buffer, Part, decode

# -- doubts: a collective that failed on one rank, perhaps because another is dying ----------------
# A dying rank's sockets are closed before its end is reported. So messages after such an answer
# wait until every rank has answered the same run: then no rank had died in it.


class Told(NamedTuple):
    """A message of a rank."""

    rank: int
    message: Part
    buffers: list[Any]


class Doubts:
    """Queue of the messages that are held back; pure.

    Args:
        waiting_for: returns the ranks that have not answered a run.
    """

    def __init__(self, waiting_for: Callable[[int], Set[int]]) -> None:
        self._waiting_for = waiting_for
        self._seq = 0
        #: ranks that have not answered that run
        self._missing: set[int] = set()
        self._held: list[Told] = []

    def sort_out(self, told: Told) -> Iterator[Told]:
        """Yield the messages that can be relied on by now, in the order of their arrival."""
        answer = told.message if isinstance(told.message, Done) else None
        if self._missing:
            self._held.append(told)
            if answer is not None and answer.seq >= self._seq:
                self._missing.discard(told.rank)
            if not self._missing:
                first, *rest = self.take()
                yield first
                for later in rest:
                    yield from self.sort_out(later)
        elif answer is not None and (others := self._others(told.rank, answer)):
            self._seq, self._missing = answer.seq, others
            self._held.append(told)
        else:
            yield told

    def _others(self, rank: int, answer: Done) -> set[int]:
        """Return the ranks that must have answered, too, before this answer is believed."""
        failures = [*answer.failures, *(f for f in answer.fetched if isinstance(f, Failure))]
        if not any(failure.kind == COLLECTIVE_ERROR for failure in failures):
            return set()
        return set(self._waiting_for(answer.seq) - {rank})

    def believe(self) -> None:
        """Doubt nothing from here on: workers are not replaced any more."""
        self._waiting_for = lambda seq: set()

    def take(self) -> list[Told]:
        """Take all messages that are held back; nothing is in doubt any more."""
        held, self._held = self._held, []
        self._missing.clear()
        return held


# -- recovery: when a worker dies, all ranks roll back to the last snapshot and replay -------------

_log = logging.getLogger("lazygt")

#: Deaths at one run after which it is not tried again; and those for lack of memory, on any rank.
_POISON, _OOM_POISON = 3, 2
#: The same with no run in flight: the snapshot's values, or earlier runs, may be the cause.
_HOPELESS = 10
#: Seconds between two snapshots at least: workers decode runs anew after one, and repeating a
#: second's runs takes a second at most.
_LEAST_SECONDS = 1.0
#: Entries of the journal between two checks of its size.
_WEIGHED_EVERY = 16


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """One recovery.

    Attributes:
        at: its start, in seconds since the epoch.
        ranks: the workers that were replaced.
        why: the end of the first of them.
        runs: number of runs that were repeated.
        seconds: until the session could go on.
        replay_seconds: of these, for repeating those runs.
    """

    at: float
    ranks: tuple[int, ...]
    why: str
    runs: int
    seconds: float
    replay_seconds: float

    def __str__(self) -> str:
        return f"{self.why}; back after {self.seconds:.1f} s, {self.runs} runs again"


class RunsInFlight(Protocol):
    """Protocol of the client, as a recovery uses it.

    Attributes:
        quiet_until: time of the next snapshot; 0: one is being taken, or a recovery done.
    """

    quiet_until: float

    @property
    def group(self) -> int:
        """Number of the workers' process group."""

    def new_group(self) -> int:
        """Return the number of the process group that the workers form next."""

    def send_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None:
        """Send each rank its message."""

    def take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on a worker's message."""

    @property
    def failed(self) -> bool:
        """True if an op has failed and the user has not been told."""

    def waiting_for(self, seq: int) -> Set[int]:
        """Return the ranks that have not answered a run."""

    def under_way(self, rank: int) -> int | None:
        """Return the oldest run that a rank has not answered."""

    def will_fail(self, rank: int, failure: Failure) -> None:
        """Note that an op can't be repeated: its run fails on all ranks."""

    def device_lost(self, rank: int, told: Lost) -> DeviceLost:
        """Return the error for a worker with a device that can't be used any more."""

    def step_of(self, seq: int, rank: int, step: int | None) -> str:
        """Describe a step of a run: its op, the bytes it makes and the user's line.

        Args:
            step: None: it is not known.
        """

    def drop_answer(self, rank: int, done: Done) -> None:
        """Drop an answer that will be given again."""

    def forget_fetches(self, rank: int) -> None:
        """Forget the values that a rank had left in its arena: it is gone."""

    def restored(self) -> None:
        """Note that all ranks have the snapshot's state, before the journal is replayed."""

    def recovered(self, record: RecoveryRecord) -> None:
        """Note that workers were replaced, and that everything is as before."""

    def settled(self) -> None:
        """Note that all journaled runs have been repeated."""


class Recovery:
    """Keeper of the state that a recovery needs, and executor of recoveries.

    Args:
        client: the sender of runs and receiver of answers.
        cost: the share of the time that snapshots may take.
        journal_bytes: bytes of journaled messages from which a snapshot is taken.
    """

    def __init__(self, client: RunsInFlight, link: Link, cost: float, journal_bytes: int) -> None:
        self.journal = Journal(link.world_size)
        self.doubts = Doubts(self._waiting_for)
        self._client, self._link = client, link
        self._cost, self._journal_bytes = cost, journal_bytes
        #: bytes of the journal at the last check
        self._journaled = 0
        self._epoch = 0
        #: cause of the last recovery
        self.last: WorkerDied | WorkerFrozen
        #: True while a recovery is being done
        self.active = False
        #: True if a recovery has not ended, and its cause; None: to undo runs
        self._unfinished = False
        self._cause: WorkerDied | WorkerFrozen | None = None
        #: the last run that each rank has answered since it was restored
        self._answered: dict[int, int] = {}
        #: runs that are being repeated
        self._again: Counter[int] = Counter()
        #: deaths, by run and rank
        self._deaths: Counter[tuple[int, int]] = Counter()
        #: deaths for lack of memory, by run
        self._oom_deaths: Counter[int] = Counter()
        #: deaths in this recovery while ranks were restored
        self._deaths_between = 0
        #: True if each repeated op is waited for, to find the one that has ended a device
        self._seeks = False
        #: runs with such an op -> the failure that all ranks answer instead
        self._failed: dict[int, Failure] = {}
        #: True while ranks are being restored, and do no run yet
        self._restoring = False
        #: time of the next snapshot
        self._due = client.quiet_until = time.monotonic() + _LEAST_SECONDS
        self._begun = 0.0
        #: True if snapshots preferably wait for the program's marks of a step's end
        self.waits_for_marks = False
        #: reader of the committed snapshot, which stays until then
        self.reader: Future[Any] | None = None
        #: called with the snapshot that is being taken, once it is committed
        self._then: Callable[[Snapshot], object] | None = None

    # -- snapshots -----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of recoveries so far."""
        return self._epoch

    @property
    def under_way(self) -> bool:
        """True if a recovery has begun and not ended."""
        return self._unfinished

    def is_due(self, kept_bytes: int) -> bool:
        """Return whether a snapshot is due.

        Args:
            kept_bytes: of uploads that are kept for the journal.
        """
        if self.journal.cutting:
            return False
        if len(self.journal.entries) % _WEIGHED_EVERY == 0:
            self._journaled = self.journal.nbytes
        full = self._journaled + kept_bytes > self._journal_bytes
        if self.reader is not None and not self.reader.done():
            if not full:
                return False
            wait([self.reader])
        return full or time.monotonic() >= self._due

    def snap(self, seq: int, then: Callable[[Snapshot], object] | None = None) -> None:
        """Have all ranks take a snapshot after this run; call ``then`` with it."""
        self._begun, self._then = time.monotonic(), then
        self._client.quiet_until = 0.0
        committed = self.journal.committed.number
        message = self._link.encode(Snap(self.journal.cut(seq), committed))
        self._client.send_all("snapshot", [message] * self._link.world_size, "recovery")

    def took(self, rank: int, part: Snapped) -> int | None:
        """Take a rank's part of a snapshot; return the run that it covers if all have taken it."""
        full = self.journal.nbytes > self._journal_bytes
        if self._client.failed and self._then is None and not full:
            self.journal.give_up_cut()  # there would be no way back to before that
            self._due = self._client.quiet_until = time.monotonic() + _LEAST_SECONDS
        if not self.journal.took(rank, part):
            return None
        parts = self.journal.committed.parts.values()
        self._journaled = 0
        covered = self.journal.committed.seq
        self._failed = {seq: failure for seq, failure in self._failed.items() if seq > covered}
        slowest = max(part.nanoseconds for part in parts) / 1e9
        if self._link.mirrors:  # copies have come over the network, which others use, too
            slowest = max(slowest, time.monotonic() - self._begun)
        pause = max(slowest / self._cost, _LEAST_SECONDS)
        self._due = self._begun + (2 * pause if self.waits_for_marks else pause)
        self._client.quiet_until = 0.0 if self.under_way else self._due
        then, self._then = self._then, None
        if then is not None:
            then(self.journal.committed)
        return self.journal.committed.seq

    def is_again(self, seq: int) -> bool:
        """Return whether a run's answers may repeat earlier ones."""
        return seq in self._again

    def answered(self, rank: int, seq: int) -> None:
        """Note that a rank has answered a run."""
        self._answered[rank] = seq

    def _waiting_for(self, seq: int) -> set[int]:
        """Return the ranks that have not answered a run, or not answered its repetition."""
        ranks = range(self._link.world_size)
        return {rank for rank in ranks if self._answered.get(rank, 0) < seq}

    # -- a worker has died ---------------------------------------------------------------

    def go_on(self) -> None:
        """Finish a recovery that was interrupted.

        Raises:
            WorkerDied, WorkerFrozen: as ``recover``.
        """
        if self._unfinished and not self.active:
            self._recover(self._cause)

    def recover(self, error: WorkerDied | WorkerFrozen) -> None:
        """Replace dead workers, and bring all ranks back to their current state.

        Raises:
            WorkerDied, WorkerFrozen: a run kills its worker again and again, or no process can be
                started.
        """
        self._judge(error)
        self._recover(error)

    def reaches(self, seq: int) -> bool:
        """Return whether a run can be undone: no snapshot was taken since."""
        return self.journal.committed.seq < seq

    def rewind(self, seq: int, failed: Sequence[tuple[int, Failure]]) -> None:
        """Roll all ranks back to before a run, but keep the values uploaded since.

        Args:
            failed: values that were made since.

        Raises:
            WorkerDied, WorkerFrozen: a worker dies again and again, or can't be replaced.
        """
        since = map(self._uploads_alone, self.journal.since(seq))
        self.journal.rewind(seq, [run for run in since if run is not None], failed)
        self._recover(None)

    def _uploads_alone(self, run: Ran) -> Ran | None:
        """Return a run that only takes this one's uploads; None: it has none."""
        frames = run[2][0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        if not message.puts:
            return None
        alone = self._link.encode(Run(message.seq, puts=message.puts), frames[1:])
        return run[0], None, [alone] * self._link.world_size

    def _recover(self, error: WorkerDied | WorkerFrozen | None) -> None:
        """Replace the dead workers, if there are any, and have all ranks replay the journal."""
        begin, at, replaced = time.monotonic(), time.time(), set[int]()
        runs, replay_seconds = 0, 0.0
        self._unfinished, self._cause = True, error
        self._client.quiet_until = 0.0
        self._deaths_between, self._restoring = 0, False
        self.active = True
        try:
            while self._unfinished:
                replaced |= self._replace()
                try:
                    self._restoring = True
                    self._restore()
                    self._client.restored()
                    self._restoring = False
                    replay_begin = time.monotonic()
                    runs = self._replay()
                    replay_seconds = time.monotonic() - replay_begin
                    self._unfinished = False
                except (WorkerDied, WorkerFrozen) as another:
                    self._judge(another)
                    self._cause = another
            self._seeks = False
        finally:
            self.active = False
            for raised in filter(None, (error, self._cause)):
                raised.__traceback__ = None  # its frames would keep the user's tensors
        self._refill()
        self._client.quiet_until = 0.0 if self.journal.cutting else self._due
        if self._cause is not None:
            seconds, why = time.monotonic() - begin, str(error or self._cause).split(". ")[0]
            self.last = self._cause
            ranks = tuple(sorted(replaced))
            self._client.recovered(RecoveryRecord(at, ranks, why, runs, seconds, replay_seconds))
        self._client.settled()

    def _judge(self, error: WorkerDied | WorkerFrozen) -> None:
        """Give up on a run that has killed its worker too often."""
        if isinstance(error, DeviceLost):
            self._blame(error)
            return
        seq = None if self._restoring else self._client.under_way(error.rank)
        if seq is None:
            self._judge_between(error)
            return
        self._deaths[seq, error.rank] += 1
        self._oom_deaths[seq] += isinstance(error, WorkerDied) and error.out_of_memory
        if self._tries_left(seq, error.rank) > 0:
            return
        self._unfinished = False
        if not isinstance(error, WorkerDied):
            raise error
        ran, step = self._link.last_step(error.rank)
        what = self._client.step_of(seq, error.rank, step if ran == seq else None)
        deaths = max(self._deaths[seq, error.rank], self._oom_deaths[seq])
        during = f"{deaths} processes died in this run, the last of them at {what}."
        raise WorkerDied(error.rank, error.pid, error.status, error.stderr, during)

    def _blame(self, error: DeviceLost) -> None:
        """Start a search for the op that ended a worker's device; if known, it is not repeated."""
        self._seeks = True
        if (culprit := error.culprit) is not None:
            self._failed[culprit.seq] = culprit
            self._client.will_fail(error.rank, culprit)
        if self.active:
            self._judge_between(error)

    def _tries_left(self, seq: int, rank: int) -> int:
        """Return the number of times that a run may still be tried, if the same goes on."""
        tries = _POISON - self._deaths[seq, rank]
        oom_deaths = self._oom_deaths[seq]
        return min(tries, _OOM_POISON - oom_deaths) if oom_deaths else tries

    def _judge_between(self, error: WorkerDied | WorkerFrozen) -> None:
        """Give up if processes keep dying while they are restored."""
        self._deaths_between += 1
        if self._deaths_between < _HOPELESS:
            return
        self._unfinished = False
        if type(error) is not WorkerDied:
            raise error
        during = f"{_HOPELESS} processes died while values were restored, and runs done again."
        raise WorkerDied(error.rank, error.pid, error.status, error.stderr, during)

    def _refill(self) -> None:
        """Start spare processes again. Without one the next recovery only takes longer."""
        try:
            self._link.refill()
        except OSError as error:
            _log.warning("no spare process could be started: %s", error)

    def _replace(self) -> set[int]:
        """Replace the processes that have ended, if any; return their ranks."""
        ended = self._link.lost
        lost = set(ended)
        if self._cause is None and ended:
            self._cause = next(iter(ended.values()))
        if self._cause is not None:
            lost.add(self._cause.rank)
            self.last = self._cause
        self._epoch += 1
        number = self._client.new_group()
        try:
            for rank in lost:
                self._link.replace(rank, number)
                self._client.forget_fetches(rank)
        except OSError as failure:
            self._unfinished = False
            assert self._cause is not None
            raise self._cause from failure
        return lost

    def _restore(self) -> None:
        """Restore every rank to the last snapshot."""
        self.journal.restart()
        for rank, told, _ in self.doubts.take():
            if isinstance(told, Done):
                self._client.drop_answer(rank, told)
        committed, ranks = self.journal.committed, range(self._link.world_size)
        for rank in ranks:
            restore = Restore(self._epoch, self._client.group, committed.number)
            restore.failed = tuple(self.journal.failed)
            if (part := committed.parts.get(rank)) is not None:
                restore.values, restore.failed = part.values, (*part.failed, *restore.failed)
                restore.next_dynamic, restore.generator = part.next_dynamic, part.generator
            self._link.send(rank, self._link.encode(restore))
        waiting = set(ranks)
        while waiting:
            message = self._link.receive(None)
            if message is None:
                continue
            rank, frames = message
            told = decode(frames, TO_CLIENT)
            if isinstance(told, Restored) and told.epoch == self._epoch:
                waiting.discard(rank)
            elif isinstance(told, Done):
                self._client.drop_answer(rank, told)
            elif isinstance(told, Lost):
                raise self._client.device_lost(rank, told)
        self._answered = dict.fromkeys(ranks, committed.seq)

    def _replay(self) -> int:
        """Replay the journal; return its number of runs.

        Waits until all runs are answered that were answered before.
        """
        entries = list(self.journal.entries)
        runs = [entry[0] for entry in entries if isinstance(entry, tuple)]
        self._again = Counter(runs)
        sent = self.journal.committed.seq
        for entry in entries:
            if isinstance(entry, Renewed):
                self._wait_for(sent)
            for rank, frames in enumerate(self._messages(entry)):
                self._link.send(rank, frames)
            sent = entry[0] if isinstance(entry, tuple) else sent
            self._take(0)
        self._wait_for(sent)
        self._again.clear()
        return len(runs)

    def _messages(self, entry: Entry) -> list[list[Buffer]]:
        ranks = range(self._link.world_size)
        match entry:
            case tuple():
                return [self._once_more(entry, rank) for rank in ranks]
            case SwappedIn():
                return [swap_message(entry.entry, rank) for rank in ranks]
            case Renewed():
                number = self._client.new_group()
                return [self._link.encode(Renew(number, entry.since)) for _ in ranks]
            case Cut():
                message = self._link.encode(Snap(entry.number, self.journal.committed.number))
                return [message for _ in ranks]

    def _once_more(self, run: Ran, rank: int) -> list[Buffer]:
        """Return a run's message for its repetition, without fetches that were answered before."""
        seq, _, messages = run
        frames = messages[rank if len(messages) > 1 else 0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        message.releases = ()
        # to find the step that kills
        message.timed = self._seeks or self._tries_left(seq, rank) == 1
        message.failed = self._failed.get(seq)
        if rank not in self._client.waiting_for(seq):
            message.fetches = ()
        return self._link.encode(message, frames[1:])

    def _wait_for(self, seq: int) -> None:
        """Wait until all ranks have answered a run."""
        while min(self._answered.values()) < seq:
            self._take(None)

    def _take(self, timeout: float | None) -> None:
        message = self._link.receive(timeout)
        while message is not None:
            self._client.take(message)
            message = self._link.receive(0)
