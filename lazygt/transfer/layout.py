"""Layouts: the holders of a model's blocks, and the routes from one layout to others.

Pure functions of layouts: no tensors, no transport. Routes are cached by the layouts
(`route.cache_info()` has the counts).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh, Placements, has_any, region
from lazygt.graph.placement import Partial, Placement, Replicate, Shard
from lazygt.transfer.manifest import Manifest, ParamSpec, aligned
from lazygt.transfer.transfer_errors import TransferError

T = TypeVar("T")

#: A block within a tensor: (start, stop) of each dim.
Bounds = tuple[tuple[int, int], ...]

_KEPT = 16

PIECE_BYTES = 8 << 20
"""The longest run of bytes that one thread copies and checks.

Long, because threads that end a piece wait for the interpreter's lock: on two cores 4 MiB cost a
seventh of all the time. Copies with crc32 are cut further, to fit a core's cache.
"""


class ParamLayout(NamedTuple):
    """A parameter and its placements on the mesh that it comes from.

    Attributes:
        param: position in the manifest.
        itemsize: bytes of an element on the wire.
        blocks: block of each rank, if not given by placements; None: the rank has none.
    """

    param: int
    shape: tuple[int, ...]
    itemsize: int
    placements: Placements
    blocks: tuple[Bounds | None, ...] | None = None


class Route(NamedTuple):
    """One block to send from a rank to the receivers of a layout.

    Attributes:
        rank: the sending rank.
        layout: number of the receivers' layout.
        source: bounds within the rank's own block.
        target: bounds within that layout's block.
    """

    rank: int
    param: int
    layout: int
    source: Bounds
    target: Bounds
    nbytes: int


#: Routes that are copied and announced together.
Request = tuple[Route, ...]


def whole(shape: Sequence[int]) -> Bounds:
    """Return the bounds of a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Return the shape of a block."""
    return tuple(stop - start for start, stop in bounds)


def slices(bounds: Bounds) -> tuple[slice, ...]:
    """Return a block as an index."""
    return tuple(slice(start, stop) for start, stop in bounds)


def block(mesh: Mesh, placement: Placements, shape: Sequence[int], rank: int) -> Bounds:
    """Return a rank's block of a tensor of ``shape``."""
    return tuple((s.start, s.stop) for s in region(mesh, placement, shape, rank))


@lru_cache(maxsize=_KEPT)
def route(
    mesh: Mesh, params: tuple[ParamLayout, ...], layouts: tuple[tuple[Bounds, ...], ...]
) -> tuple[Route, ...]:
    """Route every byte of every layout from exactly one rank.

    Of the ranks with the same block, the one with the fewest bytes so far sends it.

    Args:
        layouts: for each layout of receivers the block of each parameter, by position.

    Raises:
        ValueError: a parameter is only a partial sum on its mesh.
    """
    load = [0] * mesh.world_size
    routes: list[Route] = []
    for param in params:
        copies = _copies(mesh, param)
        for number, blocks in enumerate(layouts):
            wanted = blocks[param.param]
            for have, ranks in copies.items():
                both = _intersection(have, wanted)
                nbytes = math.prod(shape_of(both)) * param.itemsize
                if not nbytes:
                    continue
                rank = min(ranks, key=load.__getitem__)
                load[rank] += nbytes
                source, target = _within(both, have), _within(both, wanted)
                routes.append(Route(rank, param.param, number, source, target, nbytes))
    return tuple(routes)


