"""Layouts: the owners of a model's blocks, and the routes from one layout to others.

Pure functions of layouts: no tensors, no transport. Routes are cached by the layouts
(`route.cache_info()` has the counts).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh, Placements, has_any, region
from lazygt.graph.placement import Partial, Placement, Replicate, Shard, as_placement
from lazygt.transfer.manifest import Manifest, ParamSpec, aligned

#: A block within a tensor: (start, stop) of each dim.
Bounds = tuple[tuple[int, int], ...]

_CACHED_ROUTES = 16

PIECE_BYTES = 8 << 20
"""Maximum bytes that one thread copies and checks at a time.

The limit is high because threads that end a piece wait for the interpreter's lock: on
two cores 4 MiB cost a seventh of all the time. Copies with crc32 are split further, to fit a core's
cache.
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


def full_bounds(shape: Sequence[int]) -> Bounds:
    """Return the bounds of a full tensor."""
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


@lru_cache(maxsize=_CACHED_ROUTES)
def route(
    mesh: Mesh,
    params: tuple[ParamLayout, ...],
    layouts: tuple[tuple[Bounds, ...], ...],
    limit: int = PIECE_BYTES,
) -> tuple[Route, ...]:
    """Route every byte of every layout from exactly one rank, balancing the load greedily.

    Among the ranks with the same block, the one with the fewest bytes so far sends the block.

    Args:
        layouts: for each layout of receivers the block of each parameter, by position.
        limit: maximum bytes of a route; longer ones are split.

    Raises:
        ValueError: a parameter is only a partial sum on its mesh.
    """
    load = [0] * mesh.world_size
    routes: list[Route] = []
    for param in params:
        owners = _owners_by_block(mesh, param)
        for layout, blocks in enumerate(layouts):
            target_block = blocks[param.param]
            for source_block, ranks in owners.items():
                overlap = intersection(source_block, target_block)
                nbytes = elements(overlap) * param.itemsize
                if not nbytes:
                    continue
                rank = min(ranks, key=load.__getitem__)
                load[rank] += nbytes
                source, target = _within(overlap, source_block), _within(overlap, target_block)
                full = Route(rank, param.param, layout, source, target, nbytes)
                routes += split_route(full, limit)
    return tuple(routes)


