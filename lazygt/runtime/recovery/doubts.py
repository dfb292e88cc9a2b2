"""Doubts: a collective that failed on one rank, perhaps because another is dying.

A dying rank's sockets are closed before its end is reported. So messages after such an answer wait
until every rank has answered the same run: then no rank had died in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from lazygt.runtime.messages import COLLECTIVE_ERROR, Done, Failure
from lazygt.runtime.wire import Part


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
