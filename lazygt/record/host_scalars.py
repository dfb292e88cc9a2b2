"""Host numbers: single values that have met no worker data are computed here, at no message.

An optimizer's step counter is one: a 0-dim tensor that torch reads back after every increment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.record.tensor import LazyTensor, Storage, wrapper

if TYPE_CHECKING:
    from lazygt.record.recorder import Recorder


class _NotHost(Exception):
    """An argument is not a host number."""


def is_host_scalar(tensors: list[Any]) -> bool:
    """Whether a list begins with a host number."""
    first = tensors[0] if tensors else None
    return isinstance(first, LazyTensor) and first._storage.host is not None


def compute(
    recorder: Recorder, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Single numbers that have met no worker data are computed here, at no message."""
    known: dict[int, LazyTensor] = {}

    def leaf(a: Any) -> Any:
        if isinstance(a, LazyTensor):
            host = a._storage.host
            if host is None or a._view is not None:
                raise _NotHost
            known[id(host)] = a
            return host
        if isinstance(a, torch.Tensor) and (a.numel() != 1 or a.device.type != "cpu"):
            raise _NotHost
        return [leaf(item) for item in a] if isinstance(a, (list, tuple)) else a

    try:
        host_args = [leaf(a) for a in args]
        host_kwargs = {name: leaf(a) for name, a in kwargs.items()}
    except _NotHost:
        return NotImplemented
    result = func(*host_args, **host_kwargs)

    def show(r: Any) -> Any:
        if isinstance(r, torch.Tensor):
            return known.get(id(r)) if id(r) in known else host_tensor(recorder, r)
        return [show(item) for item in r] if isinstance(r, (list, tuple)) else r

    return show(result)


def host_tensor(recorder: Recorder, value: torch.Tensor) -> LazyTensor:
    """A handle for a single number kept on the host."""
    storage = Storage(recorder, 0, 0, TensorMeta.of(value))
    storage.host = value
    return wrapper(storage.meta, storage, None)
