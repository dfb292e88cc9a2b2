"""Draws and queries of the random stream on the client's CPU during a session.

Kernels that draw on CPU tensors are wrapped while a session with CPU workers is open: each first
fetches the stream's state from the workers, if they have it. Nothing is wrapped otherwise.
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

#: Modules of torch that read the state only to restore it later: they get a lazy state.
_RESTORING = frozenset({"torch.random", "torch.utils.checkpoint"})

#: Ops that draw without a generator argument.
_WITHOUT_ARGUMENT = ("aten::native_dropout",)

_wrapped: list[torch.library.Library] = []


def install() -> None:
    """Wrap torch's CPU kernels that draw, and ``torch.random``'s generator."""
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
    """Set ``torch.random.default_generator``."""
    vars(torch.random)["default_generator"] = generator


@cache
def _kernels() -> dict[Overload, Callable[..., Any]]:
    """Return the replacement kernel of each op that draws on CPU tensors."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    drawing = [name for name in names if name.startswith("aten::") and _takes_generator(name)]
    ops = [overload(_overload_name(name)) for name in (*drawing, *_WITHOUT_ARGUMENT)]
    return {op: _synchronized(op) for op in ops if facts(op).random}


def _takes_generator(name: str) -> bool:
    """Return whether an op's schema has an argument ``generator``."""
    op, _, which = name.partition(".")
    return any(a.name == "generator" for a in torch._C._get_schema(op, which).arguments)


def _overload_name(name: str) -> str:
    """Return an overload's name in the form of ``graph.ops.overload``."""
    name = name.replace("::", ".")
    return name if name.count(".") == 2 else f"{name}.default"


def _synchronized(func: Overload) -> Callable[..., Any]:
    """Wrap a CPU kernel: the default generator's state is fetched from the workers first."""
    torch_kernel = torch.library.get_kernel(func, "CPU")

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        generators = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
        if not generators or rng.is_default(generators[0]):
            rng.move_to_client()
        return torch_kernel.call_boxed(keys, *args, **kwargs)

    return kernel


class _Client:
    """Stand-in for ``torch.random``'s default CPU generator while sessions are open.

    ``torch.manual_seed``, ``seed``, ``initial_seed``, ``get_rng_state`` and ``set_rng_state`` use
    it, by any name and however early they were imported.
    """

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed the CPU generator; the workers' state becomes invalid."""
        seeded = torch.default_generator.manual_seed(seed)
        rng.discard_worker_state()
        return seeded

    def seed(self) -> int:
        """Seed the CPU generator at random; return the seed."""
        seed = torch.default_generator.seed()
        rng.discard_worker_state()
        return seed

    def initial_seed(self) -> int:
        """Return the seed that the stream began with."""
        rng.move_to_client()
        return torch.default_generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        """Return the state as a CPU tensor; a sync point if the workers have the state.

        Activation checkpointing and ``fork_rng`` get a lazy tensor then, without a sync point.
        """
        owner = rng.state_owner()
        caller = sys._getframe(2).f_globals.get("__name__")
        if owner is not None and caller in _RESTORING:
            return owner.get_state()
        rng.move_to_client()
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state, from a CPU or a lazy tensor; no sync point."""
        if is_lazy(state):
            recorder_of(state).generator.set_state(state)
        else:
            torch.default_generator.set_state(state)
            rng.discard_worker_state()
