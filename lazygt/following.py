"""What an optimizer keeps of a parameter lies as the parameter does.

A step makes it so. A checkpoint's state does not: it comes from the client, whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lazygt.graph.label import Held, Replicated
from lazygt.graph.mesh import Stored
from lazygt.opened import current_session
from lazygt.pipeline import move
from lazygt.sharding import mesh_of, store, stored_now
from lazygt.tensor import LazyTensor


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
        and parameter._cell.placed
        and parameter._cell.recorder is session.recorder
        for value in state.values()
        if _is_loaded(value, parameter)
    ]
    if pairs:
        stored = stored_now(parameter for _, parameter in pairs)
        for (value, _), each in zip(pairs, stored, strict=True):
            _lay(value, each)


def _is_loaded(value: Any, parameter: LazyTensor) -> bool:
    """Whether it has the parameter's shape, and is whole on every worker as nobody asked for.

    A view of a larger tensor lies as that does.
    """
    if not isinstance(value, LazyTensor) or value.shape != parameter.shape:
        return False
    if value._view is not None:
        return False
    cell = value._cell
    return not cell.placed and cell.remote is not None and cell.remote.stored is None


def _lay(value: LazyTensor, stored: Stored) -> None:
    for axis, label in zip(mesh_of(value).names, stored.labels, strict=True):
        if isinstance(label, Held):
            move(value, label.rank, axis)
    if any(not isinstance(label, Held | Replicated) for label in stored.labels):
        store(value, stored._replace(pinned=False, unit=None))
    value._cell.placed = True
