"""Rows that an index names, of a value whose rows are in blocks: taken from the ranks that have
them, or sent there.

What goes where only the index tells. So ranks tell each other first how many rows that is, and wait
for it; what is gathered is as little as a number for each two ranks.
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
    """An exchange under way: the buffer that stands for it, what is being sent, and the result from
    the buffer."""

    buffer: torch.Tensor
    work: Work
    sent: torch.Tensor
    unpack: Callable[[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where the rows of an index are.

    Attributes:
        order: the index's places, by the ranks that have their rows.
        places: the rows within their ranks' blocks, in that order.
        counts: rows for each pair of ranks: who names them, whose they are.
    """

    line: AxisGroup
    order: torch.Tensor
    places: torch.Tensor
    counts: Sequence[Sequence[int]]

    def there(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """What this rank has for the rows that it names, in ``order``, to those who have them."""
        named, wanted = self._counts()
        return self._exchanged(sent, named, wanted)

    def back(self, sent: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """What this rank has for those who named its rows, to them."""
        named, wanted = self._counts()
        return self._exchanged(sent, wanted, named)

    def _counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """How many rows of each rank this one names, and of this one's each rank."""
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
    """Where the rows of ``index`` are, told to all ranks.

    Raises:
        IndexError: a row that there is not.
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
    """The rows that ``index`` names."""
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
    """This rank's block, with all ranks' rows put or added where they belong."""
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
