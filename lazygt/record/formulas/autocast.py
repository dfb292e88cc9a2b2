"""``torch.autocast("lazygt", dtype=...)``: which ops compute in which precision.

The lists are those of CUDA's autocast where the workers have GPUs and of CPU's where they have
not, read from torch's documentation of autocast op behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LOW = (
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "bmm", "mm",
    "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear", "_convolution.deprecated", "matmul",
    "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "prelu",
    "scaled_dot_product_attention", "_native_multi_head_attention", "_convolution", "convolution",
)  # fmt: skip
_HIGH = (
    "avg_pool3d", "binary_cross_entropy", "grid_sampler", "polar", "prod", "prod.dim_int",
    "quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar", "stft", "stft.center",
    "cdist", "grid_sampler_2d", "grid_sampler_3d", "trace", "view_as_complex", "cholesky",
    "cholesky_inverse", "cholesky_solve", "inverse", "lu_solve", "orgqr", "ormqr", "pinverse",
    "max_pool3d", "max_unpool2d", "max_unpool3d", "adaptive_avg_pool3d", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "mse_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "poisson_nll_loss",
    "smooth_l1_loss", "cross_entropy_loss", "l1_loss", "huber_loss", "margin_ranking_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "ctc_loss.IntList",
    "ctc_loss.Tensor", "kl_div", "multilabel_margin_loss", "binary_cross_entropy_with_logits",
    "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "linalg_cond", "linalg_matrix_rank",
    "linalg_solve", "linalg_cholesky", "linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh",
    "linalg_inv", "linalg_householder_product", "linalg_tensorinv", "linalg_tensorsolve",
)  # fmt: skip
_WIDEST = ("stack", "cat", "index_copy")

_KEY: Any = torch._C.DispatchKey
_KEYS = torch._C.DispatchKeySet(_KEY.AutocastPrivateUse1)


def register_autocast() -> torch.library.Library:
    """Register the casting kernels for device ``lazygt``."""
    library = torch.library.Library("aten", "IMPL")
    rules: list[tuple[tuple[str, ...], Callable[[tuple[Any, ...]], torch.dtype | None]]] = [
        (_LOW, lambda args: torch.get_autocast_dtype("lazygt")),
        (_HIGH, lambda args: torch.float32),
        (_WIDEST, _widest),
    ]
    for names, choose in rules:
        for name in names:
            overload = _overload(name)
            if overload is not None:
                library.impl(name, _casting(overload, choose), "AutocastPrivateUse1")
    return library


def fall_through(library: torch.library.Library) -> None:
    """Let every other op pass autocast by; ``library`` is one of the namespace ``_``."""
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _overload(name: str) -> torch._ops.OpOverload | None:
    packet, _, which = name.partition(".")
    ops = getattr(torch.ops.aten, packet, None)
    return getattr(ops, which or "default", None)


def _casting(
    overload: torch._ops.OpOverload, choose: Callable[[tuple[Any, ...]], torch.dtype | None]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if dtype is None:
                return overload(*args, **kwargs)
            cast = [_cast(a, dtype) for a in args]
            return overload(*cast, **{name: _cast(a, dtype) for name, a in kwargs.items()})

    return kernel


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, torch.Tensor):
        eligible = arg.is_floating_point() and arg.dtype != torch.float64
        return arg.to(dtype) if eligible and arg.dtype != dtype else arg
    if isinstance(arg, (list, tuple)):
        return [_cast(item, dtype) for item in arg]
    return arg


def _widest(args: tuple[Any, ...]) -> torch.dtype | None:
    dtypes = [
        t.dtype
        for a in args
        for t in (a if isinstance(a, (list, tuple)) else (a,))
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return torch.float32 if torch.float32 in dtypes else None
