"""Routes: which process writes what, from one layout of the parameters to others.

Pure: layouts in, moves out. No tensor, no transport. The moves of the same layouts are found once
and kept (`moves.cache_info()` tells how often).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from lazygt.graph.mesh import Mesh, Placements
from lazygt.graph.placement import Partial
from lazygt.graph.regions import has_any, region
from lazygt.transfer.spec import aligned

#: A block within a tensor: (start, stop) of each dim.
Bounds = tuple[tuple[int, int], ...]

_KEPT = 16


class Part(NamedTuple):
    """A parameter and how it lies on the mesh that it comes from.

    Attributes:
        param: its position in the manifest.
        itemsize: bytes of an element, as it travels.
    """

    param: int
    shape: tuple[int, ...]
    itemsize: int
    placement: Placements


class Move(NamedTuple):
    """One block on its way.

    Attributes:
        rank: who writes it.
        holding: which of the target layouts it belongs to.
        source: where it lies within the rank's own block.
        target: where it belongs within the holding's block.
    """

    rank: int
    param: int
    holding: int
    source: Bounds
    target: Bounds
    nbytes: int


#: What is written together.
Moves = tuple[Move, ...]


def whole(shape: Sequence[int]) -> Bounds:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in bounds)


def slices(bounds: Bounds) -> tuple[slice, ...]:
    """A block as an index."""
    return tuple(slice(start, stop) for start, stop in bounds)


def block(mesh: Mesh, placement: Placements, shape: Sequence[int], rank: int) -> Bounds:
    """What a rank has of a tensor of ``shape``."""
    return tuple((s.start, s.stop) for s in region(mesh, placement, shape, rank))


@lru_cache(maxsize=_KEPT)
def moves(mesh: Mesh, parts: tuple[Part, ...], holdings: tuple[tuple[Bounds, ...], ...]) -> Moves:
    """How every byte of every holding comes from exactly one rank.

    Of ranks that have the same block, the one with the fewest bytes so far sends it.

    Args:
        holdings: for each target layout the block of each parameter, by position.

    Raises:
        ValueError: a part is only a partial sum on its mesh.
    """
    load = [0] * mesh.world_size
    found: list[Move] = []
    for part in parts:
        copies = _copies(mesh, part)
        for number, blocks in enumerate(holdings):
            wanted = blocks[part.param]
            for have, ranks in copies.items():
                both = _intersection(have, wanted)
                nbytes = math.prod(shape_of(both)) * part.itemsize
                if not nbytes:
                    continue
                rank = min(ranks, key=load.__getitem__)
                load[rank] += nbytes
                source, target = _within(both, have), _within(both, wanted)
                found.append(Move(rank, part.param, number, source, target, nbytes))
    return tuple(found)


def cut(move: Move, most: int) -> Iterator[Move]:
    """The same bytes in moves of at most ``most`` bytes each (at least one element)."""
    shape = shape_of(move.target)
    if move.nbytes <= most or math.prod(shape) == 1:
        yield move
        return
    dim = next(number for number, size in enumerate(shape) if size > 1)
    row = move.nbytes // shape[dim]
    step = max(most // row, 1)
    for begin in range(0, shape[dim], step):
        count = min(step, shape[dim] - begin)
        source = _narrow(move.source, dim, begin, count)
        target = _narrow(move.target, dim, begin, count)
        yield from cut(move._replace(source=source, target=target, nbytes=row * count), most)


def batched(found: Iterable[Move], piece: int, request: int, unit: int = 1) -> Iterator[Moves]:
    """Moves in requests of at most ``request`` bytes, cut into pieces; one rank's, in order.

    Args:
        request: 0: one request a move.
        unit: every piece takes a multiple of so many bytes of its request.
    """
    most = min(piece, request) if request else piece
    gathered: list[Move] = []
    used = 0
    for move in found:
        for small in cut(move, most):
            room = -(-small.nbytes // unit) * unit
            if gathered and request and used + room > request:
                yield tuple(gathered)
                gathered, used = [], 0
            gathered.append(small)
            used += room
        if not request:
            yield tuple(gathered)
            gathered, used = [], 0
    if gathered:
        yield tuple(gathered)


def packed(request: Moves) -> tuple[list[int], int]:
    """Where each block begins in one buffer, each aligned, and the bytes of all of it."""
    ends = list(itertools.accumulate((aligned(move.nbytes) for move in request), initial=0))
    return ends[:-1], ends[-1]


def in_turns(lists: Iterable[Sequence[Moves]]) -> list[Moves]:
    """The items of several lists: the first of each, then the second of each, and so on."""
    rows = itertools.zip_longest(*lists)
    return [each for row in rows for each in row if each is not None]


def _copies(mesh: Mesh, part: Part) -> dict[Bounds, list[int]]:
    """The blocks that there are of a parameter -> the ranks that have them."""
    if any(isinstance(label, Partial) for label in part.placement):
        raise ValueError(f"parameter {part.param} is a partial sum on the mesh {mesh}")
    found: dict[Bounds, list[int]] = {}
    for rank in range(mesh.world_size):
        if has_any(mesh, part.placement, rank):
            found.setdefault(block(mesh, part.placement, part.shape, rank), []).append(rank)
    return found


def _intersection(one: Bounds, other: Bounds) -> Bounds:
    pairs = zip(one, other, strict=True)
    starts_stops = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return tuple((start, max(start, stop)) for start, stop in starts_stops)


def _within(inner: Bounds, outer: Bounds) -> Bounds:
    """A block, counted from the beginning of another one that it lies in."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - base, stop - base) for (start, stop), (base, _) in pairs)


def _narrow(bounds: Bounds, dim: int, begin: int, count: int) -> Bounds:
    start = bounds[dim][0] + begin
    return (*bounds[:dim], (start, start + count), *bounds[dim + 1 :])
