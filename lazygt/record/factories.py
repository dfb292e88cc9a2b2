"""Factories inside a session: new tensors are lazy unless something else says where they go.

The functions are replaced in ``torch``, and wherever a module has imported one by name
(``from torch import randn``). ``torch.Tensor(...)``, ``torch.FloatTensor(...)`` and its like make
tensors, too: see ``constructors``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils._device

from lazygt.record import constructors
from lazygt.record.defaults import stays_free
from lazygt.record.tensor import DEVICE_0

_builtins: Any = torch.jit._builtins
#: (namespace, name, torch's own, what stands in for it)
_replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
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
#: Packages that know which function they call, or none of torch's.
_SKIPPED = sys.stdlib_module_names | {"torch", "lazygt"}
#: Made from torch's list once, before anything is patched (torch caches that list as well).
_constructors: list[Callable[..., Any]] = []


def patch() -> None:
    """Have torch's factories default to ``lazygt``.

    ``torch.set_default_device`` does the same with a TorchFunctionMode, through which every
    call of every torch function goes: 1.5 to 3 us an op, measured, where recording one takes 5.
    """
    if _replaced:
        return
    if not _constructors:
        _constructors.extend(torch.utils._device._device_constructors())
    for function in _constructors:
        name = function.__name__.removeprefix("fft_")
        for owner in (torch, torch.fft):
            if getattr(owner, name, None) is function and name not in _NOT_STRIDED:
                _patch(owner, name, _defaulting(function))
    _patch(torch, "normal", _defaulting_normal(torch.normal))
    for name, kind in constructors.typed().items():
        _replace(vars(torch), name, kind)
    _replace(vars(torch), "set_default_tensor_type", constructors.set_default_type)
    constructors.patch_tensor()
    _patch_imported({id(own): standin for _, _, own, standin in _replaced})


def _patch(owner: ModuleType, name: str, function: Callable[..., Any]) -> None:
    known_as = _builtins._find_builtin(getattr(owner, name))
    if known_as is not None:  # else torch.jit.script would try to compile the factory's Python
        _builtins._register_builtin(function, known_as)
    _replace(vars(owner), name, function)


def _replace(namespace: dict[str, Any], name: str, standin: Any) -> None:
    _replaced.append((namespace, name, namespace[name], standin))
    namespace[name] = standin


def _patch_imported(standins: dict[int, Any]) -> None:
    """Replace the functions where modules, torch's own excepted, have imported them by name."""
    loaded: dict[str, Any] = dict(sys.modules)  # anything may stand there
    for title, module in loaded.items():
        if title.partition(".")[0] in _SKIPPED or not isinstance(module, ModuleType):
            continue
        namespace = vars(module)
        for name, found in list(namespace.items()):
            if id(found) in standins:
                _replace(namespace, name, standins[id(found)])


def unpatch() -> None:
    """Give torch its own factories back."""
    if _replaced:
        constructors.unpatch_tensor()
    while _replaced:
        namespace, name, own, standin = _replaced.pop()
        if namespace.get(name) is standin:
            namespace[name] = own


@functools.cache
def _defaulting(function: Callable[..., Any]) -> Callable[..., Any]:
    converts = function.__name__ in ("as_tensor", "asarray")

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("device") is None
            and stays_free(kwargs)
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
