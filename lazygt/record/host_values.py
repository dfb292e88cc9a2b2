"""Client's values among lazy ones: uploads, single numbers, and misplaced CPU tensors.

For a CPU tensor that an op may not take, the error gives the line to write.

Ops on single numbers of the client's alone are computed here, without a message. An optimizer's
step counter is one: a 0-dim tensor that torch reads back after every increment.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.ops import OpFacts
from lazygt.graph.source import expand, is_library, user_call_site
from lazygt.record.tensor import (
    Held,
    LazyTensor,
    Owner,
    is_lazy,
    new_storage,
    storage_of,
    view_of,
    wrapper,
)

if TYPE_CHECKING:
    from lazygt.runtime.values import RemoteValue

#: Ops that accept CPU index tensors on any device.
_CPU_INDICES = frozenset(
    {
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.index_put_.default",
        "aten._index_put_impl_.default",
        "aten._unsafe_index.Tensor",
        "aten._unsafe_index_put.default",
    }
)


# -- new handles ---------------------------------------------------------------------------


def blank(owner: Owner, shape: Any, stride: Any, dtype: torch.dtype | None) -> LazyTensor:
    """Return an uninitialised tensor (``torch.empty``), without memory until its first use."""
    sizes = tuple(int(size) for size in shape)
    negative = next((size for size in sizes if size < 0), None)
    if negative is not None:
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {negative}: {list(sizes)}"
        )
    strides = contiguous_stride(sizes) if stride is None else tuple(int(s) for s in stride)
    meta = intern(sizes, strides, dtype or torch.get_default_dtype())
    storage = new_storage(owner, 0, 0, meta)
    storage.blank = True
    return wrapper(meta, storage, None)


def remote_tensor(owner: Owner, meta: TensorMeta, remote: RemoteValue) -> LazyTensor:
    """Return a handle for a value that is on the workers already."""
    base = intern(meta.shape, meta.stride, meta.dtype)
    storage = new_storage(owner, 0, 0, base)
    storage.set_remote(remote)
    return wrapper(base, storage, None)


def host_tensor(owner: Owner, value: torch.Tensor) -> LazyTensor:
    """Return a handle for a single number that stays on the client."""
    storage = new_storage(owner, 0, 0, TensorMeta.of(value))
    storage.set_host(value)
    return wrapper(storage.meta, storage, None)


def to_lazy(owner: Owner, source: torch.Tensor) -> LazyTensor:
    """Upload a CPU tensor; later writes to it do not change the upload."""
    source = source.detach()
    shape = tuple(source.shape)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
    stride = source.stride() if dense else contiguous_stride(shape)
    t = blank(owner, shape, stride, source.dtype)
    fill(t, source)
    return t


def fill(t: LazyTensor, source: torch.Tensor) -> None:
    """Set all values of a handle that is no view to those of a CPU tensor (``copy_``)."""
    storage = storage_of(t)
    meta = storage.meta
    before = None if storage.blank else Held.of(storage)
    value = source.detach().resolve_conj().resolve_neg().to(meta.dtype)
    if tuple(value.shape) != meta.shape:
        value = value.expand(meta.shape)
    if meta.numel == 1 and not meta.dtype.is_complex:
        storage.owner.has_numbers = True
        storage.set_host(value.clone().reshape(meta.shape))
    else:
        storage.set_remote(storage.owner.upload(value, meta))
    if before is not None:
        storage.owner.overwritten(storage, before)


# -- single numbers on the client ------------------------------------------------------------------


class _NotHost(Exception):
    """Signal that an argument is not a single number of the client."""


def compute(
    owner: Owner, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute an op whose tensors are single numbers of the client; else return NotImplemented."""
    handles: dict[int, LazyTensor] = {}

    def to_host(a: Any) -> Any:
        """Return an argument with the client's numbers; raise ``_NotHost`` for other tensors."""
        if is_lazy(a):
            host = storage_of(a).host
            if host is None or view_of(a) is not None:
                raise _NotHost
            handles[id(host)] = a
            return host
        if isinstance(a, torch.Tensor) and (a.numel() != 1 or a.device.type != "cpu"):
            raise _NotHost
        return [to_host(item) for item in a] if isinstance(a, (list, tuple)) else a

    try:
        host_args = [to_host(a) for a in args]
        host_kwargs = {name: to_host(a) for name, a in kwargs.items()}
    except _NotHost:
        return NotImplemented
    result = func(*host_args, **host_kwargs)

    def to_user(r: Any) -> Any:
        """Return a result with handles; a result that is an operand keeps its handle."""
        if isinstance(r, torch.Tensor):
            return handles.get(id(r)) if id(r) in handles else host_tensor(owner, r)
        return [to_user(item) for item in r] if isinstance(r, (list, tuple)) else r

    return to_user(result)


# -- CPU operands of lazy ops ----------------------------------------------------------------------


def upload_operand(owner: Owner, t: torch.Tensor, f: OpFacts) -> LazyTensor:
    """Upload a CPU tensor among an op's arguments: a 0-dim tensor, or an index.

    Raises:
        RuntimeError: torch refuses this mix of devices.
    """
    if t.device.type == "cpu" and (t.dim() == 0 or f.name in _CPU_INDICES):
        return to_lazy(owner, t)
    raise mixed_error(t, f)


def mixed_error(t: torch.Tensor, f: OpFacts) -> RuntimeError:
    """Return the error for operands on two devices, with the line to add to the program."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"lazygt:0 and {t.device}! {f.name} got a {TensorMeta.of(t)} on {t.device}; "
        f"move it with .to('lazygt'): {_advice(t)}"
    )


def _advice(t: torch.Tensor) -> str:
    """Return the advice for a misplaced CPU tensor: the line of code that moves it."""
    call_line = expand(user_call_site(1))
    source = t if t._base is None else t._base
    if source.is_leaf and (source.requires_grad or isinstance(source, torch.nn.Parameter)):
        return f"it is a model's weight. Before {call_line}, write\n    model.to('lazygt')"
    name, line = _name_of(source) or _name_of(t) or ("x", call_line)
    return (
        f"what torch.from_numpy or a DataLoader's worker process makes is on the CPU. Before "
        f"{line}, write\n    {name} = {name}.to('lazygt')"
    )


def _name_of(t: torch.Tensor) -> tuple[str, str] | None:
    """Return a tensor's name in the outermost of the user's frames that has it, and the line."""
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            names = [name for name, value in frame.f_locals.items() if value is t]
            if names:
                outermost = names[0], expand((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return outermost
