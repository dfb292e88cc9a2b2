"""Where an optimizer's state lies: as its parameter does, or in blocks of its own (ZeRO).

A step leaves it where its parameter lies. A checkpoint's state comes from the client, whole, and
is stored as the parameter is at the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import Shard
from lazygt.parallel.fsdp import dim_to_shard
from lazygt.record.annotate import is_everywhere, restore_sharding, set_sharding, stored_now
from lazygt.record.context import current_session
from lazygt.record.tensor import LazyTensor
from lazygt.session import current


def shard_optimizer_state(
    optimizer: torch.optim.Optimizer, mesh_dim: str = "data"
) -> torch.optim.Optimizer:
    """Store what an optimizer keeps of each parameter in blocks along an axis (ZeRO-1 and 2).

    Parameters stay whole there. From the second step on gradients are reduced to blocks, each rank
    updates its block of every parameter, and the blocks are gathered. What is cut, and along which
    dim, is as in ``fully_shard``; on other axes the state lies as its parameter does.

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
            if not isinstance(parameter, LazyTensor):
                continue
            for t in state.values():
                if isinstance(t, LazyTensor) and t._view is None and t.shape == parameter.shape:
                    placed = t._storage.placed
                    if placed is None or not isinstance(placed.placements[at], Shard):
                        cut(t, stored_now(parameter))

    def cut(t: LazyTensor, home: Sharding) -> None:
        dim = dim_to_shard(tuple(t.shape), home.placements, at, parts)
        if dim is not None:
            placements = (*home.placements[:at], Shard(dim), *home.placements[at + 1 :])
            set_sharding(t, Sharding(placements, True))

    optimizer.register_step_post_hook(place)
    return optimizer


def register() -> None:
    """Have ``follow`` called before every step of every optimizer."""
    register_optimizer_step_pre_hook(follow)


def follow(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Store what was loaded of placed parameters as these are."""
    session = current_session()
    if session is None:
        return
    pairs = [
        (value, parameter)
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, LazyTensor)
        and parameter._storage.placed is not None
        and parameter._storage.owner is session.recorder
        for value in state.values()
        if _is_loaded(value, parameter)
    ]
    for value, parameter in pairs:
        restore_sharding(value, stored_now(parameter)._replace(pinned=False, unit=None))


def _is_loaded(value: Any, parameter: LazyTensor) -> bool:
    """Whether it has the parameter's shape, and is whole on every worker as nobody asked for."""
    return isinstance(value, LazyTensor) and value.shape == parameter.shape and is_everywhere(value)
