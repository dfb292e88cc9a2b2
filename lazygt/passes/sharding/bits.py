"""Sets of labels as whole numbers: one bit for each P(op), S(dim) and interleaved label."""

from __future__ import annotations

from lazygt.graph.label import REDUCE_OPS, Interleaved, Label, Partial, Sharded

_FIRST = len(REDUCE_OPS)
#: The bits of all partial labels.
SUMS = (1 << _FIRST) - 1


def partial_bit(label: Label) -> int:
    """The bit of a partial label; 0 for any other."""
    return 1 << REDUCE_OPS.index(label.op) if isinstance(label, Partial) else 0


class Bits:
    """The bits of the labels that cut a dim.

    Dims have every second place; the others go to interleaved labels as they are met.

    Attributes:
        interleaved: the bits of all interleaved labels that were met.
    """

    def __init__(self) -> None:
        self._met: dict[Interleaved, int] = {}
        self.interleaved = 0

    def cut(self, label: Label) -> int:
        """The bit of a label that cuts a dim; 0 for any other."""
        if isinstance(label, Sharded):
            return 1 << _FIRST + 2 * label.dim
        return self._of(label) if isinstance(label, Interleaved) else 0

    def _of(self, label: Interleaved) -> int:
        bit = self._met.get(label)
        if bit is None:
            bit = self._met[label] = 1 << _FIRST + 2 * len(self._met) + 1
            self.interleaved |= bit
        return bit

    def found(self, mask: int) -> tuple[Interleaved, ...]:
        """The interleaved labels of a set."""
        return tuple([label for label, bit in self._met.items() if bit & mask])
