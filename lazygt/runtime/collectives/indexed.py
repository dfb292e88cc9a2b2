"""Exchange of indexed rows of a sharded value: gather from the ranks, or scatter to them.

Only the index determines the routes. So ranks first all-gather the row counts, and wait for them:
one number for each pair of ranks.
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
    """Exchange under way: its buffer, its work, the sent tensor, and the unpacking function."""

    buffer: torch.Tensor
    work: Work
    sent: torch.Tensor
    unpack: Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of an index's rows to the ranks that own them.

    Attributes:
        order: positions in the index, sorted by the ranks that own their rows.
        places: row numbers within the owners' blocks, in that order.
        counts: number of rows by requesting rank and owner.
    """

    line: AxisGroup
    order: torch.Tensor
    places: torch.Tensor
    counts: Sequence[Sequence[int]]

    def there(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send this rank's values for its index, in ``order``, to the owners of the rows."""
        named, wanted = self._counts()
        return self._exchanged(sent, named, wanted)

    def back(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Send this rank's values for requested rows back to the requesting ranks."""
        named, wanted = self._counts()
        return self._exchanged(sent, wanted, named)

    def _counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the numbers of rows that this rank requests of each, and each of this one."""
        me = self.line.index
        return self.counts[me], [row[me] for row in self.counts]

    def _exchanged(
        self, sent: torch.Tensor, out: Sequence[int], into: Sequence[int]
    ) -> tuple[torch.Tensor, Work]:
        row = math.prod(sent.shape[1:])
        buffer = sent.new_empty(row * sum(into))
        columns = zip(*self.counts, strict=True)
        most = max(*map(sum, self.counts), *map(sum, columns)) * row * sent.itemsize
        work = self.line.backend(buffer, "all_to_all", most).all_to_all(
            buffer, sent.view(-1), [row * count for count in into], [row * count for count in out]
        )
        return buffer, work


def routed(line: AxisGroup, index: torch.Tensor, count: int, size: int) -> Routes:
    """Compute the routes of ``index``, with all ranks' counts.

    Raises:
        IndexError: a row is out of range.
    """
    first, last = (int(index.min()), int(index.max())) if index.numel() else (0, -1)
    if first < 0 or last >= size:
        raise IndexError(f"index {first if first < 0 else last} is out of range for {size} rows")
    ranks = index.div(count, rounding_mode="floor")
    order = ranks.argsort(stable=True)
    counts = torch.bincount(ranks, minlength=line.size)
    every = counts.new_empty(line.size * line.size)
    line.backend(counts, "all_gather", every.nbytes).all_gather(every, counts).wait()
    places = (index - ranks * count)[order]
    return Routes(line, order, places, every.view(line.size, line.size).tolist())


def take(line: AxisGroup, value: torch.Tensor, index: torch.Tensor, count: int, size: int) -> Begun:
    """Begin to gather the rows of ``index``."""
    routes = routed(line, index, count, size)
    asked, work = routes.there(routes.places)
    work.wait()
    sent = value.index_select(0, asked)
    buffer, work = routes.back(sent)

    def unpack(buffer: torch.Tensor) -> list[torch.Tensor]:
        rows = buffer.view(len(index), *value.shape[1:])
        return [torch.empty_like(rows).index_copy_(0, routes.order, rows)]

    return Begun(buffer, work, sent, unpack)


def put(
    line: AxisGroup,
    value: torch.Tensor,
    index: torch.Tensor,
    given: torch.Tensor,
    count: int,
    size: int,
    added: bool,
) -> Begun:
    """Begin to put or add all ranks' rows into their owners' blocks."""
    routes = routed(line, index, count, size)
    places, work = routes.there(routes.places)
    work.wait()
    sent = given.index_select(0, routes.order)
    received, work = routes.there(sent)
    buffer = value.clone(memory_format=torch.contiguous_format).view(-1)

    def unpack(buffer: torch.Tensor) -> list[torch.Tensor]:
        block = buffer.view(value.shape)
        rows = received.view(len(places), *value.shape[1:])
        return [block.index_put_((places,), rows, accumulate=added)]

    return Begun(buffer, work, sent, unpack)
