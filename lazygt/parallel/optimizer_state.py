"""Placement of an optimizer's state: its parameter's, or blocks of its own (ZeRO).

A step leaves the state where its parameter lies. A checkpoint's state comes from the client, whole,
and is stored as the parameter is at the next step.
"""

from __future__ import annotations

from typing import Any

import torch

from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import Shard
from lazygt.parallel.fsdp import dim_to_shard
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.record.tensor import LazyTensor, is_lazy, storage_of, view_of
from lazygt.session import current


def shard_optimizer_state(
    optimizer: torch.optim.Optimizer, mesh_dim: str = "data"
) -> torch.optim.Optimizer:
    """Store an optimizer's state of each parameter in blocks along an axis (ZeRO-1 and 2).

    Parameters stay whole there. From the second step on gradients are reduced to blocks, each rank
    updates its block of every parameter, and the blocks are gathered. The choice of the dim to cut
    is that of ``fully_shard``; on other axes the state lies as its parameter does.

    Returns:
        The optimizer.

    Raises:
        ValueError: the mesh has no such axis.
    """
    mesh = current().mesh
    parts = mesh.size(mesh_dim)
    at = mesh.names.index(mesh_dim)

    def place(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            if not is_lazy(parameter):
                continue
            for t in state.values():
                if is_lazy(t) and view_of(t) is None and t.shape == parameter.shape:
                    placed = storage_of(t).placed
                    if placed is None or not isinstance(placed.placements[at], Shard):
                        cut(t, stored_now(parameter))

    def cut(t: LazyTensor, home: Sharding) -> None:
        dim = dim_to_shard(tuple(t.shape), home.placements, at, parts)
        if dim is not None:
            placements = (*home.placements[:at], Shard(dim), *home.placements[at + 1 :])
            set_sharding(t, Sharding(placements, True))

    optimizer.register_step_post_hook(place)
    return optimizer
