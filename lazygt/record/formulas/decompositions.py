"""Composite ops whose C++ code asks which device it runs on.

torch decomposes composite ops above the dispatcher's Python key, in C++ that chooses by device.
Device ``lazygt`` is none of those it knows, so here each such op makes the choice that eager
torch would make on the workers' device: that is what keeps numbers equal, bit for bit on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lazygt.record.context import workers_device

aten: Any = torch.ops.aten

#: Composite ops that have a kernel on CPUs: decomposed, they round differently. torch decomposes
#: them for a device without a kernel of its own.
KERNELS_OF_THEIR_OWN = ("silu_backward", "mish_backward", "native_channel_shuffle")


def register_decompositions(record: Callable[..., Any] | None) -> torch.library.Library:
    """Register the choices.

    Args:
        record: takes an op and its arguments, and records it as it is; None: C++ does.
    """
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in DECOMPOSED.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")
    if record is not None:
        for name in KERNELS_OF_THEIR_OWN:
            kernel = functools.partial(record, getattr(aten, name).default)
            library.impl(name, kernel, "PrivateUse1")
    return library


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
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
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul_(torch.zeros((), dtype=x.dtype, device=x.device))
    noise = torch.empty_like(x).bernoulli_(1 - p)
    noise.div_(1 - p)
    return x.mul_(noise)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As ``sdp_utils`` in torch chooses: a fused kernel where it applies, else plain matmuls."""
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    on_cpus = workers_device() == "cpu"
    if on_cpus and 0 in (query.numel(), key.numel(), value.numel()):
        return _empty_attention(query, key, value)
    mask = _additive(attn_mask, query)
    if on_cpus:
        result = _attention_on_cpus(
            query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
        )
    else:
        result = _fused_attention(query, key, value, mask, dropout_p, is_causal, scale)
    if result is not None:
        return result
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    kept, left = (
        torch.scalar_tensor(number, dtype=query.dtype, device=query.device)
        for number in (0.0, float("-inf"))
    )
    return torch.where(mask, kept, left)


def _empty_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros, and NaN where an operand has one; the sums give each operand its gradient."""
    zeros = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    values, keys = value.sum(), key.sum()
    return zeros + (query.sum() + keys + values) * 0


def _attention_on_cpus(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    if torch.backends.cuda.flash_sdp_enabled() and (
        dropout_p == 0
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and _heads_match(query.shape[1], key.shape[1], value.shape[1], enable_gqa)
        and _mask_fits(mask, query, key)
        and query.shape[3] == key.shape[3] == value.shape[3]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and query.dtype == key.dtype == value.dtype
        and query.dtype in _CPU_TYPES
    ):
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return None


def _heads_match(query: int, key: int, value: int, enable_gqa: bool) -> bool:
    if enable_gqa:  # a group of query heads shares each head of the keys
        return key == value and query % key == 0
    return query == key == value


def _mask_fits(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    if mask is None:
        return True
    mask.size(-2)  # a mask of one dim is torch's own IndexError
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (*query.shape[:3], key.shape[2])[-mask.dim() :]
    return all(size in (1, want) for size, want in zip(mask.shape, wanted, strict=True))


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor | None:
    if any(t.dim() != 4 for t in (query, key, value)) or query.numel() == 0 or key.numel() == 0:
        return None
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None and mask.requires_grad:
        return None
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    heads = query.shape[1] == key.shape[1] == value.shape[1]
    dense = all(t.stride(-1) == 1 for t in (query, key, value))
    batches = query.shape[0] == key.shape[0] == value.shape[0]
    if not (same and dense and batches and heads):
        return None
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, grads, dropout_p, is_causal, scale=scale
    )[0]


_CPU_TYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def _fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, layout: Any = None, device: Any = None,
             pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """torch's own writes through a view that it resizes."""
    upper = torch.arange(0, (n + 1) // 2, dtype=dtype or torch.get_default_dtype(), device=device)
    lower = torch.arange(-(n // 2), 0, dtype=upper.dtype, device=device)
    return torch.cat([upper, lower]).mul_(1.0 / (n * d))


def _kaiser_window(size: int, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None,
                   layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """torch has a kernel for it on its own devices only: made here, and uploaded."""
    window = torch.kaiser_window(size, periodic, beta, dtype=dtype, device="cpu")
    return window.to(device)


def _eigvals(a: torch.Tensor) -> torch.Tensor:
    """Without vectors if no gradient asks for them: LAPACK then rounds differently."""
    if torch.is_grad_enabled() and a.requires_grad:
        return aten.linalg_eig.default(a)[0]
    return aten._linalg_eigvals.default(a)


def _eigvalsh(a: torch.Tensor, uplo: str = "L") -> torch.Tensor:
    vectors = torch.is_grad_enabled() and a.requires_grad
    return aten._linalg_eigh.default(a, uplo, vectors)[0]


def _svdvals(a: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    vectors = torch.is_grad_enabled() and a.requires_grad
    return aten._linalg_svd.default(a, False, vectors, driver=driver)[1]


def _tensor_split(x: torch.Tensor, sections: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """The sections are numbers that shapes depend on: a sync point."""
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
    "scaled_dot_product_attention": _attention,
    "linalg_eigvals": _eigvals,
    "linalg_eigvalsh": _eigvalsh,
    "linalg_svdvals": _svdvals,
    "tensor_split.tensor_indices_or_sections": _tensor_split,
}
