"""Recovery: when a worker dies, all ranks go back to the last snapshot, and do again what came
after it.

Journaled runs are sent anew as they were, but for what has been answered already: that is not
fetched again, and what comes of it is not looked at.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from lazygt.errors import DeviceLost, WorkerDied, WorkerFrozen
from lazygt.runtime.launch.link import Link
from lazygt.runtime.messages import (
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
from lazygt.runtime.recovery.doubts import Doubts
from lazygt.runtime.recovery.journal import (
    Cut,
    Entry,
    Journal,
    Ran,
    Renewed,
    Snapshot,
    SwappedIn,
)
from lazygt.runtime.wire import Buffer, decode

_log = logging.getLogger("lazygt")

#: Deaths at one run after which it is not tried again; of those for want of memory, on any rank.
_POISON, _OOM_POISON = 3, 2
#: The same where no run is under way: the snapshot's values, or runs of before, may be what kills.
_HOPELESS = 10
#: Seconds between two snapshots at least: workers look again at what comes after one, and doing a
#: second's runs again takes a second at most.
_LEAST_SECONDS = 1.0
#: Entries of the journal between two looks at how long it has become.
_WEIGHED_EVERY = 16


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """One recovery.

    Attributes:
        at: when it began, in seconds since the epoch.
        ranks: the workers that were replaced.
        why: how the first of them ended.
        runs: how many runs were done again.
        seconds: until the session could go on.
        replay_seconds: of these, for doing those runs again.
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
    """What a recovery asks of the client.

    Attributes:
        quiet_until: when the next snapshot is due; 0: one is being taken, or a recovery done.
    """

    quiet_until: float

    @property
    def group(self) -> int:
        """Number of the workers' process group."""

    def new_group(self) -> int:
        """The number of the process group that the workers form next."""

    def tell_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None:
        """Send each rank its message."""

    def take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on what a worker says."""

    @property
    def failed(self) -> bool:
        """Whether an op has failed and nobody is told."""

    def waiting_for(self, seq: int) -> Set[int]:
        """The ranks that have not answered a run."""

    def under_way(self, rank: int) -> int | None:
        """The oldest run that a rank has not answered."""

    def will_fail(self, rank: int, failure: Failure) -> None:
        """An op can't be done again: its run fails on all ranks."""

    def device_lost(self, rank: int, told: Lost) -> DeviceLost:
        """The error for a worker whose device can't be used any more."""

    def step_of(self, seq: int, rank: int, step: int | None) -> str:
        """What a step of a run is, what it asks for, and the user's line; None: it is not known."""

    def drop_answer(self, rank: int, done: Done) -> None:
        """An answer comes that will be given again."""

    def forget_fetches(self, rank: int) -> None:
        """The arena in which a rank had left values is gone."""

    def restored(self) -> None:
        """Is told when all ranks are as the snapshot has them, before the journal is done again."""

    def recovered(self, record: RecoveryRecord) -> None:
        """Workers were replaced, and all is as it was."""

    def settled(self) -> None:
        """All journaled runs are done again."""


