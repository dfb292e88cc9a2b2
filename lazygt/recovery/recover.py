"""Rollback recovery: after a death, all ranks restore the last snapshot and replay the journal.

Journaled runs are sent again unchanged, except that values that were fetched already are not
fetched again. Repeated answers are ignored.
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
from lazygt.recovery.journal import (
    Entry,
    GroupEntry,
    Journal,
    RunEntry,
    Snapshot,
    SnapshotEntry,
    SwapEntry,
)
from lazygt.recovery.suspected import SuspectedFailures
from lazygt.runtime.link import Link
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
from lazygt.runtime.wire import Buffer, decode

_log = logging.getLogger("lazygt")

#: Deaths in one run on one rank after which it is not tried again, and deaths by lack of memory in
#: one run on all ranks.
_MAX_DEATHS, _MAX_OOM_DEATHS = 3, 2
#: Deaths while ranks are restored, or no run is in flight, after which recovery gives up.
_MAX_RESTORE_DEATHS = 10
#: Minimum seconds between two snapshots: workers decode runs anew after a snapshot, and the replay
#: of a second's runs takes a second at most.
_LEAST_SECONDS = 1.0
#: Entries of the journal between two checks of its size.
_SIZE_CHECK_ENTRIES = 16


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """One recovery."""

    at: float  # start of the recovery, in seconds since the epoch
    ranks: tuple[int, ...]  # workers that were replaced
    why: str  # description of the first death
    runs: int  # number of replayed runs
    seconds: float  # duration until the session could go on
    replay_seconds: float  # part of it for the replay

    def __str__(self) -> str:
        return f"{self.why}; back after {self.seconds:.1f} s, {self.runs} runs again"


class RecoveryClient(Protocol):
    """Part of the client that a recovery needs; see `Reports` and `Answers` of the client."""

    #: time of the next snapshot, until which the C++ extension may send runs on its own; 0: a
    #: snapshot or a recovery is under way
    quiet_until: float

    @property
    def group(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def new_group(self) -> int: ...
    def send_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None: ...
    def handle(self, message: tuple[int, list[memoryview]]) -> None: ...
    def waiting_for(self, seq: int) -> Set[int]: ...
    def oldest_unanswered(self, rank: int) -> int | None: ...
    def will_fail(self, rank: int, failure: Failure) -> None: ...
    def device_lost(self, rank: int, message: Lost) -> DeviceLost: ...
    def step_of(self, seq: int, rank: int, step: int | None) -> str: ...
    def drop_answer(self, rank: int, done: Done) -> None: ...
    def forget_fetches(self, rank: int) -> None: ...
    def restored(self) -> None: ...
    def recovered(self, record: RecoveryRecord) -> None: ...
    def settled(self) -> None: ...


class RollbackRecovery:
    """Scheduler of snapshots, and executor of recoveries by rollback and replay.

    Args:
        client: the sender of runs and receiver of answers.
        link: the connection to the workers, which also replaces them.
        cost: the share of the time that snapshots may take.
        journal_bytes: bytes of journaled messages from which on a snapshot is taken.
    """

    def __init__(self, client: RecoveryClient, link: Link, cost: float, journal_bytes: int) -> None:
        self.journal = Journal(link.world_size)
        self.suspected = SuspectedFailures(self._waiting_for)
        self._client, self._link = client, link
        self._cost, self._journal_bytes = cost, journal_bytes
        #: bytes of the journal at the last check
        self._journaled = 0
        self._epoch = 0
        #: cause of the last recovery
        self.last: WorkerDied | WorkerFrozen
        #: True while a recovery is executed
        self.active = False
        #: True if a recovery has not ended, and its cause; None: a rollback without a death
        self._unfinished = False
        self._cause: WorkerDied | WorkerFrozen | None = None
        #: the last run that each rank has answered since it was restored
        self._answered: dict[int, int] = {}
        #: runs that are being replayed
        self._replayed: Counter[int] = Counter()
        #: deaths, by run and rank
        self._deaths: Counter[tuple[int, int]] = Counter()
        #: deaths by lack of memory, by run
        self._oom_deaths: Counter[int] = Counter()
        #: deaths in this recovery while ranks were restored
        self._restore_deaths = 0
        #: True if replayed ops run one by one, to find the op that has made a device unusable
        self._finds_culprit = False
        #: run with such an op -> the failure that all ranks answer instead
        self._failed_runs: dict[int, Failure] = {}
        #: True while ranks are being restored, and do no run yet
        self._restoring = False
        #: time of the next snapshot
        self._due = client.quiet_until = time.monotonic() + _LEAST_SECONDS
        self._snapshot_begin = 0.0
        #: True if snapshots wait for the program's marks of steps, within limits
        self.waits_for_marks = False
        #: write of a checkpoint from the committed snapshot; the snapshot must stay until its end
        self.checkpoint_write: Future[Any] | None = None
        #: callback for the snapshot that is being taken, once it is committed
        self._on_commit: Callable[[Snapshot], object] | None = None

    # -- snapshots -----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of recoveries so far."""
        return self._epoch

    @property
    def under_way(self) -> bool:
        """True if a recovery has begun and not ended."""
        return self._unfinished

    def snapshot_is_due(self, retained_bytes: int) -> bool:
        """Return whether to request a snapshot now: the journal is full, or the time has come.

        While a checkpoint is written from the last snapshot, only a full journal counts.

        Args:
            retained_bytes: bytes of uploads that are retained for the journal.
        """
        if self.journal.snapshot_under_way:
            return False
        if len(self.journal.entries) % _SIZE_CHECK_ENTRIES == 0:
            self._journaled = self.journal.nbytes
        if self._journaled + retained_bytes > self._journal_bytes:
            return True
        return not self._is_checkpoint_being_written and time.monotonic() >= self._due

    @property
    def _is_checkpoint_being_written(self) -> bool:
        """True while a checkpoint is being written from the last snapshot."""
        return self.checkpoint_write is not None and not self.checkpoint_write.done()

    def request_snapshot(
        self, seq: int, on_commit: Callable[[Snapshot], object] | None = None
    ) -> None:
        """Request a snapshot after this run from all ranks.

        Waits for the write of a checkpoint from the last snapshot, which this one replaces.

        Args:
            on_commit: called with the snapshot when all ranks have taken it.
        """
        if self._is_checkpoint_being_written:
            assert self.checkpoint_write is not None
            wait([self.checkpoint_write])
        self._snapshot_begin, self._on_commit = time.monotonic(), on_commit
        self._client.quiet_until = 0.0
        committed = self.journal.committed.number
        message = self._link.encode(Snap(self.journal.begin_snapshot(seq), committed))
        self._client.send_all("snapshot", [message] * self._link.world_size, "recovery")

    def add_part(self, rank: int, rank_snapshot: Snapped) -> int | None:
        """Record a rank's part of a snapshot; once it is complete, return the last run it covers.

        Completion commits the snapshot, and sets the time of the next one.
        """
        is_full = self.journal.nbytes > self._journal_bytes
        if self._client.failed and self._on_commit is None and not is_full:
            self.journal.abandon_snapshot()  # a rollback to before the failure would be impossible
            self._due = self._client.quiet_until = time.monotonic() + _LEAST_SECONDS
        if not self.journal.add_part(rank, rank_snapshot):
            return None
        rank_snapshots = self.journal.committed.parts.values()
        self._journaled = 0
        covered = self.journal.committed.seq
        self._failed_runs = {
            seq: failure for seq, failure in self._failed_runs.items() if seq > covered
        }
        seconds = max(rank_snapshot.nanoseconds for rank_snapshot in rank_snapshots) / 1e9
        if self._link.mirrors:  # copies were sent to other hosts: the network's time counts, too
            seconds = max(seconds, time.monotonic() - self._snapshot_begin)
        pause = max(seconds / self._cost, _LEAST_SECONDS)
        self._due = self._snapshot_begin + (2 * pause if self.waits_for_marks else pause)
        self._client.quiet_until = 0.0 if self.under_way else self._due
        on_commit, self._on_commit = self._on_commit, None
        if on_commit is not None:
            on_commit(self.journal.committed)
        return self.journal.committed.seq

    def is_replayed(self, seq: int) -> bool:
        """Return whether a run is being replayed, so that its answers may repeat earlier ones."""
        return seq in self._replayed

    def record_answer(self, rank: int, seq: int) -> None:
        """Record that a rank has answered a run."""
        self._answered[rank] = seq

    def _waiting_for(self, seq: int) -> set[int]:
        """Return the ranks that have not answered a run, or its replay."""
        ranks = range(self._link.world_size)
        return {rank for rank in ranks if self._answered.get(rank, 0) < seq}

    # -- recovery ------------------------------------------------------------------------

    def finish_interrupted(self) -> None:
        """Finish a recovery that was interrupted, if there is one.

        Raises:
            WorkerDied, WorkerFrozen: as ``recover``.
        """
        if self._unfinished and not self.active:
            self._recover(self._cause)

    def recover(self, error: WorkerDied | WorkerFrozen) -> None:
        """Replace dead workers, and restore the current state on all ranks.

        Raises:
            WorkerDied, WorkerFrozen: a run kills its worker repeatedly, or no process can be
                started.
        """
        self._check_attempts(error)
        self._recover(error)

    def can_undo(self, seq: int) -> bool:
        """Return whether a run can be undone: the last snapshot is of before the run."""
        return self.journal.committed.seq < seq

    def rollback(self, seq: int, failed: Sequence[tuple[int, Failure]]) -> None:
        """Roll all ranks back to before a run, but retain the values uploaded since.

        Args:
            failed: (id, failure) of the values computed since.

        Raises:
            WorkerDied, WorkerFrozen: a worker dies repeatedly, or can't be replaced.
        """
        runs = map(self._uploads_only, self.journal.since(seq))
        self.journal.rollback(seq, [run for run in runs if run is not None], failed)
        self._recover(None)

    def _uploads_only(self, run: RunEntry) -> RunEntry | None:
        """Return a run with this run's uploads and no plan; None if there are no uploads."""
        frames = run[2][0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        if not message.puts:
            return None
        upload = self._link.encode(Run(message.seq, puts=message.puts), frames[1:])
        return run[0], None, [upload] * self._link.world_size

    def _recover(self, error: WorkerDied | WorkerFrozen | None) -> None:
        """Replace dead workers, restore all ranks and replay the journal, until that succeeds.

        Args:
            error: the cause; None: a rollback without a death.
        """
        begin, at, replaced = time.monotonic(), time.time(), set[int]()
        runs, replay_seconds = 0, 0.0
        self._unfinished, self._cause = True, error
        self._client.quiet_until = 0.0
        self._restore_deaths, self._restoring = 0, False
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
                except (WorkerDied, WorkerFrozen) as next_error:
                    self._check_attempts(next_error)
                    self._cause = next_error
            self._finds_culprit = False
        finally:
            self.active = False
            for raised in filter(None, (error, self._cause)):
                raised.__traceback__ = None  # its frames would keep the user's tensors alive
        self._refill()
        self._client.quiet_until = 0.0 if self.journal.snapshot_under_way else self._due
        if self._cause is not None:
            seconds, why = time.monotonic() - begin, str(error or self._cause).split(". ")[0]
            self.last = self._cause
            ranks = tuple(sorted(replaced))
            self._client.recovered(RecoveryRecord(at, ranks, why, runs, seconds, replay_seconds))
        self._client.settled()

    def _check_attempts(self, error: WorkerDied | WorkerFrozen) -> None:
        """Count a death, and raise WorkerDied if its run has killed its worker too often."""
        if isinstance(error, DeviceLost):
            self._find_culprit(error)
            return
        seq = None if self._restoring else self._client.oldest_unanswered(error.rank)
        if seq is None:
            self._check_restore_attempts(error)
            return
        self._deaths[seq, error.rank] += 1
        self._oom_deaths[seq] += isinstance(error, WorkerDied) and error.out_of_memory
        if self._attempts_left(seq, error.rank) > 0:
            return
        self._unfinished = False
        if not isinstance(error, WorkerDied):
            raise error
        run, step = self._link.last_step(error.rank)
        step_text = self._client.step_of(seq, error.rank, step if run == seq else None)
        deaths = max(self._deaths[seq, error.rank], self._oom_deaths[seq])
        during = f"{deaths} processes died in this run, the last of them at {step_text}."
        raise WorkerDied(error.rank, error.pid, error.status, error.stderr, during)

    def _find_culprit(self, error: DeviceLost) -> None:
        """Search for the op that has made a worker's device unusable: replayed ops run one by one.

        Once the op is found, its run fails on all ranks instead of being repeated.
        """
        self._finds_culprit = True
        if (culprit := error.culprit) is not None:
            self._failed_runs[culprit.seq] = culprit
            self._client.will_fail(error.rank, culprit)
        if self.active:
            self._check_restore_attempts(error)

    def _attempts_left(self, seq: int, rank: int) -> int:
        """Return the number of deaths in a run that are still allowed."""
        attempts = _MAX_DEATHS - self._deaths[seq, rank]
        oom_deaths = self._oom_deaths[seq]
        return min(attempts, _MAX_OOM_DEATHS - oom_deaths) if oom_deaths else attempts

    def _check_restore_attempts(self, error: WorkerDied | WorkerFrozen) -> None:
        """Count a death outside of runs, and raise WorkerDied after too many."""
        self._restore_deaths += 1
        if self._restore_deaths < _MAX_RESTORE_DEATHS:
            return
        self._unfinished = False
        if type(error) is not WorkerDied:
            raise error
        during = (
            f"{_MAX_RESTORE_DEATHS} processes died while values were restored, and runs done again."
        )
        raise WorkerDied(error.rank, error.pid, error.status, error.stderr, during)

    def _refill(self) -> None:
        """Start new spare processes; without a spare the next recovery only takes longer."""
        try:
            self._link.refill()
        except OSError as error:
            _log.warning("no spare process could be started: %s", error)

    def _replace(self) -> set[int]:
        """Replace the processes that have ended, if any; return their ranks.

        Raises:
            WorkerDied, WorkerFrozen: no process can be started.
        """
        deaths = self._link.lost
        ranks = set(deaths)
        if self._cause is None and deaths:
            self._cause = next(iter(deaths.values()))
        if self._cause is not None:
            ranks.add(self._cause.rank)
            self.last = self._cause
        self._epoch += 1
        group_number = self._client.new_group()
        try:
            for rank in ranks:
                self._link.replace(rank, group_number)
                self._client.forget_fetches(rank)
        except OSError as failure:
            self._unfinished = False
            assert self._cause is not None
            raise self._cause from failure
        return ranks

    def _restore(self) -> None:
        """Restore every rank to the last snapshot, and wait until all have done it.

        Raises:
            WorkerDied, WorkerFrozen: a worker ends meanwhile.
        """
        self.journal.restart()  # without a half-taken snapshot
        # Answers that were deferred because of a suspected failure: the replay gives them again.
        # The client drops them, since their fetched values lie in its arenas.
        for rank, answer, _ in self.suspected.take():
            if isinstance(answer, Done):
                self._client.drop_answer(rank, answer)
        committed, ranks = self.journal.committed, range(self._link.world_size)
        for rank in ranks:
            restore = Restore(self._epoch, self._client.group, committed.number)
            restore.failed = tuple(self.journal.failed)
            if (rank_snapshot := committed.parts.get(rank)) is not None:
                restore.values, restore.failed = (
                    rank_snapshot.values,
                    (*rank_snapshot.failed, *restore.failed),
                )
                restore.next_dynamic, restore.generator = (
                    rank_snapshot.next_dynamic,
                    rank_snapshot.generator,
                )
            self._link.send(rank, self._link.encode(restore))
        waiting = set(ranks)
        while waiting:
            message = self._link.receive(None)
            if message is None:
                continue
            rank, frames = message
            answer = decode(frames, TO_CLIENT)
            if isinstance(answer, Restored) and answer.epoch == self._epoch:
                waiting.discard(rank)
            elif isinstance(answer, Done):  # of a run before the restore
                self._client.drop_answer(rank, answer)
            elif isinstance(answer, Lost):
                raise self._client.device_lost(rank, answer)
        self._answered = dict.fromkeys(ranks, committed.seq)

    def _replay(self) -> int:
        """Replay the journal, and wait for the answers; return the number of runs."""
        entries = list(self.journal.entries)
        runs = [entry[0] for entry in entries if isinstance(entry, tuple)]
        self._replayed = Counter(runs)
        last_sent = self.journal.committed.seq
        for entry in entries:
            if isinstance(entry, GroupEntry):
                self._wait_for(last_sent)
            for rank, frames in enumerate(self._messages(entry)):
                self._link.send(rank, frames)
            last_sent = entry[0] if isinstance(entry, tuple) else last_sent
            self._receive(0)
        self._wait_for(last_sent)
        self._replayed.clear()
        return len(runs)

    def _messages(self, entry: Entry) -> list[list[Buffer]]:
        """Return the messages that replay a journal entry, one for each rank."""
        ranks = range(self._link.world_size)
        match entry:
            case tuple():
                return [self._replay_message(entry, rank) for rank in ranks]
            case SwapEntry():
                return [swap_message(entry.entry, rank) for rank in ranks]
            case GroupEntry():
                group_number = self._client.new_group()
                return [self._link.encode(Renew(group_number, entry.since)) for _ in ranks]
            case SnapshotEntry():
                message = self._link.encode(Snap(entry.number, self.journal.committed.number))
                return [message for _ in ranks]

    def _replay_message(self, run: RunEntry, rank: int) -> list[Buffer]:
        """Return a run's message for its replay, without fetches that were answered before."""
        seq, _, messages = run
        frames = messages[rank if len(messages) > 1 else 0]
        message = decode(frames, TO_WORKER)
        assert isinstance(message, Run)
        message.releases = ()
        # a timed run notes each step, which identifies the step that kills the process
        message.timed = self._finds_culprit or self._attempts_left(seq, rank) == 1
        message.failed = self._failed_runs.get(seq)
        if rank not in self._client.waiting_for(seq):
            message.fetches = ()
        return self._link.encode(message, frames[1:])

    def _wait_for(self, seq: int) -> None:
        """Wait until all ranks have answered a run."""
        while min(self._answered.values()) < seq:
            self._receive(None)

    def _receive(self, timeout: float | None) -> None:
        """Wait for a message, and pass all arrived messages to the client.

        Args:
            timeout: seconds; None: without a limit.
        """
        message = self._link.receive(timeout)
        while message is not None:
            self._client.handle(message)
            message = self._link.receive(0)
