"""``torch.Tensor(...)`` and ``torch.FloatTensor(...)`` and its like make lazy tensors in a session.

Their arguments say no device, so torch makes CPU tensors of them; these are uploaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lazygt.record.defaults import stays_free
from lazygt.record.tensor import DEVICE_0, LazyTensor

_NAMES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_new: Any = torch._C.TensorBase.__new__
_set_default_type: Any = torch.set_default_tensor_type


def _placed(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a constructor made, in the session; not if it shows the memory of its argument."""
    shown = isinstance(args[0], torch.Tensor | torch.UntypedStorage) if args else False
    if shown or kwargs or not stays_free({}):
        return made
    return made.to(DEVICE_0)


def _new_tensor(*args: Any, **kwargs: Any) -> Any:
    """``torch.Tensor.__new__``; torch.compile takes no narrower signature for it."""
    made = _new(*args, **kwargs)
    return _placed(made, args[1:], kwargs) if args[0] is torch.Tensor else made


def patch_tensor() -> None:
    """Have ``torch.Tensor(...)`` make lazy tensors."""
    torch.Tensor.__new__ = _new_tensor  # type: ignore[method-assign]


def unpatch_tensor() -> None:
    """Undo ``patch_tensor``."""
    del torch.Tensor.__new__


class _Typed(type):
    """Stands for a tensor type, such as ``torch.FloatTensor``."""

    own: Any
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _placed(cls.own(*args, **kwargs), args, kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        lazily = isinstance(value, LazyTensor) and value.dtype == cls.dtype
        return lazily or isinstance(value, cls.own)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "own"), name)

    def __repr__(cls) -> str:
        return repr(cls.own)


@cache
def typed() -> dict[str, Any]:
    """What stands for each tensor type of ``torch``, by its name there."""
    found = {}
    for name in _NAMES:
        own = getattr(torch, f"{name}Tensor")
        # Tensor.type() reads the name of a type, and wants to find the module in it
        found[f"{name}Tensor"] = _Typed(f"torch.{name}Tensor", (), {"own": own, "dtype": own.dtype})
    return found


def set_default_type(given: Any) -> None:
    """``torch.set_default_tensor_type``, which knows torch's own types only."""
    named = typed().get(given.removeprefix("torch."), given) if isinstance(given, str) else given
    _set_default_type(named.own if isinstance(named, _Typed) else named)
