"""Shape rules of copies, fills, products, reductions and views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern

# -- building blocks of the shape rules ------------------------------------------------------------

Metas = tuple[TensorMeta | None, ...]
Shape = tuple[int, ...]


class Results(NamedTuple):
    """Metas and ints of an op's results, known before they are computed."""

    fresh: Metas  # fresh, written: metas of the new tensors, and of the written ones
    written: tuple[TensorMeta, ...] = ()
    ints: tuple[int, ...] = ()  # ints among the results


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
    """Return whether the elements fill memory without gaps or overlap.

    ``empty_like`` and its variants preserve the strides of such a tensor.
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


def view_meta(
    source: TensorMeta, shape: Iterable[int], stride: Iterable[int], offset: int
) -> Metas:
    """Return the meta of a view of ``source``, as the results of a rule."""
    return (intern(tuple(shape), tuple(stride), source.dtype, offset),)


def without(items: Shape, at: int) -> Shape:
    """Return a tuple without the item at dimension ``at``."""
    return items[:at] + items[at + 1 :]


# -- copies, fills, products and reductions --------------------------------------------------------


def _like(
    source: TensorMeta,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **where: Any,
) -> Metas | None:
    """Shape rule of ``empty_like`` and its variants, for row-major results."""
    if memory_format is torch.contiguous_format or (
        memory_format in (None, torch.preserve_format) and is_contiguous(source)
    ):
        return (contiguous(source.shape, dtype or source.dtype),)
    return None


def _full_like(source: TensorMeta, value: Any, **kwargs: Any) -> Metas | None:
    """Shape rule of ``full_like``."""
    return _like(source, **kwargs)


def _clone(source: TensorMeta, *, memory_format: torch.memory_format | None = None) -> Metas | None:
    """Shape rule of ``clone``."""
    return _like(source, memory_format=memory_format)


def _cat(tensors: tuple[TensorMeta, ...], dim: int = 0) -> Metas | None:
    """Shape rule of ``cat`` for tensors of one dtype and number of dims."""
    first = tensors[0]
    at = position(dim, len(first.shape))
    # one row-major tensor makes the result row-major; so do numbers of dims other than 4 and 5
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
    """Shape rule of ``stack`` for row-major tensors of one shape and dtype."""
    first = tensors[0]
    at = position(dim, len(first.shape) + 1)
    same = all(
        t.shape == first.shape and t.dtype == first.dtype and is_contiguous(t) for t in tensors
    )
    if at is None or not same:
        return None
    return (contiguous((*first.shape[:at], len(tensors), *first.shape[at:]), first.dtype),)


def _isin(elements: TensorMeta, among: TensorMeta, **flags: Any) -> Metas | None:
    """Shape rule of ``isin`` for integers."""
    are_integers = _INDEX_DTYPES.issuperset((elements.dtype, among.dtype))
    return (contiguous(elements.shape, torch.bool),) if are_integers else None


_INDEX_DTYPES = frozenset({torch.int32, torch.int64})


def _copied_into(
    target: TensorMeta, source: TensorMeta, non_blocking: bool = False
) -> Metas | None:
    """Shape rule of ``copy_`` into a row-major tensor."""
    fits = is_contiguous(target) and broadcast([target.shape, source.shape]) == target.shape
    return (target,) if fits else None


def _filled(target: TensorMeta, *numbers: Any) -> Metas | None:
    """Shape rule of in-place fills and draws of a row-major float tensor."""
    real = all(type(number) in (bool, int, float) for number in numbers)
    return (target,) if real and is_contiguous(target) and target.dtype in FLOATS else None


def _mm(a: TensorMeta, b: TensorMeta) -> Metas | None:
    """Shape rule of a matrix product."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return None
    return (contiguous((a.shape[0], b.shape[1]), a.dtype),) if same_float(a, b) else None


def _addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, **scales: Any) -> Metas | None:
    """Shape rule of ``bias + a @ b``."""
    product = _mm(a, b)
    if product is None or scales or product[0] is None or not same_float(bias, a):
        return None
    return product if broadcast([bias.shape, product[0].shape]) == product[0].shape else None