def split_route(route: Route, limit: int) -> Iterator[Route]:
    """Split a route along its first dims into pieces of at most ``limit`` bytes, or one element."""
    shape = shape_of(route.target)
    if route.nbytes <= limit or math.prod(shape) == 1:
        yield route
        return
    dim = next(dim for dim, extent in enumerate(shape) if extent > 1)
    slice_bytes = route.nbytes // shape[dim]
    step = max(limit // slice_bytes, 1)
    for begin in range(0, shape[dim], step):
        size = min(step, shape[dim] - begin)
        source = _narrow(route.source, dim, begin, size)
        target = _narrow(route.target, dim, begin, size)
        yield from split_route(
            route._replace(source=source, target=target, nbytes=slice_bytes * size), limit
        )


class Batcher:
    """Greedy batching of chunks of routes into requests, for a threshold of T bytes.

    - a chunk that would take the open request over T first closes it; exactly T still fits;
    - a chunk bigger than T goes alone, in as many requests as it needs, none over T;
    - there is no empty request;
    - T = 0: each chunk is one request, whatever its size.

    Args:
        threshold: T; no route is longer.
        unit: the space of a route in its request is rounded up to a multiple of so many bytes.
    """

    def __init__(self, threshold: int, unit: int = 1) -> None:
        if 0 < threshold < unit:
            raise ValueError(f"a threshold of {threshold} bytes is below {unit}; use 0")
        self._max_request, self._unit = threshold // unit * unit, unit
        self._pending: list[Route] = []
        self._pending_bytes = 0

    def add(self, chunk: Sequence[Route]) -> Iterator[Request]:
        """Add a chunk, and yield the requests that it completes."""
        sizes = [padded(route.nbytes, self._unit) for route in chunk]
        alone = not self._max_request or sum(sizes) > self._max_request
        if alone or self._pending_bytes + sum(sizes) > self._max_request:
            yield from self.flush()
        for route, size in zip(chunk, sizes, strict=True):
            if self._max_request and self._pending_bytes + size > self._max_request:
                yield from self.flush()
            self._pending.append(route)
            self._pending_bytes += size
        if alone:
            yield from self.flush()

    def flush(self) -> Iterator[Request]:
        """Yield the open request, unless it is empty."""
        if self._pending:
            request, self._pending, self._pending_bytes = tuple(self._pending), [], 0
            yield request


def padded(nbytes: int, unit: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


def packed(request: Sequence[Route]) -> tuple[list[int], int]:
    """Return the aligned offset of each block in one buffer, and the buffer's bytes."""
    ends = list(itertools.accumulate((aligned(route.nbytes) for route in request), initial=0))
    return ends[:-1], ends[-1]


def interleave(queues: Iterable[Sequence[Request]]) -> list[Request]:
    """Merge queues of requests in round-robin order."""
    rounds = itertools.zip_longest(*queues)
    return [request for round_ in rounds for request in round_ if request is not None]


def _owners_by_block(mesh: Mesh, param: ParamLayout) -> dict[Bounds, list[int]]:
    """Return the different blocks of a parameter, each with the ranks that own it."""
    if any(isinstance(placement, Partial) for placement in param.placements):
        raise ValueError(f"parameter {param.param} is a partial sum on the mesh {mesh}")
    owners: dict[Bounds, list[int]] = {}
    for rank, bounds in enumerate(param.blocks or ()):
        if bounds is not None:
            owners.setdefault(bounds, []).append(rank)
    for rank in range(0 if param.blocks else mesh.world_size):
        if has_any(mesh, param.placements, rank):
            owners.setdefault(block(mesh, param.placements, param.shape, rank), []).append(rank)
    return owners


def elements(bounds: Bounds) -> int:
    """Return the number of elements of a block."""
    return math.prod(shape_of(bounds))


def intersection(first: Bounds, second: Bounds) -> Bounds:
    """Return the overlap of two blocks; zero-sized dims where they do not meet."""
    pairs = zip(first, second, strict=True)
    bounds = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return tuple((start, max(start, stop)) for start, stop in bounds)


def _within(inner: Bounds, outer: Bounds) -> Bounds:
    """Return a block's bounds relative to the start of an enclosing block."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - base, stop - base) for (start, stop), (base, _) in pairs)


def _narrow(bounds: Bounds, dim: int, begin: int, count: int) -> Bounds:
    """Return ``count`` entries of a block along one dim, from ``begin`` on."""
    start = bounds[dim][0] + begin
    return (*bounds[:dim], (start, start + count), *bounds[dim + 1 :])


# -- receivers -----------------------------------------------------------------------------

#: For each mesh axis the dim that it shards; None: replicated along the axis.
Dims = tuple[int | None, ...]
#: A mesh and placements as users write them.
UserMesh = Mapping[str, int] | str
UserPlacements = Mapping[str, Sequence[Any] | Mapping[str, Any]]
_PackedLayout = tuple[str, int, tuple[tuple[str, Dims], ...]]


@dataclass(frozen=True)
class ReceiverLayout:
    """One rank's blocks of a model that is laid out on a mesh of receivers.

    Attributes:
        placements: (name pattern, dims); the first match of a name counts; a parameter
            without a match is not sharded.
    """

    mesh: Mesh
    rank: int
    placements: tuple[tuple[str, Dims], ...]

    @staticmethod
    def of(mesh: UserMesh, rank: int, placements: UserPlacements) -> ReceiverLayout:
        """Build the layout of a user's arguments.

        Args:
            mesh: the receivers' grid: ``{"model": 2}`` or ``"model=2"``; not the trainer's.
            placements: name pattern -> torch placements, a list in the mesh's order or a dict by
                axis.

        Raises:
            ValueError: a rank or an axis that the mesh lacks, or another placement than
                ``TorchShard(dim)`` and ``TorchReplicate()``.
        """
        parsed_mesh = Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh)
        if not 0 <= rank < parsed_mesh.world_size:
            raise ValueError(
                f"rank {rank}: the mesh {parsed_mesh} has ranks 0 to {parsed_mesh.world_size - 1}"
            )
        by_pattern = tuple(
            (pattern, _dims(pattern, by_axis, parsed_mesh))
            for pattern, by_axis in placements.items()
        )
        return ReceiverLayout(parsed_mesh, rank, by_pattern)

    @staticmethod
    def from_arguments(
        mesh: UserMesh | None, rank: int, placements: UserPlacements | None
    ) -> ReceiverLayout | None:
        """Build the layout of a receiver's arguments; None: full parameters. See `of`."""
        if mesh is not None and placements is not None:
            return ReceiverLayout.of(mesh, rank, placements)
        if mesh is not None or placements is not None:
            raise ValueError("a receiver that holds blocks needs both mesh= and placements=")
        return None

    def blocks(self, manifest: Manifest) -> tuple[Bounds, ...]:
        """Return the block of each parameter, by position.

        Raises:
            ValueError: a pattern matches no parameter, a parameter lacks the dim, or two tied
                names would be sharded differently.
        """
        unused = {pattern for pattern, _ in self.placements}
        blocks: list[Bounds] = []
        for spec in manifest.params:
            rule = next(
                (entry for entry in self.placements if fnmatchcase(spec.name, entry[0])), None
            )
            if rule is None:
                blocks.append(full_bounds(spec.shape))
            else:
                unused.discard(rule[0])
                blocks.append(block(self.mesh, _placements(spec, rule[1]), spec.shape, self.rank))
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
    def unpack(data: Any) -> ReceiverLayout | None:
        """Read the result of `packed`; None for None, a receiver of full parameters.

        Raises:
            ProtocolError: the data is no layout.
        """
        if data is None:
            return None
        try:
            text, rank, placements = msgspec.convert(data, _PackedLayout)
            mesh = Mesh.parse(text)
        except ValueError as error:
            raise ProtocolError(f"this is no layout: {error}") from error
        is_valid = 0 <= rank < mesh.world_size and all(
            len(dims) == len(mesh.names) for _, dims in placements
        )
        if not is_valid:
            raise ProtocolError(f"this is no layout: {data!r}")
        return ReceiverLayout(mesh, rank, placements)


def localized(manifest: Manifest, blocks: Sequence[Bounds]) -> Manifest:
    """Return the manifest of a layout's blocks: the same names, the blocks' shapes."""
    pairs = zip(manifest.params, blocks, strict=True)
    return Manifest(tuple(ParamSpec(s.name, s.dtype, shape_of(b), s.alias_of) for s, b in pairs))


class Layouts(NamedTuple):
    """Layouts of a transfer's receivers, and their offsets in shared memory.

    Attributes:
        blocks: for each distinct layout the block of each parameter.
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
            manifest if receiver_blocks == manifest.wholes else localized(manifest, receiver_blocks)
            for receiver_blocks in blocks
        )
        ends = list(itertools.accumulate((aligned(m.extent) for m in manifests), initial=0))
        of = {
            receiver: blocks.index(receiver_blocks)
            for receiver, receiver_blocks in blocks_of.items()
        }
        return Layouts(blocks, manifests, tuple(ends[:-1]), ends[-1], of)


def _dims(pattern: str, placements: Sequence[Any] | Mapping[str, Any], mesh: Mesh) -> Dims:
    """Return the sharded dim of each mesh axis, from placements in a list or by axis."""
    if isinstance(placements, Mapping):
        unknown = [axis for axis in placements if axis not in mesh.names]
        if unknown:
            raise ValueError(f"{pattern!r}: the mesh {mesh} has no axis {unknown[0]!r}")
        placements = [placements.get(axis) for axis in mesh.names]
    if len(placements) != len(mesh.names):
        raise ValueError(
            f"{pattern!r}: {len(placements)} placements, but the mesh {mesh} has "
            f"{len(mesh.names)} axes"
        )
    return tuple(_dim(pattern, placement) for placement in placements)


def _dim(pattern: str, placement: Any) -> int | None:
    """Return the dim of a ``Shard``; None for ``Replicate``."""
    with suppress(ValueError):
        known = Replicate() if placement is None else as_placement(placement)
        if not isinstance(known, Partial):
            return known.dim if isinstance(known, Shard) else None
    raise ValueError(
        f"{pattern!r}: a receiver holds a parameter whole or in blocks, not as {placement!r}; use "
        f"Replicate() or Shard(dim)"
    )


def _placements(spec: ParamSpec, dims: Dims) -> tuple[Placement, ...]:
    """Return a parameter's placements by mesh axis.

    Raises:
        ValueError: the parameter lacks a dim.
    """
    ndim = len(spec.shape)
    missing = [dim for dim in dims if dim is not None and not -ndim <= dim < ndim]
    if missing:
        raise ValueError(f"{spec.name} of shape {list(spec.shape)} has no dim {missing[0]}")
    return tuple(Replicate() if dim is None else Shard(dim % ndim) for dim in dims)
