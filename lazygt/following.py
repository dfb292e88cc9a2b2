"""What an optimizer keeps of a parameter lies as the parameter does.

A step makes it so. A checkpoint's state does not: it comes from the client, whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lazygt.opened import current_session
from lazygt.placing import is_everywhere, keep, stored_now
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
        and parameter._cell.placed is not None
        and parameter._cell.recorder is session.recorder
        for value in state.values()
        if _is_loaded(value, parameter)
    ]
    for value, parameter in pairs:
        keep(value, stored_now(parameter)._replace(pinned=False, unit=None))


def _is_loaded(value: Any, parameter: LazyTensor) -> bool:
    """Whether it has the parameter's shape, and is whole on every worker as nobody asked for."""
    return isinstance(value, LazyTensor) and value.shape == parameter.shape and is_everywhere(value)
