"""How values that travel in one collective lie in its flat buffer.

Every value has a slot. A slot has the same length on every rank of the axis, although blocks may
not: it has room for the largest block, the first. Slots begin at multiples of ``ALIGN`` bytes,
as kernels like it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lazygt.graph.label import block_size

#: Bytes.
ALIGN = 64


class Slots(NamedTuple):
    """Elements: where each slot starts, how long its value is, and all slots together."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    total: int


def slots(
    kind: str,
    shapes: Sequence[Sequence[int]],
    moves: Sequence[Sequence[int]],
    parts: int,
    itemsize: int,
) -> Slots:
    """The slots of one rank's values.

    Args:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        shapes: of the operands.
        moves: see ``graph.label``; not read for an all-reduce.
        parts: ranks on the axis.
        itemsize: bytes of an element.
    """
    if kind == "all_reduce":
        lengths = tuple([math.prod(shape) for shape in shapes])
    else:
        lengths = tuple([
            _block(shape, move, parts) for shape, move in zip(shapes, moves, strict=True)
        ])  # fmt: skip
    if len(lengths) == 1:
        return Slots((0,), lengths, lengths[0])
    step = max(ALIGN // itemsize, 1)
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += -(-length // step) * step
    return Slots(tuple(starts), lengths, total)


def buffer_length(kind: str, parts: int, total: int) -> int:
    """Elements of the buffer that a launch receives into."""
    return parts * total if kind == "all_gather" else total


def _block(shape: Sequence[int], move: Sequence[int], parts: int) -> int:
    """Elements of the largest block of a value that is gathered or scattered along a dim."""
    dim, *size = move
    rest = math.prod([each for place, each in enumerate(shape) if place != dim])
    return rest * block_size(size[0] if size else shape[dim], parts, 0)
