"""Errors of torch's CPU kernels, for calls that a meta kernel refuses with another text.

The refused op runs once more on zeros of the same shapes, strides and dtypes. They lie in mapped
memory, of which no page exists until it is written; a kernel that refuses its arguments has touched
none of it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lazygt.graph.flags import nondeterministic
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg
from lazygt.graph.ops import OpFacts, undispatched
from lazygt.graph.shapes.meta_run import with_tensors

#: Most elements of all operands, and largest number among arguments: a kernel that takes a call
#: that the meta kernel refused computes with as much.
_MOST_ELEMENTS = 2**26
#: Ops that compute nothing before they have compared all shapes and dtypes.
_CHECK_FIRST = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "convolution")
)
#: Refusals of values, which are zeros here, and of memory.
_OF_OTHER_KIND: tuple[type[Exception], ...] = (
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    MemoryError,
    OSError,
    OverflowError,  # operands that no address space holds
)
#: The same by their texts, and refusals for want of a kernel.
_OTHER_REASONS = ("Could not run ", "DefaultCPUAllocator", "[enforce fail")
_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE


def cpu_error(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
) -> Exception | None:
    """Return the exception that torch's CPU kernel raises for a call, or None.

    Args:
        args, kwargs, metas, params: as those of ``run_on_metas``.

    Returns:
        None where the kernel takes the call, where the call is too large to be tried, and for ops
        that draw random numbers or are not torch's own.
    """
    if f.foreign or f.random or not _is_small(f, (args, kwargs), metas, params):
        return None
    try:
        with undispatched(), torch.no_grad(), nondeterministic():
            operands = with_tensors(args, kwargs, _zeros, metas, params, torch.device("cpu"))
            f.func(*operands[0], **operands[1])
    except _OF_OTHER_KIND:
        return None
    except Exception as error:  # noqa: BLE001 - any error of the kernel is the answer
        return None if str(error).startswith(_OTHER_REASONS) else error
    return None


def _is_small(
    f: OpFacts, args: Any, metas: Mapping[int, TensorMeta], params: Sequence[Any]
) -> bool:
    if f.name in _CHECK_FIRST:
        return True
    elements = sum(max(meta.extent, meta.numel) for meta in metas.values())
    numbers = (abs(n) for n in _numbers((args, tuple(params))))
    return elements <= _MOST_ELEMENTS and all(n <= _MOST_ELEMENTS for n in numbers)


def _numbers(arg: Any) -> Iterable[int]:
    if type(arg) is tuple:
        for item in arg:
            yield from _numbers(item)
    elif type(arg) is int:
        yield arg


def _zeros(meta: TensorMeta) -> torch.Tensor:
    """Return a CPU tensor of zeros that takes no memory while nothing is written to it."""
    nbytes = max(meta.extent, 1) * meta.dtype.itemsize
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=_MAPPED), dtype=torch.uint8)
    t = flat.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
    t = torch._conj(t) if meta.conj else t
    return torch._neg_view(t) if meta.neg else t
