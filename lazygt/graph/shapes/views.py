"""Views: any strides, any offset."""

from __future__ import annotations

import math

from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.shapes.base import Metas, Rule, Shape, is_contiguous, position, seen, without


def _permute(source: TensorMeta, dims: tuple[int, ...]) -> Metas | None:
    rank = len(source.shape)
    order = [dim + rank if dim < 0 else dim for dim in dims]
    if sorted(order) != list(range(rank)):
        return None
    shape = [source.shape[d] for d in order]
    return seen(source, shape, [source.stride[d] for d in order], source.offset)


def _transpose(source: TensorMeta, dim0: int, dim1: int) -> Metas | None:
    first, second = position(dim0, len(source.shape)), position(dim1, len(source.shape))
    if first is None or second is None:
        return None
    order = list(range(len(source.shape)))
    order[first], order[second] = second, first
    return _permute(source, tuple(order))


def _t(source: TensorMeta) -> Metas | None:
    if len(source.shape) != 2:
        return None
    return seen(source, source.shape[::-1], source.stride[::-1], source.offset)


def _view(source: TensorMeta, shape: Shape) -> Metas | None:
    if not is_contiguous(source):
        return None
    sizes = _with_guess(shape, source.numel)
    return None if sizes is None else seen(source, sizes, contiguous_stride(sizes), source.offset)


def _unsafe_view(source: TensorMeta, shape: Shape) -> Metas | None:
    return _view(source, shape) if not source.offset else None


def _with_guess(shape: Shape, numel: int) -> Shape | None:
    """Return the shape with its one -1 replaced; None if it does not hold ``numel`` elements."""
    known = math.prod(size for size in shape if size != -1)
    if any(size < -1 for size in shape) or shape.count(-1) > 1 or known == 0:
        return None
    sizes = tuple(numel // known if size == -1 else size for size in shape)
    return sizes if math.prod(sizes) == numel else None


def _expand(source: TensorMeta, shape: Shape, *, implicit: bool = False) -> Metas | None:
    new = len(shape) - len(source.shape)
    # a dimension of one in front has strides of its own kind
    if new < 0 or any(size < 2 for size in shape[:new]):
        return None
    pairs = zip(shape[new:], source.shape, source.stride, strict=True)
    sizes, steps = list(shape[:new]), [0] * new
    for size, have, step in pairs:
        if size not in (-1, have) and (have != 1 or size < 1):
            return None
        sizes.append(have if size == -1 else size)
        steps.append(step if size in (-1, have) else 0)
    return seen(source, sizes, steps, source.offset)


def _slice(
    source: TensorMeta,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Metas | None:
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
    return seen(source, shape, stride, offset)


def _narrow(source: TensorMeta, dim: int, start: int, length: int) -> Metas | None:
    at = position(dim, len(source.shape))
    if at is None or not 0 <= start <= start + length <= source.shape[at]:
        return None
    return _slice(source, at, start, start + length)


def _select(source: TensorMeta, dim: int, index: int) -> Metas | None:
    at = position(dim, len(source.shape))
    if at is None:
        return None
    which = position(index, source.shape[at])
    if which is None:
        return None
    offset = source.offset + which * source.stride[at]
    return seen(source, without(source.shape, at), without(source.stride, at), offset)


def _unbind(source: TensorMeta, dim: int = 0) -> Metas | None:
    at = position(dim, len(source.shape))
    if at is None:
        return None
    metas: list[TensorMeta | None] = []
    for index in range(source.shape[at]):
        metas += _select(source, at, index) or ()
    return tuple(metas)


def _unsqueeze(source: TensorMeta, dim: int) -> Metas | None:
    rank = len(source.shape)
    at = position(dim, rank + 1)
    if at is None:
        return None
    step = source.shape[at] * source.stride[at] if at < rank else 1
    shape = (*source.shape[:at], 1, *source.shape[at:])
    return seen(source, shape, (*source.stride[:at], step, *source.stride[at:]), source.offset)


def _squeeze(source: TensorMeta, dims: int | Shape | None = None) -> Metas | None:
    rank = len(source.shape)
    wanted = range(rank) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    gone = {position(dim, rank) for dim in wanted}
    if None in gone or len(gone) != len(wanted):
        return None
    kept = [d for d in range(rank) if d not in gone or source.shape[d] != 1]
    shape, stride = [source.shape[d] for d in kept], [source.stride[d] for d in kept]
    return seen(source, shape, stride, source.offset)


def _detach(source: TensorMeta) -> Metas:
    return seen(source, source.shape, source.stride, source.offset)


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
