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

# -- methods of torch.Tensor for handles of C++, which are of torch's own class --------------------
# Each is ``LazyTensor``'s method for a lazy tensor, and torch's own for any other. Only methods
# that torch refuses to a tensor without memory, or that differ from lazygt's docs, are here.

_NO_MEMORY = "torch asks a tensor on this device for memory in this process"
_WHOLE_STORAGE = "handles that share a storage share the copy"
_MANY_PLANS = "torch computes what it prints op by op, each a plan of its own"
#: attribute of torch.Tensor -> reason
_METHODS = {
    "numpy": _NO_MEMORY,
    "__array__": _NO_MEMORY,
    "__deepcopy__": _WHOLE_STORAGE,
    "__reduce_ex__": "a checkpoint needs no lazygt to be read",
    "__repr__": _MANY_PLANS,
    "__format__": "a number of a closed session can be shown in a text",
    "untyped_storage": _NO_MEMORY,
    "data_ptr": _NO_MEMORY,
    "is_shared": _NO_MEMORY,
    "share_memory_": _NO_MEMORY,
}
#: Those of them that nn.Parameter overrides.
_OF_PARAMETERS = ("__deepcopy__", "__reduce_ex__", "__repr__")
#: Attributes of lazy tensors that torch.Tensor lacks.
_ONLY_LAZY = ("placements", "_repr_html_", "_repr_mimebundle_")


def _either(cls: type, name: str) -> Any:
    """Return the method of LazyTensor for lazy tensors, and of ``cls`` for all others."""
    lazy_method, torch_method = vars(LazyTensor)[name], getattr(cls, name)

    @functools.wraps(torch_method)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (lazy_method if is_lazy(self) else torch_method)(self, *args, **kwargs)

    return method


def _only_lazy(name: str) -> Any:
    """Return a property of lazy tensors that raises AttributeError on others."""
    lazy_attribute = vars(LazyTensor)[name]

    def attribute(self: Any) -> Any:
        if not is_lazy(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lazy_attribute.__get__(self)

    return property(attribute)


METHOD_PATCHES = (
    *(
        Patch(torch.Tensor, name, _either(torch.Tensor, name), why)
        for name, why in _METHODS.items()
    ),
    *(Patch(Parameter, name, _either(Parameter, name), _METHODS[name]) for name in _OF_PARAMETERS),
    *(
        Patch(torch.Tensor, name, _only_lazy(name), "only lazy tensors have it")
        for name in _ONLY_LAZY
    ),
)


# -- lazy tensors of users' classes: ``as_subclass``, and subclasses of ``nn.Parameter`` -----------

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
