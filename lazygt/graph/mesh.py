"""Mesh: the workers as a grid with named axes.

Ranks run through the last axis fastest, and hosts have ranks one after another: inner axes lie
within a host first.

With ``invariant=`` an axis has a fixed number of virtual ranks, for any number of workers. The
program is placed and sharded for the virtual ranks; a worker computes for an equal number of
adjacent virtual ranks on each axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lazygt.config import mesh_axes
from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import Placement, Replicate, Shard, SingleRank, shard_bounds

#: Placements of a value on a mesh: one for each axis, in the mesh's order.
Placements = tuple[Placement, ...]


class FSDPUnit(NamedTuple):
    """FSDP unit: parameters stored in blocks along an axis and gathered together for use."""

    name: str  # of the module that the parameters belong to
    axis: str  # of the mesh
    cap_bytes: int | None  # bytes gathered, or reduced, at once; None: as everywhere in the session
    #: the backward gathers again the parameters that the forward used
    reshard_after_forward: bool = True
    limit_all_gathers: bool = True  # at most two gathers are under way at a time, and one reduction


class Sharding(NamedTuple):
    """Placement of a value between two runs."""

    placements: Placements
    #: a *fixed* placement: ops use the value with it, and it is never resharded for speed
    fixed: bool = False
    #: the value is gathered along the unit's axis before use, even if its placement is fixed
    unit: FSDPUnit | None = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """Grid of ranks with named axes."""

    names: tuple[str, ...]  # of the axes, outermost first
    sizes: tuple[int, ...]  # ranks along each axis

    @staticmethod
    def of(axes: Mapping[str, Any]) -> Mesh:
        """Return the mesh with these axes.

        Raises:
            ValueError: an axis without a name, or with less than one rank.
        """
        for name, size in axes.items():
            if not name.isidentifier():
                raise ValueError(f"mesh axis {name!r}: expected a name such as 'data'")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh axis {name!r} of size {size!r}: expected an integer >= 1")
        return Mesh(tuple(axes), tuple(axes.values()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Return the mesh that a text such as ``data=2,model=4`` names.

        Raises:
            ValueError: for any other text.
        """
        return Mesh.of(mesh_axes(text))

    def __getitem__(self, axis: str) -> Mesh:
        """Return one axis as a mesh, as ``DeviceMesh`` is sliced.

        Raises:
            ValueError: there is no such axis.
        """
        return Mesh((axis,), (self.size(axis),))

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis.

        Raises:
            ValueError: there is no such axis.
        """
        if axis not in self.names:
            raise ValueError(f"the mesh {self} has no axis {axis!r}")
        return self.sizes[self.names.index(axis)]

    def index(self, rank: int, axis: str) -> int:
        """Return a rank's coordinate along an axis."""
        inner = math.prod(self.sizes[self.names.index(axis) + 1 :])
        return rank // inner % self.size(axis)

    def axis_groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks along one axis, in its order; the same list on every rank.

        The ranks of a group differ in their coordinate on this axis only.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            others = tuple(self.index(rank, name) for name in self.names if name != axis)
            groups.setdefault(others, []).append(rank)
        return [tuple(group) for group in groups.values()]


# -- virtual ranks ---------------------------------------------------------------------------------

#: Default number of virtual ranks: of every axis with ``invariant=True``.
USUAL = 4


