"""Exchanges of rows of a cut dim: each rank's rows before and after, and the sends.

Slices, rolls, flips, the neighbours' rows of convolutions, tensors joined or taken apart along the
dim that is cut: each rank is sent just the rows that it lacks, by the rank that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from lazygt.graph.placement import (
    Cut,
    StridedShard,
    around,
    group_sizes,
    shard_bounds,
    uneven,
)

#: Rows of a dim, from the first to before the last.
Rows = tuple[int, int]
#: Rows that a rank has, or is to have, in order.
Ranges = tuple[Rows, ...]
#: More pieces than these of one rank's rows are not worth the ops that cut and join them.
MOST_PIECES = 32


class Piece(NamedTuple):
    """Rows that one rank has and another wants.

    Attributes:
        source: the rank that has them.
        start: the first of them, within that rank's rows.
        rows: number of them.
    """

    source: int
    start: int
    rows: int


@dataclass(frozen=True)
class RowExchange:
    """Exchange of rows along ``dim`` among all ranks.

    Attributes:
        have: of each rank; no two ranks have the same row.
        want: of each rank; a row may be wanted by several.
    """

    dim: int
    have: tuple[Ranges, ...]
    want: tuple[Ranges, ...]

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of each rank's wanted rows, in order."""
        return tuple([tuple(self._found(ranges)) for ranges in self.want])

    def _found(self, ranges: Ranges) -> list[Piece]:
        held = []
        for source, having in enumerate(self.have):
            at = 0
            for first, last in having:
                held.append((first, last, source, at))
                at += last - first
        pieces = []
        for start, stop in ranges:
            for first, last, source, at in sorted(held):
                a, b = max(start, first), min(stop, last)
                if a < b:
                    pieces.append(Piece(source, at + a - first, b - a))
        return pieces

    @cached_property
    def sent(self) -> tuple[tuple[int, int, int], ...]:
        """(source, target, number of rows) of the sends, in order."""
        counts: dict[tuple[int, int], int] = {}
        for target, pieces in enumerate(self.pieces):
            for source, _, count in pieces:
                if source != target:
                    counts[source, target] = counts.get((source, target), 0) + count
        return tuple([(*pair, counts[pair]) for pair in sorted(counts)])

    def given(self, rank: int) -> list[tuple[int, int]]:
        """Return (first, number) of the rows that a rank sends, in the order of the receivers."""
        return [
            (piece.start, piece.rows)
            for target, wanted in enumerate(self.pieces)
            for piece in wanted
            if piece.source == rank != target
        ]

    def places(self, rank: int) -> list[tuple[bool, int, int]]:
        """Return (is its own, first row, number of rows) of each piece that a rank wants.

        The first row counts among the rank's own rows, or among those that it receives.
        """
        pieces = self.pieces[rank]
        starts, at = {}, 0
        # those that come are in the order of the senders; of one sender, as they are wanted
        for piece in sorted(pieces, key=lambda piece: piece.source):
            if piece.source != rank:
                starts[piece] = at
                at += piece.rows
        return [
            (piece.source == rank, starts.get(piece, piece.start), piece.rows) for piece in pieces
        ]

    @property
    def most(self) -> int:
        """Largest number of rows that one rank sends."""
        return self._most([source for source, _, _ in self.sent])

    @property
    def most_back(self) -> int:
        """Largest number of rows that one rank sends in the reverse exchange."""
        return self._most([target for _, target, _ in self.sent])

    def _most(self, senders: Sequence[int]) -> int:
        of_rank = [0] * len(self.have)
        for sender, (_, _, count) in zip(senders, self.sent, strict=True):
            of_rank[sender] += count
        return max(of_rank)

    @property
    def is_worth_it(self) -> bool:
        """True if each rank gets its rows in few pieces."""
        return max(map(len, self.pieces), default=0) <= MOST_PIECES


def blocks(size: int, parts: int, start: int = 0) -> tuple[Ranges, ...]:
    """Return each rank's block of a dim of ``size``, with rows numbered from ``start``."""
    bounds = [shard_bounds(size, parts, rank) for rank in range(parts)]
    return tuple([((start + first, start + last),) for first, last in bounds])


def ranges_of(cut: Cut, size: int, parts: int) -> tuple[Ranges, ...]:
    """Return each rank's rows of a dim of ``size`` that is cut so."""
    if uneven(cut):
        return blocks_of_each(group_sizes(cut, size), parts)
    outer, inner = around(cut)
    group = size // (outer * inner)
    bounds = [shard_bounds(group, parts, rank) for rank in range(parts)]
    starts = range(0, size, max(group * inner, 1))
    return tuple([tuple([(at + a * inner, at + b * inner) for at in starts]) for a, b in bounds])


def _count(cut: Cut) -> int:
    """Return the number of groups of a cut dim."""
    return len(cut.widths) or cut.outer if isinstance(cut, StridedShard) else 1


@lru_cache(maxsize=1024)
def rows_between(have: Cut, want: Cut, size: int, parts: int) -> RowExchange | None:
    """Return the exchange from one cut of a dim of ``size`` to another.

    None where it takes too many pieces.
    """
    if max(_count(have), _count(want)) > MOST_PIECES:
        return None
    move = RowExchange(have.dim, ranges_of(have, size, parts), ranges_of(want, size, parts))
    return move if move.is_worth_it else None


@lru_cache(maxsize=1024)
def blocks_of_each(sizes: tuple[int, ...], parts: int) -> tuple[Ranges, ...]:
    """Return each rank's blocks of tensors of these sizes, numbered one after the other."""
    every = [blocks(size, parts, sum(sizes[:at])) for at, size in enumerate(sizes)]
    return tuple([tuple([each[rank][0] for each in every]) for rank in range(parts)])
