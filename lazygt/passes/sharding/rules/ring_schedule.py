"""Schedule of a ring attention: queries and keys that meet on each rank in each turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lazygt.graph.placement import block_size

#: (from, to, rows) of the sends between ranks at one time.
Sent = tuple[tuple[int, int, int], ...]


class Task(NamedTuple):
    """One rank's work in a turn: queries of one rank attend to keys of one rank.

    Attributes:
        queries, keys: their ranks.
        first, last: the range of those queries.
    """

    queries: int
    keys: int
    first: int
    last: int


@dataclass(frozen=True)
class Turn:
    """Work of all ranks between two exchanges.

    Attributes:
        tasks: of each rank; None: it has none.
        keys: the blocks of keys that come to them before.
        queries: the queries that come to them before.
    """

    tasks: tuple[Task | None, ...]
    keys: Sent
    queries: Sent

    def returned_keys(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for keys to the owners of the keys."""
        return tuple(sorted(
            (rank, task.keys, sizes[task.keys])
            for rank, task in self._done(sizes) if task.keys != rank
        ))  # fmt: skip

    def returned_queries(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for queries to the owners of the queries."""
        return tuple(sorted(
            (rank, task.queries, task.last - task.first)
            for rank, task in self._done(sizes) if task.queries != rank
        ))  # fmt: skip

    def _done(self, sizes: Sequence[int]) -> Iterator[tuple[int, Task]]:
        for rank, task in enumerate(self.tasks):
            if task is not None and task.first < task.last and sizes[task.keys]:
                yield rank, task


@dataclass(frozen=True)
class Schedule:
    """Turns after the first one, in which each rank's queries attend to its own keys.

    Attributes:
        queries, keys: number of them on each rank.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    turns: tuple[Turn, ...]

    @property
    def share(self) -> float:
        """Part of the work that the busiest rank does."""
        diagonal = 0.5 if self.causal else 1.0
        work = [q * k * diagonal for q, k in zip(self.queries, self.keys, strict=True)]
        for turn in self.turns:
            for rank, task in enumerate(turn.tasks):
                if task is not None:
                    work[rank] += (task.last - task.first) * self.keys[task.keys]
        return max(work) / (sum(self.queries) * sum(self.keys) * diagonal)


@lru_cache(maxsize=1024)
def schedule(queries: int, keys: int, parts: int, causal: bool, balanced: bool) -> Schedule:
    """Build the schedule; of a causal mask there are as many keys as queries.

    Args:
        balanced: ranks with fewer keys to attend to do it for others.
    """
    of_queries, of_keys = (
        tuple([block_size(size, parts, rank) for rank in range(parts)]) for size in (queries, keys)
    )
    last = parts // 2 if balanced else parts - 1
    turns = [_turn(number, of_queries, of_keys, causal, balanced) for number in range(1, last + 1)]
    return Schedule(of_queries, of_keys, causal, tuple(turns))


def _turn(
    number: int, queries: Sequence[int], keys: Sequence[int], causal: bool, balanced: bool
) -> Turn:
    """Build a turn: each rank attends to the keys of the one ``number`` places before it.

    Of a causal mask those are later keys for the first ranks. If it is balanced, the queries of the
    later ranks come to these instead: halfway round two ranks stand opposite each other, and each
    does half.
    """
    parts = len(queries)
    tasks: list[Task | None] = []
    for rank in range(parts):
        other = (rank - number) % parts
        helped = causal and other > rank
        owner = other if helped else rank
        half = queries[owner] // 2 if balanced and 2 * number == parts else None
        first = half or 0 if helped else 0
        last = queries[owner] if helped or half is None else half
        task = Task(owner, rank if helped else other, first, last)
        tasks.append(None if helped and not balanced else task)
    moved = [
        ((rank - 1) % parts, rank, keys[task.keys])
        for rank, task in enumerate(tasks) if task is not None and task.keys != rank
    ]  # fmt: skip
    # queries begin with the first rank, and are passed on
    asked = [
        (rank - 1 if rank else task.queries, rank, task.last - task.first)
        for rank, task in enumerate(tasks) if task is not None and task.queries != rank
    ]  # fmt: skip
    return Turn(tuple(tasks), _sent(moved), _sent(asked))


def _sent(moves: Sequence[tuple[int, int, int]]) -> Sent:
    return tuple(sorted(move for move in moves if move[2]))
