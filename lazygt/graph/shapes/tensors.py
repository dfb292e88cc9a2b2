"""Copies, fills, products and reductions: fresh row-major tensors."""

from __future__ import annotations

from typing import Any

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.shapes.base import (
    FLOATS,
    Metas,
    Rule,
    Shape,
    broadcast,
    contiguous,
    is_contiguous,
    position,
    same_float,
    without,
)


def _like(
    source: TensorMeta,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **where: Any,
) -> Metas | None:
    if memory_format is torch.contiguous_format or (
        memory_format in (None, torch.preserve_format) and is_contiguous(source)
    ):
        return (contiguous(source.shape, dtype or source.dtype),)
    return None


def _full_like(source: TensorMeta, value: Any, **kwargs: Any) -> Metas | None:
    return _like(source, **kwargs)


def _clone(source: TensorMeta, *, memory_format: torch.memory_format | None = None) -> Metas | None:
    return _like(source, memory_format=memory_format)


def _cat(tensors: tuple[TensorMeta, ...], dim: int = 0) -> Metas | None:
    first = tensors[0]
    at = position(dim, len(first.shape))
    # a row-major one among them decides, and of other ranks than 4 and 5 there is no other result
    decided = len(first.shape) not in (4, 5) or any(map(is_contiguous, tensors))
    if at is None or not decided or any(t.dtype != first.dtype for t in tensors):
        return None
    if any(len(t.shape) != len(first.shape) for t in tensors):
        return None
    rest = without(first.shape, at)
    if any(without(t.shape, at) != rest for t in tensors):
        return None
    total = sum(t.shape[at] for t in tensors)
    return (contiguous((*first.shape[:at], total, *first.shape[at + 1 :]), first.dtype),)


def _stack(tensors: tuple[TensorMeta, ...], dim: int = 0) -> Metas | None:
    first = tensors[0]
    at = position(dim, len(first.shape) + 1)
    same = all(
        t.shape == first.shape and t.dtype == first.dtype and is_contiguous(t) for t in tensors
    )
    if at is None or not same:
        return None
    return (contiguous((*first.shape[:at], len(tensors), *first.shape[at:]), first.dtype),)


def _isin(elements: TensorMeta, among: TensorMeta, **flags: Any) -> Metas | None:
    numbers = _WHOLE.issuperset((elements.dtype, among.dtype))
    return (contiguous(elements.shape, torch.bool),) if numbers else None


_WHOLE = frozenset({torch.int32, torch.int64})


def _copied_into(
    target: TensorMeta, source: TensorMeta, non_blocking: bool = False
) -> Metas | None:
    fits = is_contiguous(target) and broadcast([target.shape, source.shape]) == target.shape
    return (target,) if fits else None


def _filled(target: TensorMeta, *numbers: Any) -> Metas | None:
    real = all(type(number) in (bool, int, float) for number in numbers)
    return (target,) if real and is_contiguous(target) and target.dtype in FLOATS else None


def _mm(a: TensorMeta, b: TensorMeta) -> Metas | None:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    return (contiguous((a.shape[0], b.shape[1]), a.dtype),) if same_float(a, b) else None


def _addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, **scales: Any) -> Metas | None:
    product = _mm(a, b)
    if product is None or scales or product[0] is None or not same_float(bias, a):
        return None
    return product if broadcast([bias.shape, product[0].shape]) == product[0].shape else None


def _bmm(a: TensorMeta, b: TensorMeta) -> Metas | None:
    if len(a.shape) != 3 or len(b.shape) != 3 or a.shape[0] != b.shape[0]:
        return None
    if a.shape[2] != b.shape[1] or not same_float(a, b):
        return None
    return (contiguous((*a.shape[:2], b.shape[2]), a.dtype),)


def _reduced(
    source: TensorMeta,
    dims: int | Shape | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Metas | None:
    """Return the meta of a sum or mean of floats over some dimensions."""
    rank = len(source.shape)
    if not is_contiguous(source) or source.dtype not in FLOATS or dtype not in (None, source.dtype):
        return None
    wanted = dims if isinstance(dims, tuple) and dims else range(rank)
    gone = {position(dim, rank) for dim in wanted}
    if None in gone or len(gone) != len(wanted):
        return None
    if keepdim:
        shape = tuple(1 if d in gone else size for d, size in enumerate(source.shape))
    else:
        shape = tuple(size for d, size in enumerate(source.shape) if d not in gone)
    return (contiguous(shape, source.dtype),)


def _reduced_whole(source: TensorMeta, *, dtype: torch.dtype | None = None) -> Metas | None:
    return _reduced(source, dtype=dtype)


#: Op -> rule.
TENSORS: dict[str, Rule] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.clone.default": _clone,
    "aten.empty_like.default": _like,
    "aten.zeros_like.default": _like,
    "aten.ones_like.default": _like,
    "aten.full_like.default": _full_like,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.isin.Tensor_Tensor": _isin,
    "aten.sum.dim_IntList": _reduced,
    "aten.sum.default": _reduced_whole,
    "aten.mean.dim": _reduced,
    "aten.mean.default": _reduced_whole,
}

#: Op -> rule for its first argument, which it writes and returns.
WRITING: dict[str, Rule] = {
    "aten.copy_.default": _copied_into,
    "aten.zero_.default": _filled,
    "aten.fill_.Scalar": _filled,
    "aten.normal_.default": _filled,
    "aten.uniform_.default": _filled,
}
