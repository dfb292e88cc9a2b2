"""Ops rewritten so that their varying position is one run-time number.

A position is an int that selects elements and shapes no result (``positions``). That of these ops
is two numbers, or decides their validity. They are rewritten only where the position varies
(``moving.position_varies``); elsewhere they are recorded as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.record.moving import position_varies
from lazygt.record.tensor import is_lazy, meta_of, rebind, storage_of, view_of, wrapper
from lazygt.record.trace import Trace, TraceOwner

aten = torch.ops.aten
#: Limit of the integers that are exact in any dtype in which torch computes an ``arange``.
_EXACT = 1 << 31


Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class PieceRecorder(TraceOwner, Protocol):
    """Interface of the recorder, as far as this module needs it."""

    def record(self, func: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Record an op; return the user's result."""

    def record_plain(self, func: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Record an op as it is, bypassing its handler."""


def arange(recorder: PieceRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record ``arange(i, i + 4)`` as a range from 0, plus the run-time number ``i``."""
    numbers = (0, *args) if len(args) == 1 else args
    start, end, step = (*numbers, 1)[:3]
    integral = all(type(n) is int and abs(n) < _EXACT for n in (start, end, step))
    options = {name: a for name, a in kwargs.items() if name != "out"}
    out = kwargs.get("out")
    dtype = options.get("dtype") if out is None else out.dtype
    if not integral or dtype not in (None, torch.int64) or (out is not None and out.numel()):
        return NotImplemented
    length = len(range(start, end, step)) if step else 0
    call = (func, length, step, *options.items())
    if not length or not position_varies(recorder.trace, call, (start,)):
        return NotImplemented
    with _counted_as(recorder.trace, 1 if out is None else 2):  # ``out`` is one op more
        first = recorder.record_plain(aten.arange.start_step, (0, length * step, step), options)
        result = recorder.record(aten.add.Tensor, (first, start), None)
    if out is None:
        return result
    rebind(out, meta_of(result), storage_of(result), None)
    return out


def slice_backward(recorder: PieceRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record the gradient of a slice as a copy into a slice of zeros."""
    grad, sizes, *slice_args = args
    region = _varying_slice(recorder, func, tuple(sizes), *slice_args)
    if region is None:
        return NotImplemented
    with _counted_as(recorder.trace):
        zeros = recorder.record(aten.new_zeros.default, (grad, sizes), None)
        return _write_slice(recorder, zeros, region, grad)


def slice_scatter(recorder: PieceRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a clone with one slice overwritten."""
    target, source, *slice_args = args
    if not is_lazy(target) or not target.is_contiguous():
        return NotImplemented
    shape = tuple(target.shape)
    region = _varying_slice(recorder, func, shape, *slice_args)
    if region is None:
        return NotImplemented
    dim, _, length = region
    if tuple(source.shape) != (*shape[:dim], length, *shape[dim + 1 :]):
        return NotImplemented
    with _counted_as(recorder.trace):
        copy = recorder.record(aten.clone.default, (target,), None)
        return _write_slice(recorder, copy, region, source)


def _varying_slice(
    recorder: PieceRecorder,
    func: Any,
    sizes: tuple[int, ...],
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[int, int, int] | None:
    """Return (dim, start, length) of a slice with a varying start; None for any other."""
    if step != 1 or not -len(sizes) <= dim < len(sizes):
        return None
    dim %= len(sizes)
    first, last, _ = slice(start, end).indices(sizes[dim])
    length = last - first
    if not 0 < length < sizes[dim]:
        return None
    varies = position_varies(recorder.trace, (func, sizes, dim, length), (first,))
    return (dim, first, length) if varies else None


def _write_slice(
    recorder: PieceRecorder, target: Any, region: tuple[int, int, int], source: Any
) -> Any:
    """Record a copy of ``source`` into a slice (dim, start, length) of ``target``; return that."""
    view = recorder.record(aten.narrow.default, (target, *region), None)
    recorder.record(aten.copy_.default, (view, source), None)
    return target


def as_strided(recorder: PieceRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a strided view of a storage; strides and offset count in the full storage.

    A backward pass through a write into a view uses such views. If the offset varies, the elements
    from there on are selected by ``narrow``, and the strides by one ``unfold`` for each dim.
    """
    t, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else None
    start = t.storage_offset() if offset is None else offset
    full = _full_storage(t)
    extent = _extent(meta_of(full), size, stride, start)
    if not extent or not position_varies(recorder.trace, (func, *size, *stride), (start,)):
        return recorder.record_plain(func, (full, size, stride, start), {})
    with _counted_as(recorder.trace):
        view = recorder.record(aten.view.default, (full, [full.numel()]), None)
        view = recorder.record(aten.narrow.default, (view, 0, start, extent), None)
        for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
            extent -= (length - 1) * step
            view = recorder.record(aten.unfold.default, (view, dim, extent, step), None)
        return recorder.record(aten.select.int, (view, len(size), 0), None)


def _extent(
    storage_meta: TensorMeta, size: Sequence[int], stride: Sequence[int], start: int
) -> int:
    """Return the number of elements that a strided view spans; 0 if the view does not exist."""
    if not storage_meta.plain or 0 in size or 0 in stride:
        return 0
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return extent if 0 <= start <= math.prod(storage_meta.shape) - extent else 0


def _full_storage(t: Any) -> Any:
    """Return a handle for the full storage if it has the dtype of ``t``; else ``t``."""
    storage = storage_of(t)
    if view_of(t) is None or storage.meta.dtype != t.dtype:
        return t
    return wrapper(storage.meta, storage, None)


@contextmanager
def _counted_as(trace: Trace, count: int = 1) -> Iterator[None]:
    """Context in which the recorded ops count as ``count`` ops of the program point."""
    before = trace.step.ops
    yield
    trace.split += trace.step.ops - before - count


def at_fixed_position(recorder: PieceRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a view op that depends on its operand's offset, with a constant offset."""
    t = args[0]
    fixed = fix_position(recorder, t)
    if fixed is t:
        return NotImplemented
    return recorder.record_plain(func, (fixed, *args[1:]), kwargs)


def fix_position(recorder: PieceRecorder, t: Any) -> Any:
    """Return the same view with a constant offset in its step; ``t`` itself if it has one."""
    view = view_of(t) if is_lazy(t) else None
    if view is None:
        return t
    recorder.trace.index_of(t)  # replays the view, perhaps with a run-time position
    if not view.numbers:
        return t
    view_args = (_full_storage(t), tuple(t.shape), t.stride(), t.storage_offset())
    return recorder.record_plain(aten.as_strided.default, view_args, None)
