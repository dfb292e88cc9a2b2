"""Waits: until a run, a swap or a transfer is answered, or something else happens."""

from __future__ import annotations

from typing import Any

from lazygt.runtime.answers import Answers, InFlightRun
from lazygt.runtime.messages import Write


class Waits(Answers):
    """Waits for answers; a worker's death ends no wait if it can be recovered from."""

    #: takes a number out of an answer that is nothing else; None: there is none
    numbers: Any = None

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

    def _awaited_number(self, seq: int, run: InFlightRun) -> Any:
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

    # -- transfers -----------------------------------------------------------------------

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