def cut(route: Route, most: int) -> Iterator[Route]:
    """Yield a route in pieces of at most ``most`` bytes each (at least one element)."""
    shape = shape_of(route.target)
    if route.nbytes <= most or math.prod(shape) == 1:
        yield route
        return
    dim = next(number for number, size in enumerate(shape) if size > 1)
    row = route.nbytes // shape[dim]
    step = max(most // row, 1)
    for begin in range(0, shape[dim], step):
        count = min(step, shape[dim] - begin)
        source = _narrow(route.source, dim, begin, count)
        target = _narrow(route.target, dim, begin, count)
        yield from cut(route._replace(source=source, target=target, nbytes=row * count), most)


class Batcher:
    """Batching of chunks of routes into requests, for a threshold of T bytes.

    - a chunk that would take the open request over T first closes it; exactly T still fits;
    - a chunk bigger than T goes alone, in as many requests as it needs, none over T;
    - a block bigger than T is cut;
    - there is no empty request;
    - T = 0: each chunk is one request, whatever its size.

    Args:
        piece: maximum bytes of a route; longer ones are cut.
        threshold: T.
        unit: a route's room in its request is rounded up to a multiple of so many bytes.
    """

    def __init__(self, piece: int, threshold: int, unit: int = 1) -> None:
        if 0 < threshold < unit:
            raise ValueError(f"a threshold of {threshold} bytes is below {unit}; use 0")
        self._limit, self._unit = threshold // unit * unit, unit
        self._most = min(piece, self._limit) if self._limit else piece
        self._open: list[Route] = []
        self._used = 0

    def add(self, chunk: Sequence[Route]) -> Iterator[Request]:
        """Add a chunk, and yield the requests that it completes."""
        size = sum(self._room(route.nbytes) for route in chunk)
        alone = not self._limit or size > self._limit
        if alone or self._used + size > self._limit:
            yield from self.flush()
        for route in chunk:
            if self._is_too_big(route.nbytes):
                yield from self.flush()
            for piece in cut(route, self._most):
                if self._is_too_big(piece.nbytes):
                    yield from self.flush()
                self._open.append(piece)
                self._used += self._room(piece.nbytes)
        if alone:
            yield from self.flush()

    def flush(self) -> Iterator[Request]:
        """Yield the open request, unless it is empty."""
        if self._open:
            request, self._open, self._used = tuple(self._open), [], 0
            yield request

    def _room(self, nbytes: int) -> int:
        return -(-nbytes // self._unit) * self._unit

    def _is_too_big(self, nbytes: int) -> bool:
        return bool(self._limit) and self._used + self._room(nbytes) > self._limit


def batched(routes: Iterable[Route], piece: int, threshold: int, unit: int = 1) -> list[Request]:
    """Return routes in requests, each route a chunk of its own; see `Batcher`."""
    batcher = Batcher(piece, threshold, unit)
    full = [request for route in routes for request in batcher.add((route,))]
    return [*full, *batcher.flush()]


def packed(request: Request) -> tuple[list[int], int]:
    """Return the aligned offset of each block in one buffer, and the buffer's bytes."""
    ends = list(itertools.accumulate((aligned(route.nbytes) for route in request), initial=0))
    return ends[:-1], ends[-1]


def interleave(lists: Iterable[Sequence[Request]]) -> list[Request]:
    """Return the items of several lists in round-robin order: first the first of each."""
    rows = itertools.zip_longest(*lists)
    return [request for row in rows for request in row if request is not None]


def _copies(mesh: Mesh, param: ParamLayout) -> dict[Bounds, list[int]]:
    """Return the different blocks of a parameter -> the ranks that have them."""
    if any(isinstance(placement, Partial) for placement in param.placements):
        raise ValueError(f"parameter {param.param} is a partial sum on the mesh {mesh}")
    copies: dict[Bounds, list[int]] = {}
    for rank, bounds in enumerate(param.blocks or ()):
        if bounds is not None:
            copies.setdefault(bounds, []).append(rank)
    for rank in range(0 if param.blocks else mesh.world_size):
        if has_any(mesh, param.placements, rank):
            copies.setdefault(block(mesh, param.placements, param.shape, rank), []).append(rank)
    return copies


def check_tiles(name: str, shape: Sequence[int], blocks: Sequence[Bounds | None]) -> None:
    """Raise TransferError unless the ranks' blocks tile a tensor: each element once.

    Ranks may have the same block.
    """
    different = {b for b in blocks if b is not None and _elements(b)}
    covered = sum([_elements(b) for b in different])
    overlap = any(_elements(_intersection(a, b)) for a, b in itertools.combinations(different, 2))
    if covered != math.prod(shape) or overlap:
        raise TransferError(
            f"parameter {name!r} of shape {list(shape)} is laid out on the trainer's ranks in a "
            f"way that lazygt does not know: each rank is to have one block of it; redistribute it"
        )


def _elements(bounds: Bounds) -> int:
    return math.prod(shape_of(bounds))


def _intersection(one: Bounds, other: Bounds) -> Bounds:
    pairs = zip(one, other, strict=True)
    starts_stops = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return tuple((start, max(start, stop)) for start, stop in starts_stops)


def _within(inner: Bounds, outer: Bounds) -> Bounds:
    """Return a block's bounds relative to the start of an enclosing block."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - base, stop - base) for (start, stop), (base, _) in pairs)


def _narrow(bounds: Bounds, dim: int, begin: int, count: int) -> Bounds:
    start = bounds[dim][0] + begin
    return (*bounds[:dim], (start, start + count), *bounds[dim + 1 :])


# -- receivers -----------------------------------------------------------------------------

#: For each mesh axis the dim that it shards; None: replicated along the axis.
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class ReceiverLayout:
    """One rank's blocks of a model that is laid out on a mesh of receivers.

    Attributes:
        placements: (name pattern, dims); the first that matches a name counts, without one the
            parameter is held whole.
    """

    mesh: Mesh
    rank: int
    placements: tuple[tuple[str, Dims], ...]

    @staticmethod
    def of(
        mesh: Mapping[str, int] | str,
        rank: int,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]],
    ) -> ReceiverLayout:
        """Build the layout of a user's arguments.

        Args:
            mesh: the receivers' grid: ``{"model": 2}`` or ``"model=2"``; not the trainer's.
            placements: name pattern -> torch placements, a list in the mesh's order or a dict by
                axis.

        Raises:
            ValueError: a rank or an axis that the mesh lacks, or another placement than
                ``TorchShard(dim)`` and ``TorchReplicate()``.
        """
        grid = Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh)
        if not 0 <= rank < grid.world_size:
            raise ValueError(f"rank {rank}: the mesh {grid} has ranks 0 to {grid.world_size - 1}")
        listed = tuple(
            (pattern, _dims(pattern, given, grid)) for pattern, given in placements.items()
        )
        return ReceiverLayout(grid, rank, listed)

    @staticmethod
    def asked(
        mesh: Mapping[str, int] | str | None,
        rank: int,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None,
    ) -> ReceiverLayout | None:
        """Build the layout of a receiver's arguments; None: whole parameters. See `of`."""
        if (mesh is None) != (placements is None):
            raise ValueError("a receiver that holds blocks needs both mesh= and placements=")
        return (
            None
            if mesh is None or placements is None
            else ReceiverLayout.of(mesh, rank, placements)
        )

    def blocks(self, manifest: Manifest) -> tuple[Bounds, ...]:
        """Return the block of each parameter, by position.

        Raises:
            ValueError: a pattern matches no parameter, a parameter lacks the dim, or two tied
                names would be held differently.
        """
        unused = {pattern for pattern, _ in self.placements}
        blocks: list[Bounds] = []
        for spec in manifest.params:
            fitting = next(
                (entry for entry in self.placements if fnmatchcase(spec.name, entry[0])), None
            )
            if fitting is None:
                blocks.append(whole(spec.shape))
            else:
                unused.discard(fitting[0])
                blocks.append(block(self.mesh, _labels(spec, fitting[1]), spec.shape, self.rank))
            if spec.alias_of and blocks[-1] != blocks[manifest.index[spec.alias_of]]:
                raise ValueError(
                    f"{spec.name} is tied to {spec.alias_of}, but the placements give it another "
                    f"block; give both the same"
                )
        if unused:
            raise ValueError(f"no parameter fits {min(unused)!r}")
        return tuple(blocks)

    @property
    def packed(self) -> list[Any]:
        """The layout in wire format."""
        return [str(self.mesh), self.rank, [[pattern, dims] for pattern, dims in self.placements]]

    @staticmethod
    def unpack(given: Any) -> ReceiverLayout | None:
        """Read the result of `packed`; None for None, a receiver of whole parameters.

        Raises:
            ProtocolError: the data is no layout.
        """
        if given is None:
            return None
        try:
            text, rank, listed = given
            mesh = Mesh.parse(text)
            placements = tuple((str(pattern), tuple(dims)) for pattern, dims in listed)
            fits = 0 <= rank < mesh.world_size and all(
                len(dims) == len(mesh.names) and all(d is None or type(d) is int for d in dims)
                for _, dims in placements
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"this is no layout: {error}") from error
        if not fits:
            raise ProtocolError(f"this is no layout: {given!r}")
        return ReceiverLayout(mesh, rank, placements)


def localized(manifest: Manifest, blocks: Sequence[Bounds]) -> Manifest:
    """Return the manifest of a layout's blocks: the same names, the blocks' shapes."""
    pairs = zip(manifest.params, blocks, strict=True)
    return Manifest(tuple(ParamSpec(s.name, s.dtype, shape_of(b), s.alias_of) for s, b in pairs))


class Layouts(NamedTuple):
    """Layouts of a transfer's receivers, and their places in shared memory.

    Attributes:
        blocks: for each different layout the block of each parameter.
        manifests: manifest of each layout, with its own shapes.
        bases: start of each layout's memory, in bytes.
        extent: bytes of all layouts' memory.
        of: receiver -> number of its layout.
    """

    blocks: tuple[tuple[Bounds, ...], ...]
    manifests: tuple[Manifest, ...]
    bases: tuple[int, ...]
    extent: int
    of: Mapping[Any, int]

    @staticmethod
    def build(manifest: Manifest, blocks_of: Mapping[Any, tuple[Bounds, ...]]) -> Layouts:
        """Build the layouts; receivers with the same blocks share one.

        Args:
            blocks_of: receiver -> the block of each parameter.
        """
        blocks = tuple(dict.fromkeys(blocks_of.values()))
        manifests = tuple(
            manifest if held == manifest.wholes else localized(manifest, held) for held in blocks
        )
        ends = list(itertools.accumulate((aligned(m.extent) for m in manifests), initial=0))
        of = {receiver: blocks.index(held) for receiver, held in blocks_of.items()}
        return Layouts(blocks, manifests, tuple(ends[:-1]), ends[-1], of)

    def holders(self, layout: int, receivers: Sequence[T]) -> list[T]:
        """Return the receivers that have this layout."""
        return [receiver for receiver in receivers if self.of[receiver] == layout]


def _dims(pattern: str, given: Sequence[Any] | Mapping[str, Any], mesh: Mesh) -> Dims:
    if isinstance(given, Mapping):
        unknown = [axis for axis in given if axis not in mesh.names]
        if unknown:
            raise ValueError(f"{pattern!r}: the mesh {mesh} has no axis {unknown[0]!r}")
        given = [given.get(axis) for axis in mesh.names]
    if len(given) != len(mesh.names):
        raise ValueError(
            f"{pattern!r}: {len(given)} placements, but the mesh {mesh} has {len(mesh.names)} axes"
        )
    return tuple(_dim(pattern, placement) for placement in given)


def _dim(pattern: str, placement: Any) -> int | None:
    # why: it takes 0.3 s to load, and a caller with such placements has loaded it
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    if placement is None or isinstance(placement, TorchReplicate):
        return None
    if type(placement) is TorchShard:
        return placement.dim
    raise ValueError(
        f"{pattern!r}: a receiver holds a parameter whole or in blocks, not as {placement!r}; use "
        f"Replicate() or Shard(dim)"
    )


def _labels(spec: ParamSpec, dims: Dims) -> tuple[Placement, ...]:
    rank = len(spec.shape)
    wrong = [dim for dim in dims if dim is not None and not -rank <= dim < rank]
    if wrong:
        raise ValueError(f"{spec.name} of shape {list(spec.shape)} has no dim {wrong[0]}")
    return tuple(Replicate() if dim is None else Shard(dim % rank) for dim in dims)