@dataclass(frozen=True, slots=True)
class VirtualMesh:
    """Virtual ranks, and the workers that compute for them; both grids have the same axes."""

    workers: Mesh  # the grid of workers
    ranks: Mesh  # the grid of virtual ranks

    @staticmethod
    def of(workers: Mesh, invariant: bool | int | Mapping[str, int] | None) -> VirtualMesh:
        """Return the virtual mesh of ``lazygt.session(invariant=...)``.

        Args:
            invariant: number of virtual ranks of every axis, or by axis name (an axis without an
                entry has one for each worker); True: ``USUAL``; None or False: one a worker.

        Raises:
            ValueError: an axis that the mesh does not have, or workers that can't share the
                virtual ranks of an axis evenly.
        """
        if invariant is None or invariant is False:
            return VirtualMesh(workers, workers)
        named = invariant if isinstance(invariant, Mapping) else {}
        unknown = [name for name in named if name not in workers.names]
        if unknown:
            raise ValueError(
                f"lazygt.session(invariant={invariant!r}): the mesh {workers} has no axis "
                f"{unknown[0]!r}"
            )
        sizes = {
            name: _ranks_of(name, size, invariant)
            for name, size in zip(workers.names, workers.sizes, strict=True)
        }
        return VirtualMesh(workers, Mesh.of(sizes))

    def per_worker(self, axis: str) -> int:
        """Return the number of virtual ranks of a worker along an axis."""
        return self.ranks.size(axis) // self.workers.size(axis)

    def worker(self, rank: int) -> int:
        """Return the worker that computes for a virtual rank."""
        worker = 0
        for axis, size in zip(self.workers.names, self.workers.sizes, strict=True):
            worker = worker * size + self.ranks.index(rank, axis) // self.per_worker(axis)
        return worker

    def of_worker(self, worker: int) -> tuple[int, ...]:
        """Return the virtual ranks of a worker, in order."""
        ranges = []
        for axis in self.workers.names:
            first = self.workers.index(worker, axis) * self.per_worker(axis)
            ranges.append(range(first, first + self.per_worker(axis)))
        return tuple([self._rank(coordinates) for coordinates in itertools.product(*ranges)])

    def holder(self, rank: int, placements: Placements) -> int:
        """Return the first virtual rank of the same worker that has the same block."""
        coordinates = []
        for axis, placement in zip(self.ranks.names, placements, strict=True):
            index = self.ranks.index(rank, axis)
            first = index if isinstance(placement, Shard) else index - index % self.per_worker(axis)
            coordinates.append(first)
        return self._rank(tuple(coordinates))

    def holders(self, worker: int, placements: Placements) -> tuple[int, ...]:
        """Return a worker's virtual ranks, one for each distinct block, in order."""
        return tuple(r for r in self.of_worker(worker) if self.holder(r, placements) == r)

    def slots(self, shardings: Sequence[Sharding | None]) -> tuple[range, ...]:
        """Return, for each value, the numbers of a worker's blocks, numbered value after value.

        Args:
            shardings: of each value on the virtual ranks; None: not sharded.
        """
        counts = [
            1 if sharding is None else len(self.holders(0, sharding.placements))
            for sharding in shardings
        ]
        stops = list(itertools.accumulate(counts))
        return tuple([range(stop - n, stop) for stop, n in zip(stops, counts, strict=True)])

    def __str__(self) -> str:
        return f"{self.ranks} on {self.workers}"

    def _rank(self, coordinates: tuple[int, ...]) -> int:
        """Return the virtual rank with these coordinates (row-major index)."""
        rank = 0
        for size, index in zip(self.ranks.sizes, coordinates, strict=True):
            rank = rank * size + index
        return rank


def _ranks_of(axis: str, workers: int, invariant: bool | int | Mapping[str, int]) -> int:
    """Return the number of virtual ranks of one axis."""
    if isinstance(invariant, Mapping):
        count = invariant.get(axis, workers)
    else:
        count = USUAL if invariant is True else invariant
    if type(count) is not int or count < 1 or count % workers:
        raise ValueError(
            f"lazygt.session(invariant={invariant!r}): {workers} workers on axis {axis!r} can't "
            f"share {count!r} virtual ranks evenly; take a multiple of {workers}, the same for "
            f"every number of workers that shall give the same numbers"
        )
    return count


# -- regions of blocks -----------------------------------------------------------------------------

Region = tuple[slice, ...]


def region(mesh: Mesh, placements: Placements, shape: Sequence[int], rank: int) -> Region:
    """Return a rank's region of a value of ``shape``: one slice a dim; meaningless if it has none.

    A dim that several axes shard is split by the first of them, its blocks by the next.
    """
    bounds = [(0, size) for size in shape]
    for axis, axis_size, placement in zip(mesh.names, mesh.sizes, placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            first, last = shard_bounds(stop - start, axis_size, mesh.index(rank, axis))
            bounds[placement.dim] = start + first, start + last
    return tuple([slice(start, stop) for start, stop in bounds])


def owners(mesh: Mesh, placements: Placements, shape: Sequence[int]) -> dict[int, Region]:
    """Return the ranks whose blocks make up the full value, with their regions.

    Of ranks with the same block only the first counts, and none with an empty block, except the
    first rank that has any.
    """
    regions: dict[int, Region] = {}
    for rank in range(mesh.world_size):
        replica_indices = [
            mesh.index(rank, axis)
            for axis, placement in zip(mesh.names, placements, strict=True)
            if isinstance(placement, Replicate)
        ]
        if any(replica_indices) or not has_any(mesh, placements, rank):
            continue
        rank_region = region(mesh, placements, shape, rank)
        if not regions or all(s.stop > s.start for s in rank_region):
            regions[rank] = rank_region
    return regions


def has_any(mesh: Mesh, placements: Placements, rank: int) -> bool:
    """Return whether a rank has a block of a value, even an empty one."""
    return all(
        placement.rank == mesh.index(rank, axis)
        for axis, placement in zip(mesh.names, placements, strict=True)
        if isinstance(placement, SingleRank)
    )


def regions_by_worker(
    mesh: VirtualMesh, placements: Placements, shape: Sequence[int]
) -> dict[int, tuple[Region, ...]]:
    """Return the workers that have the full value together, with the regions of their blocks."""
    workers = dict.fromkeys(map(mesh.worker, owners(mesh.ranks, placements, shape)))
    return {
        worker: tuple([region(mesh.ranks, placements, shape, rank)
                       for rank in mesh.holders(worker, placements)])
        for worker in workers
    }  # fmt: skip


def joined(meta: TensorMeta, blocks: Iterable[tuple[Region, torch.Tensor]]) -> torch.Tensor:
    """Return the full value on the CPU, in the layout of ``meta``, assembled from its blocks."""
    full = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
    for block_region, block in blocks:
        full[block_region].copy_(block)
    return full
