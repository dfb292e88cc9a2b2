"""Methods of torch.Tensor for handles of C++, which are of torch's own class.

Each is ``LazyTensor``'s method for a lazy tensor, and torch's own for any other. Only methods that
torch refuses to a tensor without memory, or that differ from lazygt's docs, are here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import Parameter

from lazygt.record.patches import Patch
from lazygt.record.tensor import LazyTensor, is_lazy

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


PATCHES = (
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
