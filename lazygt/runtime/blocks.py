"""Where the ranks' blocks of a placed value lie in the whole value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lazygt.graph.label import Replicated, Sharded, shard_bounds
from lazygt.graph.mesh import Mesh, Placement
from lazygt.graph.meta import TensorMeta

Region = tuple[slice, ...]


def region(mesh: Mesh, placement: Placement, shape: Sequence[int], rank: int) -> Region:
    """What a rank has of a value of ``shape``: one slice a dim.

    A dim that several axes shard is cut by the first of them, its blocks by the next.
    """
    bounds = [(0, size) for size in shape]
    for axis, parts, label in zip(mesh.names, mesh.sizes, placement, strict=True):
        if isinstance(label, Sharded):
            start, stop = bounds[label.dim]
            first, last = shard_bounds(stop - start, parts, mesh.index(rank, axis))
            bounds[label.dim] = start + first, start + last
    return tuple([slice(start, stop) for start, stop in bounds])


def owners(mesh: Mesh, placement: Placement, shape: Sequence[int]) -> dict[int, Region]:
    """The ranks whose blocks make up the whole value, with their regions.

    Of ranks with the same block the first one stands here, and none with an empty block, except
    rank 0.
    """
    found = {}
    for rank in range(mesh.world_size):
        copies = [
            mesh.index(rank, axis)
            for axis, label in zip(mesh.names, placement, strict=True)
            if isinstance(label, Replicated)
        ]
        where = region(mesh, placement, shape, rank)
        if not any(copies) and (rank == 0 or all(s.stop > s.start for s in where)):
            found[rank] = where
    return found


def joined(
    meta: TensorMeta, regions: Mapping[int, Region], blocks: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The whole value on the CPU, laid out as ``meta`` says, of its owners' blocks."""
    whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
    for rank, where in regions.items():
        whole[where].copy_(blocks[rank])
    return whole