def _bmm(a: TensorMeta, b: TensorMeta) -> Metas | None:
    """Shape rule of a batched matrix product."""
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
    """Shape rule of a sum or mean of floats over some dims (all if ``dims`` is empty)."""
    rank = len(source.shape)
    if not is_contiguous(source) or source.dtype not in FLOATS or dtype not in (None, source.dtype):
        return None
    reduced_dims = dims if isinstance(dims, tuple) and dims else range(rank)
    reduced = {position(dim, rank) for dim in reduced_dims}
    if None in reduced or len(reduced) != len(reduced_dims):
        return None
    if keepdim:
        shape = tuple(1 if d in reduced else size for d, size in enumerate(source.shape))
    else:
        shape = tuple(size for d, size in enumerate(source.shape) if d not in reduced)
    return (contiguous(shape, source.dtype),)


def _reduced_fully(source: TensorMeta, *, dtype: torch.dtype | None = None) -> Metas | None:
    """Shape rule of a sum or mean over all dims."""
    return _reduced(source, dtype=dtype)


def _select_backward(grad: TensorMeta, shape: Shape, dim: int, index: int) -> Metas | None:
    """Shape rule of the backward of ``select``: zeros, with ``grad`` at the index."""
    at = position(dim, len(shape))
    if at is None or grad.shape != without(shape, at) or position(index, shape[at]) is None:
        return None
    return (contiguous(shape, grad.dtype),)


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
    "aten.select_backward.default": _select_backward,
    "aten.isin.Tensor_Tensor": _isin,
    "aten.sum.dim_IntList": _reduced,
    "aten.sum.default": _reduced_fully,
    "aten.mean.dim": _reduced,
    "aten.mean.default": _reduced_fully,
}

#: Op -> rule for its first argument, which it writes and returns.
WRITING: dict[str, Rule] = {
    "aten.copy_.default": _copied_into,
    "aten.zero_.default": _filled,
    "aten.fill_.Scalar": _filled,
    "aten.normal_.default": _filled,
    "aten.uniform_.default": _filled,
}


# -- views -----------------------------------------------------------------------------------------


def _permute(source: TensorMeta, dims: tuple[int, ...]) -> Metas | None:
    """Shape rule of ``permute``: reordered shape and strides."""
    rank = len(source.shape)
    order = [dim + rank if dim < 0 else dim for dim in dims]
    if sorted(order) != list(range(rank)):
        return None
    shape = [source.shape[d] for d in order]
    return view_meta(source, shape, [source.stride[d] for d in order], source.offset)


def _transpose(source: TensorMeta, dim0: int, dim1: int) -> Metas | None:
    """Shape rule of ``transpose``."""
    first, second = position(dim0, len(source.shape)), position(dim1, len(source.shape))
    if first is None or second is None:
        return None
    order = list(range(len(source.shape)))
    order[first], order[second] = second, first
    return _permute(source, tuple(order))


def _t(source: TensorMeta) -> Metas | None:
    """Shape rule of ``t`` of a matrix."""
    if len(source.shape) != 2:
        return None
    return view_meta(source, source.shape[::-1], source.stride[::-1], source.offset)


def _view(source: TensorMeta, shape: Shape) -> Metas | None:
    """Shape rule of ``view``."""
    sizes = _infer_size(shape, source.numel)
    if sizes is None:
        return None
    stride = contiguous_stride(sizes) if is_contiguous(source) else _view_stride(source, sizes)
    return None if stride is None else view_meta(source, sizes, stride, source.offset)


def _view_stride(source: TensorMeta, sizes: Shape) -> Shape | None:
    """Return the strides of a view of these sizes; None if no strides show them.

    torch's ``computeStride``: dims of the source that lie in memory without gaps are one block, and
    each block is split into dims of the view.
    """
    stride, blocks = [1] * len(sizes), _blocks(source)
    at = len(sizes) - 1
    for block_numel, step in blocks:
        numel = 1
        while at >= 0 and (numel < block_numel or sizes[at] == 1):
            stride[at] = numel * step
            numel *= sizes[at]
            at -= 1
        if numel != block_numel:
            return None
    return tuple(stride) if at < 0 else None


def _blocks(source: TensorMeta) -> list[tuple[int, int]]:
    """Return (numel, step) of each run of dims without gaps between them, innermost first."""
    blocks: list[tuple[int, int]] = []
    numel, step = 1, source.stride[-1] if source.stride else 1
    for d in range(len(source.shape) - 1, -1, -1):
        numel *= source.shape[d]
        if d == 0 or (source.shape[d - 1] != 1 and source.stride[d - 1] != numel * step):
            blocks.append((numel, step))
            numel, step = 1, source.stride[d - 1]
    return blocks


