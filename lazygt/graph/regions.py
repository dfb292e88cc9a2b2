"""Regions of the ranks' blocks in the whole of a placed value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lazygt.graph.mesh import Mesh, Placements, VirtualMesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import Replicate, Shard, SingleRank, shard_bounds

Region = tuple[slice, ...]


def region(mesh: Mesh, placements: Placements, shape: Sequence[int], rank: int) -> Region:
    """Return a rank's region of a value of ``shape``, if it has any: one slice a dim.

    A dim that several axes shard is cut by the first of them, its blocks by the next.
    """
    bounds = [(0, size) for size in shape]
    for axis, parts, placement in zip(mesh.names, mesh.sizes, placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds[placement.dim]
            first, last = shard_bounds(stop - start, parts, mesh.index(rank, axis))
            bounds[placement.dim] = start + first, start + last
    return tuple([slice(start, stop) for start, stop in bounds])


def owners(mesh: Mesh, placements: Placements, shape: Sequence[int]) -> dict[int, Region]:
    """Return the ranks with blocks that make up the whole value, with their regions.

    Of ranks with the same block the first one stands here, and none with an empty block, except
    the first rank that has any.
    """
    regions: dict[int, Region] = {}
    for rank in range(mesh.world_size):
        copies = [
            mesh.index(rank, axis)
            for axis, placement in zip(mesh.names, placements, strict=True)
            if isinstance(placement, Replicate)
        ]
        if any(copies) or not has_any(mesh, placements, rank):
            continue
        where = region(mesh, placements, shape, rank)
        if not regions or all(s.stop > s.start for s in where):
            regions[rank] = where
    return regions


def has_any(mesh: Mesh, placements: Placements, rank: int) -> bool:
    """Return whether a rank has a block of a value, even an empty one."""
    return all(
        placement.rank == mesh.index(rank, axis)
        for axis, placement in zip(mesh.names, placements, strict=True)
        if isinstance(placement, SingleRank)
    )


def sent(
    mesh: VirtualMesh, placements: Placements, shape: Sequence[int]
) -> dict[int, tuple[Region, ...]]:
    """Return the workers that hold the whole value together, with the regions of their blocks."""
    workers = dict.fromkeys(map(mesh.worker, owners(mesh.ranks, placements, shape)))
    return {
        worker: tuple([region(mesh.ranks, placements, shape, rank)
                       for rank in mesh.holders(worker, placements)])
        for worker in workers
    }  # fmt: skip


def joined(meta: TensorMeta, blocks: Iterable[tuple[Region, torch.Tensor]]) -> torch.Tensor:
    """Return the whole value on the CPU, laid out as ``meta`` says, from its blocks."""
    whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
    for where, block in blocks:
        whole[where].copy_(block)
    return whole
