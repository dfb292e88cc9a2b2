"""Building blocks of the shape rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern

Metas = tuple[TensorMeta | None, ...]
Shape = tuple[int, ...]


class Results(NamedTuple):
    """Metas and numbers of an op's results, known before they are computed.

    Attributes:
        fresh, written: metas of the tensors it returns anew, and of those it writes.
        ints: the numbers it returns among them.
    """

    fresh: Metas
    written: tuple[TensorMeta, ...] = ()
    ints: tuple[int, ...] = ()


#: The metas of an op's fresh results, or of its first argument once it is written.
Rule = Callable[..., Metas | None]

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@lru_cache(maxsize=65536)
def contiguous(shape: Shape, dtype: torch.dtype) -> TensorMeta:
    """Return the meta of a fresh row-major tensor."""
    return intern(shape, contiguous_stride(shape), dtype)


def is_contiguous(meta: TensorMeta) -> bool:
    """Return whether the strides are row-major, at any offset."""
    return meta.plain or meta.stride == contiguous_stride(meta.shape)


def is_dense(meta: TensorMeta) -> bool:
    """Return whether elements lie in places of their own, without gaps.

    ``empty_like`` and its kin keep the strides of such a tensor.
    """
    step = 1
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def broadcast(shapes: list[Shape]) -> Shape | None:
    """Return the common shape of shapes without zeros; None when they do not fit."""
    first = shapes[0] if shapes else None
    if first is None or shapes.count(first) == len(shapes):
        return first
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    common = tuple(map(max, *full))
    fits = all(s in (1, c) for shape in full for s, c in zip(shape, common, strict=True))
    return common if fits else None


def position(dim: Any, rank: int) -> int | None:
    """Return a dimension counted from the front; None when there is no such dimension."""
    if type(dim) is not int or not -rank <= dim < rank:
        return None
    return dim % rank


def same_float(*metas: TensorMeta) -> bool:
    """Return whether all are of one and the same float dtype."""
    dtype = metas[0].dtype
    return dtype in FLOATS and all(m.dtype is dtype for m in metas)


def seen(source: TensorMeta, shape: Iterable[int], stride: Iterable[int], offset: int) -> Metas:
    """Return the meta of a view of ``source``."""
    return (intern(tuple(shape), tuple(stride), source.dtype, offset),)


def without(items: Shape, at: int) -> Shape:
    """Return a shape, or strides, without dimension ``at``."""
    return items[:at] + items[at + 1 :]
