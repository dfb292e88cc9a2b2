"""Optimizers' choice of formula: the one that eager torch takes on the workers' device.

torch has two of each optimizer: a loop over the parameters, and one of horizontal (foreach) ops. It
takes the loop on CPUs and foreach on accelerators, device ``lazygt`` among them, so that few ops
are recorded. Nearly all give the same bits either way. Those named here round differently, so on
CPU workers they loop, unless the user asks for foreach.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from lazygt.record.context import NAME, workers_device
from lazygt.record.patches import Patch
from lazygt.record.tensor import LazyTensor, is_lazy

#: Optimizer (name of its module and function) -> predicate: foreach rounds differently.
_ROUNDS_DIFFERENTLY: dict[str, Callable[[dict[str, Any]], bool]] = {
    "asgd": lambda arguments: True,
    "nadam": lambda arguments: True,
    "radam": lambda arguments: True,
    "adamax": lambda arguments: isinstance(arguments["lr"], torch.Tensor),
}


def register_optimizers() -> None:
    """Let optimizers and gradient clipping take foreach formulas, as on any accelerator."""
    for asked in (optimizer, _foreach_utils):
        asked._foreach_supported_types.append(LazyTensor)


def _choosing(
    update: Callable[..., None],
    differs: Callable[[dict[str, Any]], bool],
) -> Callable[..., None]:
    """Wrap an optimizer's function: it loops where foreach would round differently."""
    signature = inspect.signature(update)

    @functools.wraps(update)
    def chosen(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        arguments = given.arguments
        lazy = any(is_lazy(p) for p in arguments["params"])
        if lazy and arguments.get("foreach") is None and workers_device() == "cpu":
            arguments["foreach"] = False if differs(arguments) else None
        update(*given.args, **given.kwargs)

    return chosen


_everywhere: Any = swa_utils._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]


@functools.wraps(_everywhere)
def _averaging_devices() -> list[str]:
    """Return the devices on which ``AveragedModel`` (SWA) uses a horizontal lerp."""
    return [d for d in _everywhere() if d != NAME or workers_device() != "cpu"]


def _patch(name: str, differs: Callable[[dict[str, Any]], bool]) -> Patch:
    module = importlib.import_module(f"torch.optim.{name}")
    return Patch(module, name, _choosing(getattr(module, name), differs), _BITS)


_BITS = "on CPU workers the loop has eager torch's bits, and torch asks only for the device's type"
PATCHES = (
    *[_patch(name, differs) for name, differs in _ROUNDS_DIFFERENTLY.items()],
    Patch(swa_utils, "_get_foreach_kernels_supported_devices", _averaging_devices, _BITS),
)
