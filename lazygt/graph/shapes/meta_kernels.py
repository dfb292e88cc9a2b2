"""Meta kernels of lazygt's own, for ops that torch's refuse, or give another shape than its others.

They have the op's parameters, tensors as meta tensors, and raise what torch's kernels raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten: Any = torch.ops.aten
#: What a grouped product takes, and what torch's kernels call it.
_CPP_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half",
}
#: Bytes that rows of a grouped product begin at multiples of.
_ALIGNMENT = 16


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's own knows bfloat16 alone."""
    flat = [t.dim() == 2 for t in (a, b)]
    _check_factors(a, b, flat)
    _check(
        (offs is not None) == any(flat),
        "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
    )
    if offs is not None:
        _check(offs.dim() == 1, "offs has to be 1D")
        _check(offs.dtype == torch.int32, "Offsets have to be int32")
    _check(bias is None, "Bias not supported yet")
    _check(out_dtype in (None, a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    shape = _grouped_shape(a, b, offs)
    names = [_CPP_NAMES[t.dtype] for t in (a, b)]
    _check(
        a.dtype == b.dtype,
        f"expected m1 and m2 to have the same dtype, but got: {names[0]} != {names[1]}",
    )
    return _rows_aligned(shape, a.dtype)


def _check_factors(a: torch.Tensor, b: torch.Tensor, flat: list[bool]) -> None:
    for name, t in (("mat_a", a), ("mat_b", b)):
        _check(
            t.dtype in _CPP_NAMES,
            f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {t.dtype}",
        )
    for name, t in (("mat_a", a), ("mat_b", b)):
        _check(t.dim() in (2, 3), f"{name} has to be 2 or 3d")
    _check(
        all(flat) or a.size(-1) == b.size(-2),
        "contraction dimension of mat_a and mat_b must match",
    )
    _check_strides(a)
    _check_strides(b)


def _check_strides(t: torch.Tensor) -> None:
    """Rows or columns have to be without gaps, and to begin at multiples of 16 bytes."""
    (rows, columns), (row, column) = t.shape[-2:], t.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        step = column
    elif column == 1 and row >= max(1, columns):
        step = row
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(t.stride())} for strides and {list(t.shape)} for "
            f"sizes"
        )
    aligned = step * t.element_size() % _ALIGNMENT == 0
    _check(aligned, "strides should be multiple of 16 bytes")


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> list[int]:
    wrong = "matrix batch sizes have to match"
    if a.dim() == 2:
        assert offs is not None
        if b.dim() == 2:
            return [offs.size(0), a.size(0), b.size(1)]
        _check(offs.size(0) == b.size(0), wrong)
        return [a.size(0), b.size(-1)]
    if b.dim() == 2:
        assert offs is not None
        _check(offs.size(0) == a.size(0), wrong)
        return [a.size(1), b.size(1)]
    _check(a.size(0) == b.size(0), "batched dimension has to match")
    return [a.size(0), a.size(1), b.size(-1)]


def _rows_aligned(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    elements = _ALIGNMENT // dtype.itemsize
    row = (shape[-1] + elements - 1) // elements * elements
    stride = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _multi_margin_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """torch's own makes one loss of a target without dims a vector."""
    loss: torch.Tensor = aten.multi_margin_loss.default(x, target, p, margin, weight, reduction)
    return loss if target.dim() else loss.new_empty(())


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own makes the loss of one sample without a batch a vector."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return (loss if target.dim() > 1 else loss.new_empty(())), is_target


def _view_copy(source: torch.Tensor, size: list[int]) -> torch.Tensor:
    """torch's own takes only what could be viewed without a copy."""
    return source.reshape(size).contiguous()


def _cudnn_grid_sampler(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """torch has none."""
    sampled: torch.Tensor = aten.grid_sampler_2d.default(x, grid, 0, 0, True)
    return torch.empty(sampled.shape, dtype=x.dtype, device="meta")


def _cudnn_grid_sampler_backward(
    x: torch.Tensor, grid: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch has none."""
    of_x, of_grid = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x, grid))
    return of_x, of_grid


#: Op -> meta kernel.
META_KERNELS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "aten.cudnn_grid_sampler.default": _cudnn_grid_sampler,
    "aten.cudnn_grid_sampler_backward.default": _cudnn_grid_sampler_backward,
    "aten.multi_margin_loss.default": _multi_margin_loss,
    "aten.multilabel_margin_loss_forward.default": _multilabel_margin_loss,
    "aten.view_copy.default": _view_copy,
}
