"""Composite ops whose C++ code chooses by device: the choices of the workers' device.

torch decomposes composite ops above the dispatcher's Python key, in C++ that chooses by device. It
does not know device ``lazygt``, so each such op makes here the choice of eager torch on the
workers' device: this keeps numbers equal, bit for bit on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazygt.record.context import workers_device
from lazygt.record.formulas.attention_kernel import attention

aten: Any = torch.ops.aten

#: Composite ops that torch has a CPU kernel for. They are recorded as one op: their
#: decompositions, which torch uses for a device without a kernel, round differently.
CPU_KERNELS = ("silu_backward", "mish_backward", "native_channel_shuffle")
#: Composite ops that have a kernel on GPUs only.
GPU_KERNELS = ("_fused_rms_norm",)


def register_decompositions(record: Callable[..., Any] | None) -> torch.library.Library:
    """Register the kernels of `DECOMPOSED`, and those that record `CPU_KERNELS` undecomposed.

    Args:
        record: function that records an op with its arguments, undecomposed; None: C++ does.
    """
    library = _library(DECOMPOSED)
    if record is not None:
        _record_undecomposed(library, CPU_KERNELS, record)
    return library


def register_for_gpus(record: Callable[..., Any] | None) -> torch.library.Library:
    """Register kernels that choose otherwise on GPUs only.

    They are apart so that CPU sessions run no Python for them.

    Args:
        record: see `register_decompositions`.
    """
    library = _library({"rms_norm": _rms_norm, "grid_sampler": _grid_sampler})
    if record is not None:
        _record_undecomposed(library, GPU_KERNELS, record)
    return library


def _library(choices: Mapping[str, Callable[..., Any]]) -> torch.library.Library:
    """Register kernels by name, with and without autograd."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in choices.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")
    return library


def _record_undecomposed(
    library: torch.library.Library, names: Sequence[str], record: Callable[..., Any]
) -> None:
    """Register kernels that record these ops as one op each."""
    for name in names:
        library.impl(name, functools.partial(record, getattr(aten, name).default), "PrivateUse1")


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Record dropout as torch's CPU (Bernoulli noise) or CUDA (fused) code does."""
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    if workers_device() != "cpu":
        return aten.native_dropout.default(x, p, train)[0]
    noise = torch.empty_like(x).bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


def _dropout_(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Record in-place dropout by Bernoulli noise."""
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul_(torch.zeros((), dtype=x.dtype, device=x.device))
    noise = torch.empty_like(x).bernoulli_(1 - p)
    noise.div_(1 - p)
    return x.mul_(noise)


def _rms_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Record the fused kernel on GPUs where torch has one for such operands; on CPUs plain ops."""
    fits = list(x.shape[x.dim() - len(shape) :]) == list(shape)
    if workers_device() == "cpu" and fits and (weight is None or list(weight.shape) == list(shape)):
        return aten._fused_rms_norm.default.decompose(x, shape, weight, eps)[0]
    return aten.rms_norm.default.decompose(x, shape, weight, eps)


def _grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, interpolation: int, padding: int, align_corners: bool
) -> torch.Tensor:
    """Record cuDNN's kernel where torch uses it: bilinear, zero padding, aligned corners."""
    if (
        workers_device() != "cpu"
        and torch.backends.cudnn.enabled
        and (interpolation, padding, align_corners) == (0, 0, True)
        and x.dim() == 4
        and x.shape[1] <= 1024
        and x.dtype == grid.dtype
        and x.dtype in _CUDNN_DTYPES
        and all(0 < t.numel() <= torch.iinfo(torch.int32).max for t in (x, grid))
    ):
        return aten.cudnn_grid_sampler.default(x, grid)
    return aten.grid_sampler.default.decompose(x, grid, interpolation, padding, align_corners)


_CUDNN_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})


def _fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, layout: Any = None, device: Any = None,
             pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """Concatenate two ranges; torch's own code writes through a resized view."""
    upper = torch.arange(0, (n + 1) // 2, dtype=dtype or torch.get_default_dtype(), device=device)
    lower = torch.arange(-(n // 2), 0, dtype=upper.dtype, device=device)
    return torch.cat([upper, lower]).mul_(1.0 / (n * d))


def _kaiser_window(size: int, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None,
                   layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """Compute the window on the client and upload it: only torch's devices have a kernel."""
    window = torch.kaiser_window(size, periodic, beta, dtype=dtype, device="cpu")
    return window.to(device)


def _eigvals(a: torch.Tensor) -> torch.Tensor:
    """Return eigenvalues; eigenvectors are computed only for a gradient: they change the bits."""
    if torch.is_grad_enabled() and a.requires_grad:
        return aten.linalg_eig.default(a)[0]
    return aten._linalg_eigvals.default(a)


def _eigvalsh(a: torch.Tensor, uplo: str = "L") -> torch.Tensor:
    """Return eigenvalues of a Hermitian matrix; eigenvectors are computed only for a gradient."""
    vectors = torch.is_grad_enabled() and a.requires_grad
    return aten._linalg_eigh.default(a, uplo, vectors)[0]


def _svdvals(a: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    """Return singular values; singular vectors are computed only for a gradient."""
    vectors = torch.is_grad_enabled() and a.requires_grad
    return aten._linalg_svd.default(a, False, vectors, driver=driver)[1]


def _tensor_split(x: torch.Tensor, sections: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """Split at sections given as a tensor: a sync point, since shapes depend on them."""
    if sections.dim() > 1 or sections.dtype != torch.int64:
        raise RuntimeError(
            f"tensor_split expected tensor_indices_or_sections to be a zero- or one-dimensional "
            f"tensor of torch.int64, but got {sections.dim()} dimensions of {sections.dtype}"
        )
    return list(torch.tensor_split(x, sections.tolist(), dim))


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "fft_fftfreq": _fftfreq,
    "kaiser_window": _kaiser_window,
    "kaiser_window.periodic": _kaiser_window,
    "kaiser_window.beta": _kaiser_window,
    "dropout_": _dropout_,
    "scaled_dot_product_attention": attention,
    "linalg_eigvals": _eigvals,
    "linalg_eigvalsh": _eigvalsh,
    "linalg_svdvals": _svdvals,
    "tensor_split.tensor_indices_or_sections": _tensor_split,
}
