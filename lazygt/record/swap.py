"""Moves of tensors between client and workers that keep the Python object, as with CUDA.

``module.to("lazygt")``, ``.cpu()`` and ``p.data = value`` swap the TensorImpl under the Python
object: weights that are shared stay shared, and optimizers, hooks and weak references made before
stay valid. ``IN_SESSIONS`` are the patches that hold only while a session is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from lazygt.record.autograd import move_hooks
from lazygt.record.copies import host_copy
from lazygt.record.host_values import blank
from lazygt.record.patches import Patch
from lazygt.record.subclasses import is_convertible, lazy_class, new_parameter
from lazygt.record.tensor import (
    DEVICE_0,
    NATIVE,
    OF_LAZY,
    LazyTensor,
    host_class,
    is_lazy,
    storage_of,
)
from lazygt.runtime.interrupts import DEFER_INTERRUPT

_tensor: Any = torch.Tensor
_host_data: Any = _tensor.data
_lazy_data: Any = LazyTensor.__dict__["data"]
_compatible: Any = torch._has_compatible_shallow_copy_type


class _Applying(threading.local):
    """Thread-local flag: ``_apply`` of a TorchScript module is running."""

    scripted = False


_applying = _Applying()


def has_compatible_type(*args: Any) -> bool:
    """Return whether ``t.data = value`` is possible.

    ``nn.Module._apply`` calls it (``torch._has_compatible_shallow_copy_type``), and creates a new
    Parameter if it is False. The arguments have no names, because torch._dynamo compares them with
    its own.
    """
    t, value = args
    if is_lazy(t) == is_lazy(value) or _applying.scripted:
        return bool(_compatible(t, value))
    return _is_movable(t) and _is_movable(value)


def _is_movable(t: torch.Tensor) -> bool:
    """Return whether CUDA's ``.data = ...`` would take such a tensor to another device."""
    if is_lazy(t):
        return True
    dense = t.layout is torch.strided and t.device.type in ("cpu", "cuda")
    return dense and is_convertible(type(t))


def _apply_scripted(self: ScriptModule, fn: Any, recurse: bool = True) -> Any:
    """Apply to a TorchScript module; its TensorImpls have no objects, so it gets new ones."""
    before, _applying.scripted = _applying.scripted, True
    try:
        return Module._apply(self, fn, recurse)
    finally:
        _applying.scripted = before


def _set_host_data(t: torch.Tensor, value: torch.Tensor) -> None:
    """Set ``t.data = value`` of a tensor that is not lazy."""
    if is_lazy(value) and t.is_leaf and _is_movable(t):
        _to_workers(t, value)
    else:
        _host_data.__set__(t, value)


def _get_data(t: torch.Tensor) -> torch.Tensor:
    """Return ``t.data``: for a lazy tensor recorded by C++ as ``LazyTensor.data``."""
    data: torch.Tensor = (_lazy_data if is_lazy(t) else _host_data).__get__(t)
    return data


def _set_any_data(t: torch.Tensor, value: torch.Tensor) -> None:
    """Set ``t.data = value`` of any tensor."""
    if is_lazy(t):
        _lazy_data.__set__(t, value)
    else:
        _set_host_data(t, value)


def move_to_host(t: LazyTensor, value: torch.Tensor) -> bool:
    """Set a lazy tensor's data to a CPU or CUDA value; return False if that is not possible."""
    if not (t.is_leaf and _is_movable(value)):
        return False
    _to_host(t, value)
    return True


