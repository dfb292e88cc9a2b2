"""Halo exchange: redistribution of the rows of a sharded dim by point-to-point sends.

Used for slices, rolls, flips, the halos of convolutions, and ``cat`` and ``split`` along the
sharded dim. Each rank receives only the rows that it lacks, from the rank that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from lazygt.graph.placement import (
    Cut,
    StridedShard,
    group_sizes,
    outer_and_inner,
    shard_bounds,
    uneven,
)

#: Rows of a dim: (start, stop).
Rows = tuple[int, int]
#: Rows that a rank has, or is to have, in order.
Ranges = tuple[Rows, ...]
#: Most pieces of one rank's rows; more are not worth the slices and concatenations.
MAX_PIECES = 32


class Piece(NamedTuple):
    """Consecutive rows that one rank has and a rank wants."""

    source: int  # the rank that has the rows
    start: int  # index of the first row within that rank's rows
    rows: int  # number of rows


@dataclass(frozen=True)
class RowExchange:
    """Exchange of rows along ``dim`` among all ranks."""

    dim: int
    #: rows of each rank before the exchange; no two ranks have the same row
    have: tuple[Ranges, ...]
    #: rows of each rank after the exchange; several ranks may want the same row
    want: tuple[Ranges, ...]

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces that make up each rank's wanted rows, in order."""
        return tuple([tuple(self._pieces_of(ranges)) for ranges in self.want])

    def _pieces_of(self, ranges: Ranges) -> list[Piece]:
        """Return the pieces that make up ``ranges``, as intersections with the ranks' rows."""
        owned_ranges = []
        for source, owned in enumerate(self.have):
            offset = 0
            for first, last in owned:
                owned_ranges.append((first, last, source, offset))
                offset += last - first
        pieces = []
        for start, stop in ranges:
            for first, last, source, offset in sorted(owned_ranges):
                overlap_start, overlap_stop = max(start, first), min(stop, last)
                if overlap_start < overlap_stop:
                    pieces.append(
                        Piece(source, offset + overlap_start - first, overlap_stop - overlap_start)
                    )
        return pieces

    @cached_property
    def sent(self) -> tuple[tuple[int, int, int], ...]:
        """Sends as (source, target, number of rows), in order."""
        counts: dict[tuple[int, int], int] = {}
        for target, pieces in enumerate(self.pieces):
            for source, _, count in pieces:
                if source != target:
                    counts[source, target] = counts.get((source, target), 0) + count
        return tuple([(*pair, counts[pair]) for pair in sorted(counts)])

    def outgoing(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, number of rows) of each piece that a rank sends, ordered by receiver."""
        return [
            (piece.start, piece.rows)
            for target, wanted in enumerate(self.pieces)
            for piece in wanted
            if piece.source == rank != target
        ]

    def wanted_pieces(self, rank: int) -> list[tuple[bool, int, int]]:
        """Return (is local, first row, number of rows) of each piece that a rank wants.

        The first row is an index into the rank's own rows if local, else into the received rows.
        """
        pieces = self.pieces[rank]
        starts, offset = {}, 0
        # received rows are ordered by sender; the rows of one sender as they are wanted
        for piece in sorted(pieces, key=lambda piece: piece.source):
            if piece.source != rank:
                starts[piece] = offset
                offset += piece.rows
        return [
            (piece.source == rank, starts.get(piece, piece.start), piece.rows) for piece in pieces
        ]

    @property
    def most_rows_sent(self) -> int:
        """Largest number of rows that one rank sends."""
        return self._largest_send([source for source, _, _ in self.sent])

    @property
    def most_rows_returned(self) -> int:
        """Largest number of rows that one rank sends in the reverse exchange."""
        return self._largest_send([target for _, target, _ in self.sent])

    def _largest_send(self, senders: Sequence[int]) -> int:
        """Return the rows of the rank that sends most.

        Args:
            senders: for each piece in ``sent``, the rank that sends it.
        """
        of_rank = [0] * len(self.have)
        for sender, (_, _, count) in zip(senders, self.sent, strict=True):
            of_rank[sender] += count
        return max(of_rank)

    @property
    def has_few_pieces(self) -> bool:
        """True if each rank gets its rows in few pieces."""
        return max(map(len, self.pieces), default=0) <= MAX_PIECES


def blocks(size: int, axis_size: int, start: int = 0) -> tuple[Ranges, ...]:
    """Return each rank's block of a dim of ``size``, with rows numbered from ``start``."""
    bounds = [shard_bounds(size, axis_size, rank) for rank in range(axis_size)]
    return tuple([((start + first, start + last),) for first, last in bounds])


def ranges_of(placement: Cut, size: int, axis_size: int) -> tuple[Ranges, ...]:
    """Return each rank's rows of a dim of ``size`` with this placement."""
    if uneven(placement):
        return blocks_of_each(group_sizes(placement, size), axis_size)
    outer, inner = outer_and_inner(placement)
    group = size // (outer * inner)
    bounds = [shard_bounds(group, axis_size, rank) for rank in range(axis_size)]
    starts = range(0, size, max(group * inner, 1))
    return tuple(
        [
            tuple(
                [
                    (group_start + start * inner, group_start + stop * inner)
                    for group_start in starts
                ]
            )
            for start, stop in bounds
        ]
    )


def _group_count(placement: Cut) -> int:
    """Return the number of groups of a sharded dim: 1 unless interleaved."""
    return len(placement.widths) or placement.outer if isinstance(placement, StridedShard) else 1


@lru_cache(maxsize=1024)
def rows_between(have: Cut, want: Cut, size: int, axis_size: int) -> RowExchange | None:
    """Return the exchange from one placement to another on a dim of ``size``.

    None where the exchange would have too many pieces.
    """
    if max(_group_count(have), _group_count(want)) > MAX_PIECES:
        return None
    move = RowExchange(have.dim, ranges_of(have, size, axis_size), ranges_of(want, size, axis_size))
    return move if move.has_few_pieces else None


@lru_cache(maxsize=1024)
def blocks_of_each(sizes: tuple[int, ...], axis_size: int) -> tuple[Ranges, ...]:
    """Return for each rank the ranges of its blocks of several concatenated tensors.

    Each tensor is sharded by itself; its rows are numbered after those of the tensors before it.

    Args:
        sizes: number of rows of each tensor.
    """
    tensor_blocks = [
        blocks(size, axis_size, sum(sizes[:index])) for index, size in enumerate(sizes)
    ]
    return tuple(
        [tuple([of_ranks[rank][0] for of_ranks in tensor_blocks]) for rank in range(axis_size)]
    )
