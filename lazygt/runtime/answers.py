"""Messages to the workers and back, counted, and waits for answers.

A worker that dies meanwhile is replaced by a recovery, if the session has one; callers do not
notice it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import Any

from lazygt.errors import DeviceLost, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.recovery.recover import Told
from lazygt.runtime.failures import Describe
from lazygt.runtime.messages import (
    TO_CLIENT,
    Captured,
    Done,
    Installed,
    Left,
    Lost,
    Need,
    Relaid,
    Snapped,
    Swapped,
    Wrote,
)
from lazygt.runtime.plan_records import PlanRecord, again_message
from lazygt.runtime.reports import InFlightRun, Reports
from lazygt.runtime.wire import Buffer, Part, decode, size_of


class Answers(Reports):
    """Sender of messages to the workers, and receiver of theirs."""

    #: reads a number out of an answer that holds nothing else; None: no such reader
    numbers: Any = None

    def expect(
        self,
        seq: int,
        entry: PlanRecord | None,
        describe: Describe | None,
        base: int,
        fetches: int,
        ranks: Collection[int] = (0,),
    ) -> None:
        """Register a run that is about to be sent, or was sent by C++: its answers will come."""
        self._in_flight[seq] = InFlightRun(
            entry, describe, base, set(self._everyone), frozenset(ranks), fetches
        )

    # -- messages to workers ------------------------------------------------------------

    def tell_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None:
        """Send each rank its message, unless a recovery meanwhile has told all of them."""
        epoch = self._epoch
        for rank, frames in enumerate(messages):
            self._send(kind, rank, frames, why)
            if self._epoch != epoch:
                return

    @property
    def _epoch(self) -> int:
        recovery = self.recovery or self._former
        return 0 if recovery is None else recovery.epoch

    def _send(self, kind: str, rank: int, frames: Sequence[Buffer], why: str) -> None:
        size, epoch = size_of(frames), self._epoch
        try:
            if self.recovery is not None:
                self.recovery.go_on()
                if self._epoch != epoch:
                    return  # the recovery has sent it by now
            self.link.send(rank, frames)
        except WorkerDied as error:
            self._lost(error)
            return
        self.counts.messages_sent += 1
        self.counts.bytes_sent += size
        if self.observer is not None:
            self.observer.message("send", kind, rank, self._seq, size, why)

    def _resend(self, rank: int, need: Need) -> None:
        """Send a rank the plan of a run again, since it has forgotten it."""
        run = self._in_flight.get(need.seq)
        entry = None if run is None else run.entry
        if entry is None and self.recovery is not None:
            entry = self.recovery.journal.entry_of(need.seq)
        if entry is None or entry.name(rank) != need.digest:
            raise ProtocolError("it asks for a plan that was never sent")
        frames = again_message(entry, rank, need.seq >= entry.swapped_from)
        self._send("plan", rank, frames, f"worker {rank} had forgotten it")
        self._shipped(entry, frames, 1)

    def _shipped(self, entry: PlanRecord, frames: Sequence[Buffer], times: int) -> None:
        self.counts.plans_sent += 1
        entry.ships += times
        entry.size = size_of(frames)

    # -- messages of workers ------------------------------------------------------------

    def _receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        if self._no_answers is not None:
            raise self._no_answers
        try:
            if self.recovery is not None:
                self.recovery.go_on()
            return self.link.receive(timeout, beside)
        except (WorkerDied, WorkerFrozen) as error:
            self._lost(error)
            return None

    def _lost(self, error: WorkerDied | WorkerFrozen) -> None:
        """Recover from the loss of a worker, if that is possible.

        Raises:
            WorkerDied, WorkerFrozen: it is not possible.
        """
        if self.recovery is not None and self.recovery.active:
            raise error  # to the recovery, which begins anew
        try:
            if self.recovery is None or self._death is not None:
                raise error
            self.recovery.recover(error)
        except WorkerDied as death:
            self._death = death
            if isinstance(death, DeviceLost):  # its process lives, so nothing else ends a wait
                self._no_answers = death
            raise

    def _take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on a worker's message.

        Raises:
            ProtocolError: it makes no sense. Requests to that worker may never be answered, so
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
            if isinstance(told, Lost):  # nothing else comes from there, so it waits for nobody
                self._lost(self.device_lost(rank, told))
                return
            for believed in self._relied_on(Told(rank, told, frames[1:])):
                self._act(*believed)
        except ProtocolError as error:
            self._no_answers = ProtocolError(
                f"worker {rank} sent what makes no sense: {error}. Leave the session and open a "
                f"new one; please report this, if nobody tampered with the worker"
            )
            raise self._no_answers from error

    def _relied_on(self, told: Told) -> Iterable[Told]:
        """Return the messages to act on now: perhaps not this one, since a rank may be dying."""
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
            case Installed():
                self._installed(rank, told)
            case Snapped():
                self._snapped(rank, told)

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
            if self._launches_ahead:
                self._note_launched(done.seq, run)
                if done.timings is not None or (run.fetches and run.asked >= self._everyone):
                    self._note_ended(done.seq)
            if run.fetches or run.describe is not None:
                self._keep_early(done.seq, run)

    def _keep_early(self, seq: int, run: InFlightRun) -> None:
        """Keep a run's answers that come during a recovery, before anybody waits for them."""
        if self.recovery is not None and self.recovery.under_way and not run.abandoned:
            old = [key for key in self._early if key < seq - 2 * self._max_ahead]
            for key in old:  # nobody has waited for it, nor will
                del self._early[key]
            self._early[seq] = run

    def take(self, message: tuple[int, list[memoryview]]) -> None:
        """Act on a worker's message."""
        self._take(message)

    # -- waits ---------------------------------------------------------------------------

    def hold_back(self) -> None:
        """Wait while more than ``max_ahead`` runs are unanswered.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while len(self._in_flight) > self._max_ahead:
            self._take_next()

    def wait(self, seq: int, as_number: bool = False) -> Any:
        """Wait for run ``seq``; return the answers of all ranks that were asked for something.

        Args:
            as_number: return the number alone if the answer is nothing else.

        Returns:
            The answers by rank, or the number.

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

    def _awaited_number(self, seq: int, run: InFlightRun) -> Any:
        """Return the number that answers run ``seq``; None if the answer holds more than that."""
        while not run.answers:
            message = self._receive(None)
            if message is None:
                continue
            frames = message[1]
            number = self.numbers.number(frames, seq)
            if number is not None:
                del self._in_flight[seq]
                self._note_ended(seq)
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

    def wait_compiled(self, until: float | None = None) -> bool:
        """Wait until every rank has answered every swap, and every host has its artifacts.

        Args:
            until: a time of the monotonic clock.

        Returns:
            False if that time came first.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while self.entries.swapping or self.installing:
            if until is None:
                self._take_next()
            elif (left := until - monotonic()) <= 0:
                return False
            elif (message := self._receive(left)) is not None:
                self._take(message)
        return True

    def wait_snapped(self) -> None:
        """Wait until all workers have taken the snapshot that they were asked for.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while self.recovery is not None and self.recovery.journal.cutting:
            self._take_next()

    def pump(self) -> None:
        """Take the answers that have already arrived."""
        cutting = self.recovery is not None and self.recovery.journal.cutting
        entries, installing = self.entries, self.installing
        # a look costs a system call
        while self._in_flight or entries.swapping or installing or cutting:
            message = self._receive(0)
            if message is None:
                return
            self._take(message)

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


def _number(told: Part) -> int:
    """Return the number of the run, transfer or process group that a message is about; else 0."""
    match told:
        case Done() | Need():
            return told.seq
        case Wrote() | Left():
            return told.number
    return 0
