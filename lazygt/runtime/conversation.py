"""Conversation: messages from the client to its workers and back, which are counted.

A worker that dies meanwhile is replaced by a recovery, if there is one: nobody above hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lazygt.errors import ProtocolError, WorkerDied, WorkerFrozen
from lazygt.runtime.console import Observer
from lazygt.runtime.launch.link import Link
from lazygt.runtime.recovery.recover import Recovery
from lazygt.runtime.wire import Buffer, size_of


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


class Conversation:
    """Sends and receives. What is received, and what is sent when, is for those above."""

    def __init__(self, link: Link, observer: Observer | None) -> None:
        self.link = link
        #: who is told of messages, waits and timed runs, if anybody looks
        self.observer = observer
        self.counts = Counts()
        self.recovery: Recovery | None = None
        #: see ``RunsInFlight``
        self.quiet_until = inf
        #: number of the last run
        self._seq = 0
        self._death: WorkerDied | None = None
        #: why no worker's answers can be relied on any more
        self._nonsense: ProtocolError | None = None

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