class Recovery:
    """Keeps what a recovery needs, and does it.

    Args:
        client: who sends runs and takes answers.
        cost: the share of the time that snapshots may take.
        journal_bytes: of journaled messages; a snapshot is taken when there are more.
    """

    def __init__(self, client: RunsInFlight, link: Link, cost: float, journal_bytes: int) -> None:
        self.journal = Journal(link.world_size)
        self.doubts = Doubts(self._waiting_for)
        self._client, self._link = client, link
        self._cost, self._journal_bytes = cost, journal_bytes
        #: bytes of the journal when it was weighed last
        self._journaled = 0
        self._epoch = 0
        #: what the last recovery was for
        self.last: WorkerDied | WorkerFrozen
        #: whether one is being done at this moment
        self.active = False
        #: whether one has not come to its end, and what it is for; None: to undo runs
        self._unfinished = False
        self._cause: WorkerDied | WorkerFrozen | None = None
        #: the last run that each rank has answered since it was restored
        self._answered: dict[int, int] = {}
        #: runs that are done again
        self._again: Counter[int] = Counter()
        #: by run and rank
        self._deaths: Counter[tuple[int, int]] = Counter()
        #: for want of memory, by run
        self._oom_deaths: Counter[int] = Counter()
        #: in this recovery, of what ranks were to have again
        self._deaths_between = 0
        #: whether each op is waited for when it is done again: which has ended a device?
        self._seeks = False
        #: runs whose ops did, and what all ranks answer instead
        self._failed: dict[int, Failure] = {}
        #: whether ranks are being brought back, and do no run yet
        self._restoring = False
        #: when the next snapshot is due
        self._due = client.quiet_until = time.monotonic() + _LEAST_SECONDS
        self._begun = 0.0
        #: whether snapshots are taken rather where the program has marked a step's end
        self.waits_for_marks = False
        #: who reads the committed snapshot, which stays until then
        self.reader: Future[Any] | None = None
        #: is told of the snapshot that is being taken
        self._then: Callable[[Snapshot], object] | None = None

    # -- what happens --------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """How many recoveries there were."""
        return self._epoch

    @property
    def under_way(self) -> bool:
        """Whether one has begun and not come to its end."""
        return self._unfinished

    def is_due(self, kept_bytes: int) -> bool:
        """Whether it is time for a snapshot.

        Args:
            kept_bytes: of uploads that are kept for what the journal has.
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
        """Have all ranks take a snapshot after this run; ``then`` is told of it."""
        self._begun, self._then = time.monotonic(), then
        self._client.quiet_until = 0.0
        committed = self.journal.committed.number
        message = self._link.encode(Snap(self.journal.cut(seq), committed))
        self._client.tell_all("snapshot", [message] * self._link.world_size, "recovery")

    def took(self, rank: int, part: Snapped) -> int | None:
        """A rank has taken its part of a snapshot; the run that the snapshot covers, if it is
        whole now."""
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
        """Whether a run's answers may be some that were given before."""
        return seq in self._again

    def answered(self, rank: int, seq: int) -> None:
        """A rank has answered a run."""
        self._answered[rank] = seq

    def _waiting_for(self, seq: int) -> set[int]:
        """The ranks that have not answered a run; where it is done again: have not once more."""
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
        """Replace dead workers, and have all ranks where they were.

        Raises:
            WorkerDied, WorkerFrozen: a run kills its worker again and again, or no process can be
                started.
        """
        self._judge(error)
        self._recover(error)

    def reaches(self, seq: int) -> bool:
        """Whether there is a way back to before a run: no snapshot was taken since."""
        return self.journal.committed.seq < seq

    def rewind(self, seq: int, failed: Sequence[tuple[int, Failure]]) -> None:
        """Have all ranks as they were before a run, but for what was uploaded since.

        Args:
            failed: values that were made since.

        Raises:
            WorkerDied, WorkerFrozen: a worker dies again and again, or can't be replaced.
        """
        since = map(self._uploads_alone, self.journal.since(seq))
        self.journal.rewind(seq, [run for run in since if run is not None], failed)
        self._recover(None)

    def _uploads_alone(self, run: Ran) -> Ran | None:
        """A run that does nothing but take what is uploaded with it; None: nothing is."""
        frames = run[2][0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        if not message.puts:
            return None
        alone = self._link.encode(Run(message.seq, puts=message.puts), frames[1:])
        return run[0], None, [alone] * self._link.world_size

    def _recover(self, error: WorkerDied | WorkerFrozen | None) -> None:
        """Replace the dead workers, if there are any, and have all ranks do the journal again."""
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
                raised.__traceback__ = None  # whose frames would keep the user's tensors
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
        """Have the op found that has ended a worker's device; once it is, it is not done again."""
        self._seeks = True
        if (culprit := error.culprit) is not None:
            self._failed[culprit.seq] = culprit
            self._client.will_fail(error.rank, culprit)
        if self.active:
            self._judge_between(error)

    def _tries_left(self, seq: int, rank: int) -> int:
        """How often a run may still be tried, if the same goes on."""
        tries = _POISON - self._deaths[seq, rank]
        oom_deaths = self._oom_deaths[seq]
        return min(tries, _OOM_POISON - oom_deaths) if oom_deaths else tries

    def _judge_between(self, error: WorkerDied | WorkerFrozen) -> None:
        """Give up where processes die of what they are to have again."""
        self._deaths_between += 1
        if self._deaths_between < _HOPELESS:
            return
        self._unfinished = False
        if type(error) is not WorkerDied:
            raise error
        during = f"{_HOPELESS} processes died while values were restored, and runs done again."
        raise WorkerDied(error.rank, error.pid, error.status, error.stderr, during)

    def _refill(self) -> None:
        """Have spare processes again. Without one the next recovery takes longer, no more."""
        try:
            self._link.refill()
        except OSError as error:
            _log.warning("no spare process could be started: %s", error)

    def _replace(self) -> set[int]:
        """Replace the processes that have ended, if any; their ranks."""
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
        """Have every rank where the last snapshot was taken."""
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
        """Send what the journal has, and wait until all is answered that was answered before; how
        many runs there were."""
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
        """A run's message without what was answered before."""
        seq, _, messages = run
        frames = messages[rank if len(messages) > 1 else 0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        message.releases = ()
        # which step is it that kills?
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
