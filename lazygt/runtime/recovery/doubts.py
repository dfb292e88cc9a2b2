"""Doubts: a collective that failed on one rank, perhaps because another is dying.

Its sockets are closed before anybody is told that it has ended. So what comes after such an answer
waits until every rank has answered the same run: then nobody had died in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from lazygt.runtime.messages import COLLECTIVE_ERROR, Done, Failure
from lazygt.runtime.wire import Part


class Told(NamedTuple):
    """What a rank has said."""

    rank: int
    message: Part
    buffers: list[Any]


class Doubts:
    """What is held back; pure.

    Args:
        waiting_for: the ranks that have not answered a run.
    """

    def __init__(self, waiting_for: Callable[[int], Set[int]]) -> None:
        self._waiting_for = waiting_for
        self._seq = 0
        #: ranks that have not answered that run
        self._missing: set[int] = set()
        self._held: list[Told] = []

    def sort_out(self, told: Told) -> Iterator[Told]:
        """What can be relied on by now, in the order in which it came."""
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
        """The ranks that must have answered, too, before this answer is believed."""
        failures = [*answer.failures, *(f for f in answer.fetched if isinstance(f, Failure))]
        if not any(failure.kind == COLLECTIVE_ERROR for failure in failures):
            return set()
        return set(self._waiting_for(answer.seq) - {rank})

    def believe(self) -> None:
        """From here on nothing is in doubt: nobody is replaced any more."""
        self._waiting_for = lambda seq: set()

    def take(self) -> list[Told]:
        """All that is held back; nothing is in doubt any more."""
        held, self._held = self._held, []
        self._missing.clear()
        return held
