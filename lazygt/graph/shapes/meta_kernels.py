"""Meta kernels of lazygt's own, where torch's refuse valid calls or give wrong shapes.

They have the op's parameters, tensors as meta tensors, and raise the errors of torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten: Any = torch.ops.aten
#: Dtypes of a grouped product, with their names in torch's kernels.
_CPP_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half",
}
#: Names of the dtypes of recurrent layers in torch's errors.
_TYPE_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}
#: Alignment of the rows of a grouped product, in bytes.
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
    """Infer a grouped product; torch's own knows bfloat16 alone."""
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
    """Check that rows or columns have no gaps, and begin at multiples of 16 bytes."""
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
    """Infer the loss; torch's own makes one loss of a target without dims a vector."""
    loss: torch.Tensor = aten.multi_margin_loss.default(x, target, p, margin, weight, reduction)
    return loss if target.dim() else loss.new_empty(())


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Infer the loss; torch's own makes that of one sample without a batch a vector."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return (loss if target.dim() > 1 else loss.new_empty(())), is_target


def _view_copy(source: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Infer a reshaped copy; torch's own refuses a tensor that needs more than a view."""
    return source.reshape(size).contiguous()


def _cudnn_grid_sampler(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Infer the samples; torch has no meta kernel."""
    sampled: torch.Tensor = aten.grid_sampler_2d.default(x, grid, 0, 0, True)
    return torch.empty(sampled.shape, dtype=x.dtype, device="meta")


def _cudnn_grid_sampler_backward(
    x: torch.Tensor, grid: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Infer both gradients; torch has no meta kernel."""
    of_x, of_grid = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x, grid))
    return of_x, of_grid


def _cudnn_rnn(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Infer a recurrent layer's results.

    torch's own packs no weights, and gives batch-first outputs row-major. Only cuDNN knows the
    sizes of the last two results, reserve and packed weights.
    """
    _check_same_dtype(x, [hx, cx], "hidden")
    _check_same_dtype(x, weight, "parameter")
    directions, width = 2 if bidirectional else 1, proj_size or hidden_size
    samples = batch_sizes[0] if batch_sizes else x.size(0 if batch_first else 1)
    states = [num_layers * directions, samples]
    _check_size(hx, [*states, width], "hidden")
    if cx is not None:
        _check_size(cx, [*states, hidden_size], "cell")
    out = _steps_first(x, batch_first, batch_sizes, width * directions)
    hy = hx.new_empty(hx.shape)
    cy = hx.new_empty(0 if cx is None else cx.shape)
    packed = x.new_empty(sum(w.numel() for w in weight)) if weight_buf is None else weight_buf
    return out, hy, cy, x.new_empty(0, dtype=torch.uint8), packed


def _check_same_dtype(x: torch.Tensor, tensors: Sequence[torch.Tensor | None], name: str) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype != x.dtype:
            expected, given = (_TYPE_NAMES.get(t.dtype, str(t.dtype)) for t in (x, tensor))
            raise RuntimeError(
                f"Input and {name} tensors are not the same dtype, found input tensor with "
                f"{expected} and {name} tensor with {given}"
            )


def _check_size(state: torch.Tensor, expected: list[int], name: str) -> None:
    size = [*state.shape]
    _check(size == expected, f"Expected {name} size {expected}, got {size}")


def _steps_first(
    x: torch.Tensor, batch_first: bool, batch_sizes: list[int], width: int
) -> torch.Tensor:
    """Return a sequence like ``x``, which lies in memory step by step."""
    if not batch_first or batch_sizes:
        return x.new_empty((*x.shape[:-1], width))
    return x.new_empty((x.size(1), x.size(0), width)).transpose(0, 1)


def _cudnn_rnn_backward(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    output: torch.Tensor,
    grad_output: torch.Tensor | None,
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: torch.Tensor | None,
    reserve: torch.Tensor,
    output_mask: list[bool],
) -> tuple[Any, ...]:
    """Infer the gradients; torch has no meta kernel."""
    _check(train, "cudnn RNN backward can only be called in training mode")
    of_x = _steps_first(x, batch_first, batch_sizes, x.size(-1))
    of_hx, of_cx = (None if t is None else t.new_empty(t.shape) for t in (hx, cx))
    return of_x, of_hx, of_cx, [w.new_empty(w.shape) for w in weight] if output_mask[3] else []


#: Op -> meta kernel.
META_KERNELS: dict[str, Callable[..., Any]] = {
    "aten._cudnn_rnn.default": _cudnn_rnn,
    "aten._cudnn_rnn_backward.default": _cudnn_rnn_backward,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.cudnn_grid_sampler.default": _cudnn_grid_sampler,
    "aten.cudnn_grid_sampler_backward.default": _cudnn_grid_sampler_backward,
    "aten.multi_margin_loss.default": _multi_margin_loss,
    "aten.multilabel_margin_loss_forward.default": _multilabel_margin_loss,
    "aten.view_copy.default": _view_copy,
}
