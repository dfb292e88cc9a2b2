"""Sender and receiver of a client's messages, with counts, and waits for answers.

If the session has a recovery, a worker that dies is replaced, and callers do not notice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import monotonic
from typing import Any

from lazygt.errors import DeviceLost, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.recovery.suspected import Notification
from lazygt.runtime.client.failures import Describe
from lazygt.runtime.client.reports import InFlightRun, Reports
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
from lazygt.runtime.wire import Buffer, Message, decode, size_of


class Answers(Reports):
    """Sender of messages to the workers, and handler of the workers' messages."""

    #: C++ reader of an answer that is one number; None without the extension
    number_reader: Any = None

    def expect(
        self,
        seq: int,
        entry: PlanRecord | None,
        describe: Describe | None,
        base: int,
        fetches: int,
        ranks: Collection[int] = (0,),
    ) -> None:
        """Register a run whose answers are expected: about to be sent, or sent by C++.

        Args:
            seq: number of the run.
            base: id of its first output.
            fetches: number of values that each of ``ranks`` sends.
        """
        self._in_flight[seq] = InFlightRun(
            entry, describe, base, set(self._all_ranks), frozenset(ranks), fetches
        )

    # -- messages to workers ------------------------------------------------------------

    def send_all(self, kind: str, messages: Sequence[Sequence[Buffer]], why: str) -> None:
        """Send each rank its message; stop if a recovery has sent all of them meanwhile."""
        epoch = self._epoch
        for rank, frames in enumerate(messages):
            self._send(kind, rank, frames, why)
            if self._epoch != epoch:
                return

    @property
    def _epoch(self) -> int:
        """Number of recoveries so far: if it changes, the recovery has repeated all messages."""
        recovery = self.recovery or self._disabled_recovery
        return 0 if recovery is None else recovery.epoch

    def _send(self, kind: str, rank: int, frames: Sequence[Buffer], why: str) -> None:
        """Send a rank a message; if a worker has died, recover instead.

        Args:
            kind, why: type and reason of the message, for the log.

        Raises:
            WorkerDied, WorkerFrozen: and no recovery is possible.
        """
        size, epoch = size_of(frames), self._epoch
        try:
            if self.recovery is not None:
                self.recovery.finish_interrupted()
                if self._epoch != epoch:
                    return  # the recovery has sent it by now
            self.link.send(rank, frames)
        except WorkerDied as error:
            self._recover_from(error)
            return
        self.counts.messages_sent += 1
        self.counts.bytes_sent += size
        if self.observer is not None:
            self.observer.message("send", kind, rank, self._seq, size, why)

    def _resend(self, rank: int, need: Need) -> None:
        """Send a rank the plan of a run again, since its cache has evicted it."""
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
        """Count a plan that was sent to ``times`` ranks."""
        self.counts.plans_sent += 1
        entry.ships += times
        entry.size = size_of(frames)

    # -- messages of workers ------------------------------------------------------------

    def _receive(
        self, timeout: float | None, wake_fd: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Wait for a message; return (rank, frames), or None after a timeout or a recovery.

        Args:
            timeout: seconds; None: no limit.
            wake_fd: a descriptor that ends the wait, too, once it is readable.
        """
        if self._fatal_error is not None:
            raise self._fatal_error
        try:
            if self.recovery is not None:
                self.recovery.finish_interrupted()
            return self.link.receive(timeout, wake_fd)
        except (WorkerDied, WorkerFrozen) as error:
            self._recover_from(error)
            return None

    def _recover_from(self, error: WorkerDied | WorkerFrozen) -> None:
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
                self._fatal_error = death
            raise

    def _handle_message(self, message: tuple[int, list[memoryview]]) -> None:
        """Decode and handle a worker's message.

        Raises:
            ProtocolError: the message makes no sense. Requests to that worker may never be
                answered, so every later wait raises this again.
        """
        rank, frames = message
        size = size_of(frames)
        self.counts.messages_received += 1
        self.counts.bytes_received += size
        try:
            decoded = decode(frames, TO_CLIENT)
            if self.observer is not None:
                kind = type(decoded).__name__.lower()
                self.observer.message("receive", kind, rank, _subject_number(decoded), size, "")
            if isinstance(decoded, Lost):  # the worker's last message
                self._recover_from(self.device_lost(rank, decoded))
                return
            for trusted in self._trusted_messages(Notification(rank, decoded, frames[1:])):
                self._dispatch(*trusted)
        except ProtocolError as error:
            self._fatal_error = ProtocolError(
                f"worker {rank} sent what makes no sense: {error}. Leave the session and open a "
                f"new one; please report this, if nobody tampered with the worker"
            )
            raise self._fatal_error from error

    def _trusted_messages(self, message: Notification) -> Iterable[Notification]:
        """Return the messages to handle now; a message of a rank that may be dying is held back."""
        if self.recovery is None or self.link.world_size == 1:
            return (message,)
        return self.recovery.suspected.add(message)

    def _dispatch(self, rank: int, message: Message, buffers: list[memoryview]) -> None:
        """Call the handler of a message's type."""
        match message:
            case Done():
                self._handle_done(rank, message, buffers)
            case Need():
                self._resend(rank, message)
            case Left():
                self._left(message)
            case Relaid():
                self._relaid(rank, message)
            case Wrote():
                checks, handles = message.checks, message.handles
                self._finished_writes.append((rank, message.number, checks, message.error, handles))
            case Captured():
                self._captured(rank, message)
            case Swapped():
                self._swapped(rank, message.digest, message.error)
            case Installed():
                self._installed(rank, message)
            case Snapped():
                self._snapped(rank, message)

    def _handle_done(self, rank: int, done: Done, buffers: list[memoryview]) -> None:
        """Record a rank's answer to a run: released memory, fetched values and failures."""
        run = self._in_flight.get(done.seq)
        if self.recovery is not None:
            self.recovery.record_answer(rank, done.seq)
            if (run is None or rank not in run.waiting) and self.recovery.is_replayed(done.seq):
                for offset in done.releases:
                    self._uploads.read_again(offset, rank, done.seq)
                return
        if run is None or rank not in run.waiting:
            raise ProtocolError(f"it answers run {done.seq}, which it was not asked")
        wanted = run.fetches if rank in run.fetch_ranks else 0
        self._fetches.check(rank, done, buffers, wanted)
        run.waiting.discard(rank)
        if done.timings is not None and self.observer is not None:
            self.observer.ran(rank, done.seq, run.entry, run.describe, done.timings)
        for offset in done.releases:
            self._uploads.was_read(offset, rank, done.seq)
        if rank in run.fetch_ranks:
            run.answers[rank] = done, buffers
            if run.abandoned:
                self._fetches.drop(rank, done)
        for failure in done.failures:
            self._failures.note(done.seq, rank, failure, run.describe, run.errors)
        if not run.waiting:
            del self._in_flight[done.seq]
            if self._launches_ahead:
                self._remember_launched(done.seq, run)
                if done.timings is not None or (run.fetches and run.fetch_ranks >= self._all_ranks):
                    self._forget_finished(done.seq)
            if run.fetches or run.describe is not None:
                self._cache_early_answers(done.seq, run)

    def _cache_early_answers(self, seq: int, run: InFlightRun) -> None:
        """Cache a run's answers that come during a recovery, until ``wait`` asks for them."""
        if self.recovery is not None and self.recovery.under_way and not run.abandoned:
            old = [key for key in self._early_answers if key < seq - 2 * self._max_ahead]
            for key in old:  # no caller will wait for so old a run
                del self._early_answers[key]
            self._early_answers[seq] = run

    def handle(self, message: tuple[int, list[memoryview]]) -> None:
        """Decode and handle a worker's message."""
        self._handle_message(message)

    # -- waits ---------------------------------------------------------------------------

    def hold_back(self) -> None:
        """Wait while more than ``max_ahead`` runs are unanswered.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while len(self._in_flight) > self._max_ahead:
            self._handle_next()

    def wait(self, seq: int, as_number: bool = False) -> Any:
        """Wait for run ``seq``; return the answers of all ranks that send values.

        Args:
            as_number: return a Python number if the answer is a single number.

        Returns:
            The answers by rank, or the number.

        Raises:
            WorkerDied, WorkerFrozen: instead of an answer.
        """
        run = self._early_answers.pop(seq, None) or self._in_flight[seq]
        try:
            if as_number and self.number_reader is not None and self.observer is None:
                number = self._awaited_number(seq, run)
                if number is not None:
                    return number
            while len(run.answers) < len(run.fetch_ranks):
                self._handle_next()
        except BaseException:
            # Ctrl-C: the answer will come, and is dropped then
            run.abandoned = True
            for rank, (done, _) in run.answers.items():
                self._fetches.drop(rank, done)
            raise
        self._early_answers.pop(seq, None)
        return run.answers

    def _awaited_number(self, seq: int, run: InFlightRun) -> Any:
        """Wait for run ``seq``; return its single number, or None if the answer holds more."""
        while not run.answers:
            message = self._receive(None)
            if message is None:
                continue
            frames = message[1]
            number = self.number_reader.number(frames, seq)
            if number is not None:
                del self._in_flight[seq]
                self._forget_finished(seq)
                counts, size = self.counts, len(frames[1])
                counts.messages_received += 1
                counts.bytes_received += len(frames[0]) + size
                counts.fetches += 1
                counts.bytes_fetched += size
                return number
            self._handle_message(message)
        return None

    def synchronize(self) -> None:
        """Wait until every rank has answered every run.

        Raises:
            WorkerDied: a worker is gone; raised again in each call.
            WorkerFrozen: a worker does not answer.
        """
        if self._death is not None:
            raise self._death
        while self._in_flight:
            self._handle_next()

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
                self._handle_next()
            elif (remaining := until - monotonic()) <= 0:
                return False
            elif (message := self._receive(remaining)) is not None:
                self._handle_message(message)
        return True

    def wait_snapped(self) -> None:
        """Wait until all workers have taken the requested snapshot.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        while self.recovery is not None and self.recovery.journal.snapshot_under_way:
            self._handle_next()

    def pump(self) -> None:
        """Handle the messages that have already arrived, without waiting."""
        snapshotting = self.recovery is not None and self.recovery.journal.snapshot_under_way
        entries, installing = self.entries, self.installing
        # a poll costs a system call
        while self._in_flight or entries.swapping or installing or snapshotting:
            message = self._receive(0)
            if message is None:
                return
            self._handle_message(message)

    def _handle_next(self) -> None:
        """Wait for one message and handle it; return early after a recovery."""
        observer, message, epoch = self.observer, None, self._epoch
        try:
            while message is None:
                message = self._receive(None if observer is None else observer.interval)
                if self._epoch != epoch:
                    break
                if message is None and observer is not None:
                    observer.waiting(
                        f"{len(self._in_flight)} runs of {self.link.world_size} worker(s)"
                    )
        finally:
            if observer is not None:
                observer.wait_ended()
        if message is not None:
            self._handle_message(message)


def _subject_number(message: Message) -> int:
    """Return the number of the run, transfer or process group that a message is about; else 0."""
    match message:
        case Done() | Need():
            return message.seq
        case Wrote() | Left():
            return message.number
    return 0
