"""Neighbours' rows: what a rank needs besides its own block of a cut dim.

Slices that move blocks a little, rolls, and convolutions along a cut dim read a few rows of the
blocks next to a rank's own. All ranks put such rows together, each as many, and take theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Ref
from lazygt.graph.placement import block_size, shard_bounds
from lazygt.passes.sharding.rules.base import Collective

if TYPE_CHECKING:
    from lazygt.graph.meta import TensorMeta
    from lazygt.passes.sharding.builder import Builder

#: Rows of a dim, from the first to before the last.
Rows = tuple[int, int]


class Halo(NamedTuple):
    """How many rows every rank gives to the next rank, and to the one before it."""

    dim: int
    before: int
    after: int

    @property
    def rows(self) -> int:
        """What every rank gives."""
        return self.before + self.after

    def comm(self, meta: TensorMeta, parts: int) -> list[Collective]:
        """What ranks exchange of a value with this halo."""
        if not self.rows:
            return []
        row = meta.nbytes // meta.shape[self.dim]
        return [Collective("all_gather", row * self.rows * parts)]


def halo_of(size: int, dim: int, wanted: Sequence[Rows]) -> Halo | None:
    """What ranks need of their neighbours; None where blocks next to their own don't have it.

    Args:
        size: of the dim.
        wanted: the rows that each rank needs.
    """
    parts = len(wanted)
    before = after = 0
    for rank, (first, last) in enumerate(wanted):
        if first < last:
            start, stop = shard_bounds(size, parts, rank)
            before, after = max(before, start - first), max(after, last - stop)
    smallest = min(block_size(size, parts, rank) for rank in range(parts))
    return Halo(dim, before, after) if max(before, after) <= smallest else None


def widened(build: Builder, value: Ref, halo: Halo, around: bool = False) -> tuple[Ref, int]:
    """A rank's block with the rows before and behind it; and how many are before.

    Args:
        around: the last rank's block lies before the first one's.
    """
    if not halo.rows:
        return value, 0
    dim, size = halo.dim, build.shape(value)[halo.dim]
    head = build.op("aten.slice.Tensor", value, dim, 0, halo.after)
    tail = build.op("aten.slice.Tensor", value, dim, size - halo.before, size)
    edges = build.op("aten.cat.default", (head, tail), dim)
    every = build.all_gather(edges, dim, halo.rows * build.parts)
    rank, last = build.index, build.parts - 1
    pieces = [value]
    has_before = bool(halo.before) and (around or rank > 0)
    if has_before:
        start = (rank - 1) % build.parts * halo.rows + halo.after
        pieces.insert(0, build.op("aten.slice.Tensor", every, dim, start, start + halo.before))
    if halo.after and (around or rank < last):
        start = (rank + 1) % build.parts * halo.rows
        pieces.append(build.op("aten.slice.Tensor", every, dim, start, start + halo.after))
    wide: Ref = build.op("aten.cat.default", tuple(pieces), dim)
    return wide, halo.before if has_before else 0


def rows_of(build: Builder, value: Ref, halo: Halo, size: int, wanted: Rows) -> Ref:
    """The rows that a rank needs, of a dim of ``size``: its own and its neighbours'."""
    wide, before = widened(build, value, halo)
    first = build.rank_offset(size) - before
    start = max(wanted[0] - first, 0)
    stop = max(wanted[1] - first, start)
    rows: Ref = build.op("aten.slice.Tensor", wide, halo.dim, start, stop)
    return rows


def added_back(build: Builder, wide: Ref, halo: Halo, before: int, size: int) -> Ref:
    """A rank's block of a sum of what every rank has for its own block and the rows around it.

    Args:
        wide: with the rows before and behind the block, as ``widened`` gave them.
        before: how many are before.
        size: of the rank's block.
    """
    dim, rank, last = halo.dim, build.index, build.parts - 1
    block: Ref = build.op("aten.slice.Tensor", wide, dim, before, before + size)
    if not halo.rows:
        return block
    front = build.op("aten.slice.Tensor", wide, dim, 0, before)
    behind = build.op("aten.slice.Tensor", wide, dim, before + size, before + size + halo.after)
    if not before:
        front = _nothing(build, wide, dim, halo.before)
    if rank == last:
        behind = _nothing(build, wide, dim, halo.after)
    edges = build.op("aten.cat.default", (front, behind), dim)
    every = build.all_gather(edges, dim, halo.rows * build.parts)
    if rank < last and halo.before:  # the next rank's front rows are this one's last
        start = (rank + 1) * halo.rows
        more = build.op("aten.slice.Tensor", every, dim, start, start + halo.before)
        block = build.op("aten.add.Tensor", block, _among(build, more, dim, size - halo.before, 0))
    if rank > 0 and halo.after:
        start = (rank - 1) * halo.rows + halo.before
        more = build.op("aten.slice.Tensor", every, dim, start, start + halo.after)
        block = build.op("aten.add.Tensor", block, _among(build, more, dim, 0, size - halo.after))
    return block


def _nothing(build: Builder, like: Ref, dim: int, rows: int) -> Ref:
    shape = list(build.shape(like))
    shape[dim] = rows
    return build.full(shape, 0, like=like)


def _among(build: Builder, value: Ref, dim: int, before: int, after: int) -> Ref:
    """Rows among zeros."""
    rest = [0, 0] * (len(build.shape(value)) - 1 - dim)
    padded: Ref = build.op("aten.constant_pad_nd.default", value, (*rest, before, after), 0)
    return padded
