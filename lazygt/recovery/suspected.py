"""Suspected failures: messages whose handling waits until no rank can be dying.

A collective may fail on one rank because another rank is dying: the dying rank's sockets are
closed before its end is reported. Such a failure, and all messages after it, are deferred until
every rank has answered the same run. Then no rank has died in the run, and the failure is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from lazygt.runtime.messages import COLLECTIVE_ERROR, Done, Failure
from lazygt.runtime.wire import Message


class Notification(NamedTuple):
    """Message received from a rank, with its buffers."""

    rank: int
    message: Message
    buffers: list[Any]


class SuspectedFailures:
    """Queue of messages that are deferred because of a suspected failure of a collective. Pure.

    Args:
        waiting_for: returns the ranks that have not answered a run.
    """

    def __init__(self, waiting_for: Callable[[int], Set[int]]) -> None:
        self._waiting_for = waiting_for
        #: number of the run with the suspected failure
        self._seq = 0
        #: ranks that have not answered that run
        self._missing: set[int] = set()
        self._deferred: list[Notification] = []

    def add(self, received: Notification) -> Iterator[Notification]:
        """Add a message; yield those that are confirmed now, in the order of their arrival.

        Without a suspected failure that is the message itself.
        """
        answer = received.message if isinstance(received.message, Done) else None
        if self._missing:
            self._deferred.append(received)
            if answer is not None and answer.seq >= self._seq:
                self._missing.discard(received.rank)
            if not self._missing:  # all have answered: no rank has died, so the failure is real
                first, *later_ones = self.take()
                yield first
                for later in later_ones:
                    yield from self.add(later)
        elif answer is not None and (unanswered := self._unanswered(received.rank, answer)):
            self._seq, self._missing = answer.seq, unanswered
            self._deferred.append(received)
        else:
            yield received

    def _unanswered(self, rank: int, answer: Done) -> set[int]:
        """Return the ranks that must answer, too, before an answer with a failure is confirmed.

        Empty if no collective has failed in the answer.
        """
        failures = [*answer.failures, *(f for f in answer.fetched if isinstance(f, Failure))]
        if not any(failure.kind == COLLECTIVE_ERROR for failure in failures):
            return set()
        return set(self._waiting_for(answer.seq) - {rank})

    def trust_all(self) -> None:
        """Defer no message from here on, since workers are not replaced any more."""
        self._waiting_for = lambda seq: set()

    def take(self) -> list[Notification]:
        """Remove and return all deferred messages; no failure is suspected any more."""
        deferred, self._deferred = self._deferred, []
        self._missing.clear()
        return deferred
