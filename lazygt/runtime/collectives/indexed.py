"""Distributed index_select and index_put of a row-sharded value, by all-to-all.

The index alone determines the routes. So ranks first all-gather the row counts, one number for each
pair of ranks, and wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from lazygt.runtime.collectives.backends import Work
    from lazygt.runtime.collectives.group import AxisGroup


class Begun(NamedTuple):
    """Exchange in flight: receive buffer, work, sent tensor, and unpacking function."""

    buffer: torch.Tensor
    work: Work
    sent: torch.Tensor
    unpack: Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of an index's rows to the ranks that own them.

    Attributes:
        order: positions in the index, sorted by the ranks that own their rows.
        local_rows: row numbers within the owners' blocks, in that order.
        counts: number of rows by requesting rank and owner.
    """

    axis_group: AxisGroup
    order: torch.Tensor
    local_rows: torch.Tensor
    counts: Sequence[Sequence[int]]

    def to_owners(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send this rank's values for its index, in ``order``, to the owners of the rows."""
        requested, received = self._counts()
        return self._all_to_all(sent, requested, received)

    def to_requesters(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send this rank's values for requested rows back to the requesting ranks."""
        requested, received = self._counts()
        return self._all_to_all(sent, received, requested)

    def _counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the row counts that this rank requests of each rank, and each rank of this one."""
        me = self.axis_group.index
        return self.counts[me], [row[me] for row in self.counts]

    def _all_to_all(
        self, sent: torch.Tensor, out: Sequence[int], into: Sequence[int]
    ) -> tuple[torch.Tensor, Work]:
        """Launch an all-to-all of rows; ``out`` and ``into`` are row counts by rank."""
        row_size = math.prod(sent.shape[1:])
        buffer = sent.new_empty(row_size * sum(into))
        columns = zip(*self.counts, strict=True)
        largest = max(*map(sum, self.counts), *map(sum, columns)) * row_size * sent.itemsize
        work = self.axis_group.backend(buffer, "all_to_all", largest).all_to_all(
            buffer,
            sent.view(-1),
            [row_size * count for count in into],
            [row_size * count for count in out],
        )
        return buffer, work


def route(axis_group: AxisGroup, index: torch.Tensor, count: int, size: int) -> Routes:
    """Compute the routes of ``index``, with all ranks' counts.

    Raises:
        IndexError: a row is out of range.
    """
    first, last = (int(index.min()), int(index.max())) if index.numel() else (0, -1)
    if first < 0 or last >= size:
        raise IndexError(f"index {first if first < 0 else last} is out of range for {size} rows")
    ranks = index.div(count, rounding_mode="floor")
    order = ranks.argsort(stable=True)
    counts = torch.bincount(ranks, minlength=axis_group.size)
    all_counts = counts.new_empty(axis_group.size * axis_group.size)
    axis_group.backend(counts, "all_gather", all_counts.nbytes).all_gather(
        all_counts, counts
    ).wait()
    local_rows = (index - ranks * count)[order]
    return Routes(
        axis_group, order, local_rows, all_counts.view(axis_group.size, axis_group.size).tolist()
    )


def take(
    axis_group: AxisGroup, value: torch.Tensor, index: torch.Tensor, count: int, size: int
) -> Begun:
    """Launch the gather of the rows of ``index``: send row numbers to owners, values back."""
    routes = route(axis_group, index, count, size)
    requested_rows, work = routes.to_owners(routes.local_rows)
    work.wait()
    sent = value.index_select(0, requested_rows)
    buffer, work = routes.to_requesters(sent)

    def unpack(buffer: torch.Tensor) -> list[torch.Tensor]:
        rows = buffer.view(len(index), *value.shape[1:])
        return [torch.empty_like(rows).index_copy_(0, routes.order, rows)]

    return Begun(buffer, work, sent, unpack)


def put(
    axis_group: AxisGroup,
    value: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    count: int,
    size: int,
    added: bool,
) -> Begun:
    """Launch the write, or the addition, of all ranks' rows into their owners' blocks."""
    routes = route(axis_group, index, count, size)
    local_rows, work = routes.to_owners(routes.local_rows)
    work.wait()
    sent = source.index_select(0, routes.order)
    received, work = routes.to_owners(sent)
    buffer = value.clone(memory_format=torch.contiguous_format).view(-1)

    def unpack(buffer: torch.Tensor) -> list[torch.Tensor]:
        block = buffer.view(value.shape)
        rows = received.view(len(local_rows), *value.shape[1:])
        return [block.index_put_((local_rows,), rows, accumulate=added)]

    return Begun(buffer, work, sent, unpack)
