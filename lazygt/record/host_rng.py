"""The client's side of the random stream: what draws or asks on the CPU while a session is open.

Kernels that draw on CPU tensors are wrapped for as long as a session with CPU workers is open: each
first brings the state of the stream back, if the workers have it. Nothing is wrapped otherwise.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.random

from lazygt.graph.ops import Overload, facts, overload
from lazygt.record import rng
from lazygt.record.recorder import recorder_of
from lazygt.record.tensor import is_lazy

#: Modules of torch that read the state in order to set it again: they are given a lazy one.
_RESTORING = frozenset({"torch.random", "torch.utils.checkpoint"})

#: Draw, and take no generator.
_WITHOUT_ARGUMENT = ("aten::native_dropout",)

_wrapped: list[torch.library.Library] = []


def install() -> None:
    """Join the draws of CPU tensors to the stream of sessions."""
    if _wrapped:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch warns of kernels that are overridden, once
        warnings.simplefilter("ignore", UserWarning)
        for func, kernel in _kernels().items():
            library.impl(func, kernel, "CPU", with_keyset=True)
    _wrapped.append(library)
    _set_default(_Client())


def uninstall() -> None:
    """Undo ``install``."""
    while _wrapped:
        _wrapped.pop()._destroy()
        _set_default(torch.default_generator)


def _set_default(generator: Any) -> None:
    vars(torch.random)["default_generator"] = generator


@cache
def _kernels() -> dict[Overload, Callable[..., Any]]:
    """For each op that draws on CPU tensors the kernel that stands in for torch's own."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    drawing = [name for name in names if name.startswith("aten::") and _takes_generator(name)]
    ops = [overload(_full(name)) for name in (*drawing, *_WITHOUT_ARGUMENT)]
    return {op: _joined(op) for op in ops if facts(op).random}


def _takes_generator(name: str) -> bool:
    op, _, which = name.partition(".")
    return any(a.name == "generator" for a in torch._C._get_schema(op, which).arguments)


def _full(name: str) -> str:
    """An overload's name as ``graph.ops.overload`` knows it."""
    name = name.replace("::", ".")
    return name if name.count(".") == 2 else f"{name}.default"


def _joined(func: Overload) -> Callable[..., Any]:
    torchs = torch.library.get_kernel(func, "CPU")

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
        if not given or rng.is_default(given[0]):
            rng.to_client()
        return torchs.call_boxed(keys, *args, **kwargs)

    return kernel


class _Client:
    """What ``torch.random`` takes for the client's CPU generator.

    ``torch.manual_seed``, ``seed``, ``initial_seed``, ``get_rng_state`` and ``set_rng_state`` ask
    it, by whatever name and however early they were imported.
    """

    def manual_seed(self, seed: int) -> torch.Generator:
        seeded = torch.default_generator.manual_seed(seed)
        rng.drop()
        return seeded

    def seed(self) -> int:
        chosen = torch.default_generator.seed()
        rng.drop()
        return chosen

    def initial_seed(self) -> int:
        rng.to_client()
        return torch.default_generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        """A CPU tensor; a sync point if the workers have the state.

        Activation checkpointing and ``fork_rng`` are given a lazy tensor then, at no sync point.
        """
        holder = rng.holder()
        caller = sys._getframe(2).f_globals.get("__name__")
        if holder is not None and caller in _RESTORING:
            return holder.get_state()
        rng.to_client()
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Takes lazy tensors, too; no sync point."""
        if is_lazy(state):
            recorder_of(state).generator.set_state(state)
        else:
            torch.default_generator.set_state(state)
            rng.drop()
