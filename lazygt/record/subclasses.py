"""Lazy tensors of users' classes: ``as_subclass``, and subclasses of ``nn.Parameter``.

A tensor's Python class gives it its methods and ``__torch_function__``. A lazy one of class
``Image`` is of a class made here, a subclass of both ``Image`` and ``LazyTensor``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn import Parameter

from lazygt.record.patches import Patch
from lazygt.record.tensor import NATIVE, LazyTensor, is_lazy

_tensor: Any = torch.Tensor
_make_subclass = _tensor._make_subclass
_as_subclass = _tensor.as_subclass
_new_parameter = Parameter.__new__
#: Methods of nn.Parameter that a lazy one overrides.
_OVERRIDDEN = ("__deepcopy__", "__repr__", "__reduce_ex__")


class Subclassed(LazyTensor):
    """Base of lazy classes of users: ``super().__torch_function__`` in them is torch's."""


# here, because torch turns off that of a class with __torch_dispatch__ when it is made
_subclassed: Any = Subclassed
_subclassed.__torch_function__ = inspect.getattr_static(torch.Tensor, "__torch_function__")


def is_convertible(cls: type) -> bool:
    """Return whether a tensor of a class can become lazy and stay of that class.

    It must leave its ops to torch, and keep its own attributes in the tensor's ``__dict__``.
    """
    user_class: Any = cls
    same_layout = cls.__basicsize__ == torch.Tensor.__basicsize__
    return same_layout and user_class.__torch_dispatch__ is _tensor.__torch_dispatch__


def _host_class(cls: Any) -> type:
    """Return the user's class behind a lazy class; any other class itself."""
    host: type = cls._host_class if issubclass(cls, LazyTensor) else cls
    return host


def lazy_class(cls: type) -> type[torch.Tensor]:
    """Return the class of lazy tensors that are of class ``cls`` too.

    Raises:
        TypeError: ``cls`` handles its ops itself, or has slots.
    """
    if NATIVE is not None and (cls is torch.Tensor or cls is Parameter):
        return cls
    if issubclass(cls, LazyTensor):
        return cls
    if cls is torch.Tensor or cls is Parameter:
        return LazyTensor
    if not (issubclass(cls, torch.Tensor) and is_convertible(cls)):
        raise TypeError(
            f"a lazygt tensor can't be of class {cls.__name__}: a class for it derives from "
            f"torch.Tensor and defines neither __torch_dispatch__ nor __slots__"
        )
    return cls if NATIVE is not None else _lazy_subclass(cls)


@functools.cache
def _lazy_subclass(cls: type) -> type[LazyTensor]:
    """Return a new subclass of both ``cls`` and LazyTensor."""
    user_bases = [base for base in cls.__mro__ if base not in LazyTensor.__mro__]
    defined = {name for base in user_bases if base is not Parameter for name in vars(base)}
    members: dict[str, Any] = {
        name: vars(LazyTensor)[name] for name in _OVERRIDDEN if name not in defined
    }
    members["__module__"], members["__qualname__"] = cls.__module__, cls.__qualname__
    members["_host_class"] = cls
    if "__setattr__" not in defined:
        members["__setattr__"] = _set_attribute
    if not issubclass(cls, Parameter):
        members["__new__"] = _new
    subclass: Any = type(cls)(cls.__name__, (cls, Subclassed), members)
    subclass.__torch_function__ = inspect.getattr_static(cls, "__torch_function__")
    lazy: type[LazyTensor] = subclass
    return lazy


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a tensor of the user's own class, for ``type(t)(values)``."""
    return cls._host_class(*args, **kwargs)


def set_class(t: torch.Tensor, cls: type) -> None:
    """Set the class of a lazy tensor (``t.__class__ = cls``) to the lazy one for ``cls``."""
    object.__setattr__(t, "__class__", lazy_class(cls))
    if issubclass(cls, Parameter):
        t._is_param = True


def _set_attribute(self: torch.Tensor, name: str, value: Any) -> None:
    """Set an attribute; ``__class__`` becomes the lazy class."""
    if name == "__class__":
        set_class(self, value)
    else:
        object.__setattr__(self, name, value)


def as_subclass(self: torch.Tensor, cls: type) -> Any:
    """Return the same values as class ``cls``; autograd goes through it (``as_subclass``)."""
    if not is_lazy(self):
        return _as_subclass(self, _host_class(cls))
    alias = torch.ops.aten.alias.default(self)
    set_class(alias, cls)
    return alias


def make_subclass(*args: Any, **kwargs: Any) -> Any:
    """Create a tensor of a subclass, also of lazy data (``Tensor._make_subclass``).

    The arguments have no names, because torch._dynamo compares them with its own.
    """
    cls, data = args[:2]
    if not is_lazy(data):
        return _make_subclass(_host_class(cls), *args[1:], **kwargs)
    needs_grad = args[2] if len(args) > 2 else kwargs.get("require_grad", False)
    tensor = data.detach()
    tensor.requires_grad = needs_grad  # torch.vmap refuses requires_grad_()
    set_class(tensor, cls)
    return tensor


def new_parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
    """Create a parameter; lazy values may have a user's class."""
    if is_lazy(data) and cls is not Parameter:
        return make_subclass(cls, data, requires_grad)
    parameter: Any = _new_parameter(_host_class(cls), data, requires_grad)
    return parameter


_OWN_CLASS = "lazy tensors can be of the user's classes too"
PATCHES = (
    Patch(_tensor, "_make_subclass", staticmethod(make_subclass), _OWN_CLASS),
    Patch(_tensor, "as_subclass", as_subclass, _OWN_CLASS),
)