def _check(t: torch.Tensor, value: torch.Tensor) -> None:
    """Raise if ``t`` can't be moved to the device of ``value``, before anything is moved."""
    if t.grad is not None and not _is_movable(t.grad):
        raise NotImplementedError(
            f"a tensor of shape {list(t.shape)} can't be moved to {value.device} with its gradient "
            f"of layout {t.grad.layout}: expected a dense one; set .grad = None before it is moved"
        )
    # torch's own error, for a dtype that has no gradients
    trial = torch.empty(0, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
    _host_data.__set__(trial, torch.empty(0, dtype=value.dtype, device="cpu"))


def _to_workers(t: torch.Tensor, value: LazyTensor) -> None:
    """Make a CPU tensor's object lazy, with the values of ``value``."""
    _check(t, value)
    grad = None if t.grad is None else t.grad.to(DEVICE_0)
    replacement = blank(storage_of(value).owner, t.size(), None, t.dtype)
    is_parameter = isinstance(t, Parameter)
    with DEFER_INTERRUPT, torch._C.DisableTorchFunctionSubclass():
        _exchange(t, replacement, lazy_class(type(t)), grad)
        for name in OF_LAZY:
            t.__dict__[name] = replacement.__dict__.pop(name)
        if is_parameter:
            t._is_param = True
        _lazy_data.__set__(t, value)


def _to_host(t: LazyTensor, value: torch.Tensor) -> None:
    """Make a lazy tensor's object a CPU or CUDA tensor, with the values of ``value``."""
    _check(t, value)
    grad = None if t.grad is None else t.grad.to(value.device)
    # shape and dtype of the gradient, for a moment
    replacement = torch.empty((), dtype=t.dtype, device=value.device).expand(t.size())
    with DEFER_INTERRUPT, torch._C.DisableTorchFunctionSubclass():
        _exchange(t, replacement, host_class(t), grad)
        for name in OF_LAZY:
            replacement.__dict__[name] = t.__dict__.pop(name)
        t.__dict__.pop("_is_param", None)
        _host_data.__set__(t, value)


@contextmanager
def on_host(tensors: list[LazyTensor]) -> Iterator[None]:
    """Context in which lazy tensors are CPU tensors with the same values."""
    pairs = [(t, host_copy(t)) for t in tensors]
    lazy = [(type(t), {name: t.__dict__[name] for name in OF_LAZY}) for t in tensors]
    swapped = 0
    try:
        for t, host_tensor in pairs:
            _swap(t, host_tensor, host_class(t))
            for name in OF_LAZY:
                del t.__dict__[name]
            swapped += 1
        yield
    finally:
        for (t, host_tensor), (cls, handle_attributes) in list(zip(pairs, lazy, strict=True))[
            :swapped
        ]:
            _swap(t, host_tensor, cls)
            t.__dict__.update(handle_attributes)


def _swap(t: torch.Tensor, other: torch.Tensor, cls: type) -> None:
    """Exchange the TensorImpls and classes of two tensors; ``t`` gets class ``cls``."""
    torch._C._swap_tensor_impl(t, other)
    object.__setattr__(other, "__class__", type(t))
    object.__setattr__(t, "__class__", cls)


def _exchange(
    t: torch.Tensor, replacement: torch.Tensor, cls: type, moved_grad: torch.Tensor | None
) -> None:
    """Put ``replacement``'s TensorImpl under ``t``; keep gradient, requires_grad and hooks.

    ``replacement`` becomes the old tensor; a backward pass that reaches it raises.

    Args:
        cls: the new class of ``t``.
        moved_grad: the values of the gradient on the new device.
    """
    grad, needs_grad = t.grad, t.requires_grad
    _swap(t, replacement, cls)
    t.requires_grad, replacement.grad = needs_grad, None
    move_hooks(t)
    if needs_grad:
        replacement.register_hook(_raise_moved_after_forward)
    if grad is not None and moved_grad is not None:
        if not grad.is_leaf:  # made with create_graph=True: its graph is of the old TensorImpl
            grad.detach_()
        grad.data = moved_grad
        t.grad = grad


def _raise_moved_after_forward(grad: torch.Tensor) -> None:
    """Raise: the graph's leaf was moved between forward and backward (a gradient hook)."""
    raise RuntimeError(
        "a parameter was moved between lazygt and the host after the forward pass that this "
        "backward() belongs to; call backward() before module.to(...)"
    )


_DATA = (
    property(_host_data.__get__, _set_host_data)
    if NATIVE is None
    else property(_get_data, _set_any_data)
)
_IN_PLACE = "a tensor that moves between devices written in C++ stays the object that it is"
PATCHES = (
    Patch(
        torch,
        "_has_compatible_shallow_copy_type",
        has_compatible_type,
        f"nn.Module asks it what can be moved in place: {_IN_PLACE}",
    ),
)
IN_SESSIONS = (
    Patch(torch.Tensor, "data", _DATA, _IN_PLACE),
    Patch(Parameter, "__new__", new_parameter, "parameters of lazy values are of the user's class"),
    Patch(ScriptModule, "_apply", _apply_scripted, "it holds TensorImpls, which can't be swapped"),
)
