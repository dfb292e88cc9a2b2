"""Factories inside a session: new tensors are lazy unless something else says where they go."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from lazygt.opened import stack as _open
from lazygt.tensor import DEVICE_0

_builtins: Any = torch.jit._builtins
#: (owner, name) -> torch's own function
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
#: Constructors of what lazygt has none of: they go on making CPU tensors.
_NOT_STRIDED = frozenset(
    {
        "empty_quantized",
        "sparse_coo_tensor",
        "sparse_compressed_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
        "sparse_bsr_tensor",
        "sparse_bsc_tensor",
    }
)
#: Made from torch's list once, before anything is patched (torch caches that list as well).
_constructors: list[Callable[..., Any]] = []


def patch() -> None:
    """Have torch's factories default to ``lazygt``.

    ``torch.set_default_device`` does the same with a TorchFunctionMode, through which every
    call of every torch function goes: 1.5 to 3 us an op, measured, where recording one takes 5.
    """
    if _originals:
        return
    if not _constructors:
        _constructors.extend(torch.utils._device._device_constructors())
    for function in _constructors:
        name = function.__name__.removeprefix("fft_")
        for owner in (torch, torch.fft):
            if getattr(owner, name, None) is function and name not in _NOT_STRIDED:
                _patch(owner, name, _defaulting(function))
    _patch(torch, "normal", _defaulting_normal(torch.normal))


def _patch(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = _originals[owner, name] = getattr(owner, name)
    known_as = _builtins._find_builtin(original)
    if known_as is not None:  # else torch.jit.script would try to compile the factory's Python
        _builtins._register_builtin(function, known_as)
    setattr(owner, name, function)


def unpatch() -> None:
    """Give torch its own factories back."""
    for (owner, name), function in _originals.items():
        setattr(owner, name, function)
    _originals.clear()


@functools.cache
def _defaulting(function: Callable[..., Any]) -> Callable[..., Any]:
    converts = function.__name__ in ("as_tensor", "asarray")

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("device") is None
            and _stays_free(kwargs)
            and not (converts and args and isinstance(args[0], torch.Tensor))
        ):
            kwargs["device"] = DEVICE_0
        return function(*args, **kwargs)

    return factory


@functools.cache
def _defaulting_normal(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.normal`` is a factory only when it is given a size."""
    factory = _defaulting(function)

    @functools.wraps(function)
    def normal(*args: Any, **kwargs: Any) -> Any:
        sized = len(args) == 3 or "size" in kwargs
        return (factory if sized else function)(*args, **kwargs)

    return normal


def _stays_free(kwargs: dict[str, Any]) -> bool:
    """Whether nothing else says where the tensor is to be."""
    lock: Any = _open[-1].recorder.lock
    if lock._is_owned():  # lazygt itself, or torch working for it
        return False
    if torch._C._len_torch_function_stack() and _inner_device_context():
        return False
    generator = kwargs.get("generator")
    if generator is not None and not _open[-1].recorder.generator.is_own(generator):
        return False
    out = kwargs.get("out")
    return out is None


def _inner_device_context() -> bool:
    """Whether the user has set a device of his own (``with torch.device("cpu")``)."""
    return any(
        isinstance(torch._C._get_function_stack_at(i), torch.utils._device.DeviceContext)
        for i in range(torch._C._len_torch_function_stack())
    )