def _unsafe_view(source: TensorMeta, shape: Shape) -> Metas | None:
    """Shape rule of ``_unsafe_view``, for sources at offset 0."""
    return _view(source, shape) if not source.offset else None


def _infer_size(shape: Shape, numel: int) -> Shape | None:
    """Return the shape with its one -1 replaced; None if it does not have ``numel`` elements."""
    known_numel = math.prod(size for size in shape if size != -1)
    if any(size < -1 for size in shape) or shape.count(-1) > 1 or known_numel == 0:
        return None
    sizes = tuple(numel // known_numel if size == -1 else size for size in shape)
    return sizes if math.prod(sizes) == numel else None


def _expand(source: TensorMeta, shape: Shape, *, implicit: bool = False) -> Metas | None:
    """Shape rule of ``expand``: stride 0 for dims that are broadcast."""
    new = len(shape) - len(source.shape)
    # torch computes strides of new leading dims of size 1 in another way
    if new < 0 or any(size < 2 for size in shape[:new]):
        return None
    pairs = zip(shape[new:], source.shape, source.stride, strict=True)
    sizes, steps = list(shape[:new]), [0] * new
    for size, old_size, step in pairs:
        if size not in (-1, old_size) and (old_size != 1 or size < 1):
            return None
        sizes.append(old_size if size == -1 else size)
        steps.append(step if size in (-1, old_size) else 0)
    return view_meta(source, sizes, steps, source.offset)


def _slice(
    source: TensorMeta,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Metas | None:
    """Shape rule of a nonempty slice."""
    at = position(dim, len(source.shape))
    if at is None or type(step) is not int or step < 1:
        return None
    first, last, _ = slice(start, end).indices(source.shape[at])
    if last <= first:
        return None
    shape, stride = list(source.shape), list(source.stride)
    shape[at] = (last - first + step - 1) // step
    offset = source.offset + first * stride[at]
    stride[at] *= step
    return view_meta(source, shape, stride, offset)


def _narrow(source: TensorMeta, dim: int, start: int, length: int) -> Metas | None:
    """Shape rule of ``narrow``, as a slice."""
    at = position(dim, len(source.shape))
    if at is None or not 0 <= start <= start + length <= source.shape[at]:
        return None
    return _slice(source, at, start, start + length)


def _select(source: TensorMeta, dim: int, index: int) -> Metas | None:
    """Shape rule of ``select``: the view without the indexed dim."""
    at = position(dim, len(source.shape))
    if at is None:
        return None
    which = position(index, source.shape[at])
    if which is None:
        return None
    offset = source.offset + which * source.stride[at]
    return view_meta(source, without(source.shape, at), without(source.stride, at), offset)


def _unbind(source: TensorMeta, dim: int = 0) -> Metas | None:
    """Shape rule of ``unbind``: one select for each index."""
    at = position(dim, len(source.shape))
    if at is None:
        return None
    metas: list[TensorMeta | None] = []
    for index in range(source.shape[at]):
        metas += _select(source, at, index) or ()
    return tuple(metas)


def _unsqueeze(source: TensorMeta, dim: int) -> Metas | None:
    """Shape rule of ``unsqueeze``."""
    rank = len(source.shape)
    at = position(dim, rank + 1)
    if at is None:
        return None
    step = source.shape[at] * source.stride[at] if at < rank else 1
    shape = (*source.shape[:at], 1, *source.shape[at:])
    return view_meta(source, shape, (*source.stride[:at], step, *source.stride[at:]), source.offset)


def _squeeze(source: TensorMeta, dims: int | Shape | None = None) -> Metas | None:
    """Shape rule of ``squeeze``: dims of size 1 are removed."""
    rank = len(source.shape)
    candidates = range(rank) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    squeezed = {position(dim, rank) for dim in candidates}
    if None in squeezed or len(squeezed) != len(candidates):
        return None
    remaining = [d for d in range(rank) if d not in squeezed or source.shape[d] != 1]
    shape, stride = [source.shape[d] for d in remaining], [source.stride[d] for d in remaining]
    return view_meta(source, shape, stride, source.offset)


def _detach(source: TensorMeta) -> Metas:
    """Shape rule of ``detach``: the same view."""
    return view_meta(source, source.shape, source.stride, source.offset)


#: Op -> rule.
VIEWS: dict[str, Rule] = {
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.view.default": _view,
    "aten._unsafe_view.default": _unsafe_view,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.detach.default": _detach,
}
