"""Sets of placements as bit masks: a bit for each P(op), S(dim) and interleaved placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import REDUCE_OPS, Partial, Placement, Shard, StridedShard

_FIRST = len(REDUCE_OPS)
#: The bits of all partial placements.
SUMS = (1 << _FIRST) - 1


def partial_bit(placement: Placement) -> int:
    """Return the bit of a partial placement; 0 for any other."""
    return 1 << REDUCE_OPS.index(placement.op) if isinstance(placement, Partial) else 0


class Bits:
    """Bits of the placements that cut a dim.

    Dims have every second place; the others go to interleaved placements as they are met.

    Attributes:
        interleaved: the bits of all interleaved placements that were met.
    """

    def __init__(self) -> None:
        self._met: dict[StridedShard, int] = {}
        self.interleaved = 0

    def cut(self, placement: Placement) -> int:
        """Return the bit of a placement that cuts a dim; 0 for any other."""
        if isinstance(placement, Shard):
            return 1 << _FIRST + 2 * placement.dim
        return self._of(placement) if isinstance(placement, StridedShard) else 0

    def any(self, placement: Placement) -> int:
        """Return the bit of a placement; 0 for ``Replicate()``."""
        return partial_bit(placement) | self.cut(placement)

    def _of(self, placement: StridedShard) -> int:
        bit = self._met.get(placement)
        if bit is None:
            bit = self._met[placement] = 1 << _FIRST + 2 * len(self._met) + 1
            self.interleaved |= bit
        return bit

    def found(self, mask: int) -> tuple[StridedShard, ...]:
        """Return the interleaved placements of a set."""
        return tuple([placement for placement, bit in self._met.items() if bit & mask])


def union(
    strategies: Sequence[Sequence[Placement]], places: int, bit: Callable[[Placement], int]
) -> list[int]:
    """Return the mask of the placements at each place, over all strategies."""
    return [
        reduce(or_, [bit(placements[place]) for placements in strategies], 0)
        for place in range(places)
    ]


def same_blocks(
    bits: Bits,
    operands: Sequence[TensorMeta | None],
    masks: Sequence[int],
    result: TensorMeta | None,
) -> int:
    """Return the blocks of operands that a result can have as well: of dims of equal size."""
    mask = 0
    for operand, blocks in zip(operands, masks, strict=True):
        if operand is None or result is None:
            continue
        for dim, (size, other) in enumerate(zip(operand.shape, result.shape, strict=False)):
            if size == other:
                mask |= blocks & bits.cut(Shard(dim))
    return mask
