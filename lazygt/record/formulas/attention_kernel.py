"""Choice of the attention kernel: the one that eager torch takes on the workers' device.

On GPUs the choice follows torch's ``sdp_utils``, by the conditions that torch's versions from 2.11
on have in common: a kernel is chosen if all of them would choose it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from lazygt.host.gpus import Gpu, workers_gpu
from lazygt.record.context import workers_device

aten: Any = torch.ops.aten


class AttentionCall(NamedTuple):
    """Arguments of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        """True if a gradient of query, key, value or mask may be requested."""
        tensors = self.operands if self.mask is None else (*self.operands, self.mask)
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    @property
    def additive_mask(self) -> torch.Tensor | None:
        """The mask as a term added to the scores: 0 and -inf for a boolean mask."""
        mask = self.mask
        if mask is None or mask.dtype != torch.bool:
            return mask
        zero, minus_infinity = (
            torch.scalar_tensor(number, dtype=self.query.dtype, device=self.query.device)
            for number in (0.0, float("-inf"))
        )
        return torch.where(mask, zero, minus_infinity)


def attention(
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
    """Record a fused kernel where eager torch would choose one, else plain matmuls.

    Raises:
        RuntimeError: both a mask and ``is_causal`` are passed, or all fitting kernels are off.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if workers_device() != "cpu":
        return _choose_kernel(call, workers_gpu())(call)
    if 0 in (query.numel(), key.numel(), value.numel()):
        return _empty(call)
    return _flash_on_cpus(call) if _fits_flash_on_cpus(call) else _math(call)


def _math(call: AttentionCall) -> torch.Tensor:
    """Record attention as matmuls and a softmax."""
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return aten._scaled_dot_product_attention_math.default(
        *call.operands,
        call.additive_mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]


# -- attention on CPUs -----------------------------------------------------------------------------


def _empty(call: AttentionCall) -> torch.Tensor:
    """Return the result where an operand is empty: zeros that depend on every operand.

    So a NaN in the others shows, and each has a gradient, as in eager torch.
    """
    query, key, value = call.operands
    zeros = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    values, keys = value.sum(), key.sum()
    return zeros + (query.sum() + keys + values) * 0


def _flash_on_cpus(call: AttentionCall) -> torch.Tensor:
    """Record the flash-attention kernel for CPUs."""
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        *call.operands,
        call.dropout_p,
        call.is_causal,
        attn_mask=call.additive_mask,
        scale=call.scale,
    )[0]


def _fits_flash_on_cpus(call: AttentionCall) -> bool:
    """Return whether the CPU kernel accepts the call."""
    query, key, value = call.operands
    return torch.backends.cuda.flash_sdp_enabled() and (
        call.dropout_p == 0
        and _shapes_fit(call, gqa=True)
        and _mask_fits(call)
        and query.shape[3] == key.shape[3] == value.shape[3]
        and _rows_are_dense(call)
        and _share_a_dtype(call, _CPU_DTYPES)
    )


_CPU_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


# -- conditions on all devices ---------------------------------------------------------------------


def _shapes_fit(call: AttentionCall, gqa: bool) -> bool:
    """Return whether all have four dims, the same batch size, and matching heads.

    Args:
        gqa: the kernel can share each head of the keys among a group of query heads.
    """
    query, key, value = call.operands
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if call.enable_gqa and gqa:
        return key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return query.shape[1] == key.shape[1] == value.shape[1]


def _mask_fits(call: AttentionCall) -> bool:
    """Return whether the mask broadcasts to the scores and needs no gradient."""
    mask = call.mask
    if mask is None:
        return True
    mask.size(-2)  # a mask of one dim is torch's own IndexError
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    score_shape = (*call.query.shape[:3], call.key.shape[2])[-mask.dim() :]
    return all(
        size in (1, score_size) for size, score_size in zip(mask.shape, score_shape, strict=True)
    )


def _rows_are_dense(call: AttentionCall) -> bool:
    """Return whether the last dims have stride 1."""
    return all(t.stride(-1) == 1 for t in call.operands)


def _share_a_dtype(call: AttentionCall, dtypes: frozenset[torch.dtype]) -> bool:
    """Return whether query, key and value share one of these dtypes."""
    query, key, value = call.operands
    return query.dtype == key.dtype == value.dtype and query.dtype in dtypes


# -- attention on GPUs -----------------------------------------------------------------------------


def _choose_kernel(call: AttentionCall, gpu: Gpu) -> Callable[[AttentionCall], torch.Tensor]:
    """Return the first kernel in torch's order that is enabled and fits the call."""
    for backend in _priorities(gpu):
        if backend in _KERNELS:
            enabled, fits, kernel = _KERNELS[backend]
            if enabled() and fits(call, gpu):
                return kernel
    return _math


def _priorities(gpu: Gpu) -> list[int]:
    """Return the backends by priority.

    cuDNN is first where torch prefers it, unless the user has set an order.
    """
    order: list[int] = torch._C._get_sdp_priority_order()
    if order == _DEFAULT_ORDER and _prefers_cudnn(gpu):
        return [SDPBackend.CUDNN_ATTENTION.value, *order]
    return order


#: torch's order before it has seen a GPU.
_DEFAULT_ORDER = [
    backend.value
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.OVERRIDEABLE,
    )
]


def _prefers_cudnn(gpu: Gpu) -> bool:
    """Return whether torch tries cuDNN first on this GPU."""
    major, minor = gpu.capability
    return (
        gpu.cudnn > 91500
        and major in (9, 10)
        and minor in (0, 3)
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )


def _fits_cudnn(call: AttentionCall, gpu: Gpu) -> bool:
    """Return whether cuDNN's attention accepts the call."""
    query, key, value = call.operands
    return (
        gpu.cudnn >= 90000
        and (8, 0) <= gpu.capability <= (12, 1)
        and _share_a_dtype(call, _HALVES)
        and _shapes_fit(call, gqa=True)
        and _mask_fits(call)
        and not _must_be_deterministic()
        and _has_elements(call)
        and _rows_are_dense_on_gpus(call, exempt_singletons=True)
        and max(query.shape[3], value.shape[3]) <= 128
        and query.shape[3] % 8 == value.shape[3] % 8 == 0
        and key.shape[2] != 1
        and (call.dropout_p == 0 or _cudnn_supports_dropout(call, gpu))
    )


def _cudnn_supports_dropout(call: AttentionCall, gpu: Gpu) -> bool:
    """Return whether cuDNN supports the call's dropout: a multiple of 1/16."""
    return gpu.cudnn >= 91400 and call.query.shape[2] != 1 and (call.dropout_p * 16).is_integer()


def _cudnn(call: AttentionCall) -> torch.Tensor:
    """Record cuDNN's attention."""
    return aten._scaled_dot_product_cudnn_attention.default(
        *call.operands,
        call.additive_mask,
        call.needs_gradient,
        call.dropout_p,
        call.is_causal,
        False,
        scale=call.scale,
    )[0]


def _fits_flash(call: AttentionCall, gpu: Gpu) -> bool:
    """Return whether flash attention accepts the call."""
    query, key, value = call.operands
    return (
        call.mask is None
        and (8, 0) <= gpu.capability <= (12, 1)
        and _share_a_dtype(call, _HALVES)
        and _shapes_fit(call, gqa=True)
        and query.shape[3] == key.shape[3] == value.shape[3] <= 256
        and not (call.is_causal and query.shape[2] != key.shape[2])
        and _has_elements(call)
        and _rows_are_dense_on_gpus(call, exempt_singletons=True)
        and _flash_has_gradient(call, gpu)
    )


def _flash_has_gradient(call: AttentionCall, gpu: Gpu) -> bool:
    """Return whether flash attention has gradients for the call's head size.

    GPUs with little shared memory lack those of some head sizes.
    """
    small = (8, 6) <= gpu.capability <= (8, 9) or (12, 0) <= gpu.capability <= (12, 1)
    if not (small and call.needs_gradient):
        return True
    size = call.query.shape[3]
    return size <= 192 or (size > 224 and call.dropout_p == 0)


def _flash(call: AttentionCall) -> torch.Tensor:
    """Record flash attention, with heads zero-padded to a multiple of 8 and the scale unchanged."""
    size = call.query.shape[3]
    scale = 1 / math.sqrt(size) if call.scale is None else call.scale
    padded = [_zero_padded(t, -size % 8) for t in call.operands]
    result: torch.Tensor = aten._scaled_dot_product_flash_attention.default(
        *padded, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return result if size % 8 == 0 else result[..., :size]


def _zero_padded(t: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor with ``count`` zeros appended to its last dim."""
    return torch.nn.functional.pad(t, (0, count)) if count else t


def _fits_efficient(call: AttentionCall, gpu: Gpu) -> bool:
    """Return whether memory-efficient attention accepts the call."""
    query, key, value = call.operands
    ampere = gpu.capability >= (8, 0)
    alignment = _alignment(query.dtype, gpu.capability)
    return (
        (5, 0) <= gpu.capability <= (12, 1)
        and _share_a_dtype(call, _EFFICIENT if ampere else _EFFICIENT - {torch.bfloat16})
        and _shapes_fit(call, gqa=False)
        and query.shape[3] == key.shape[3]
        and 0 not in (query.shape[3], value.shape[3])
        and query.shape[3] % alignment == value.shape[3] % alignment == 0
        and _has_elements(call)
        and _rows_are_dense_on_gpus(call, exempt_singletons=False)
    )


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the number of elements that efficient attention's matmuls read at once."""
    half = dtype in _HALVES
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        return 8 if half else 4
    return 1


def _efficient(call: AttentionCall) -> torch.Tensor:
    """Record memory-efficient attention."""
    return aten._scaled_dot_product_efficient_attention.default(
        *call.operands,
        _expanded_mask(call),
        call.needs_gradient,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
    )[0]


def _expanded_mask(call: AttentionCall) -> torch.Tensor | None:
    """Return the mask expanded to all scores, with rows aligned to 8 elements."""
    mask, query = call.additive_mask, call.query
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = _zero_padded(mask, 8 - length % 8)[..., :length]
    return mask.expand(*query.shape[:3], call.key.shape[2])


def _has_elements(call: AttentionCall) -> bool:
    """Return whether query, key and value have elements."""
    return 0 not in (t.numel() for t in call.operands)


def _rows_are_dense_on_gpus(call: AttentionCall, exempt_singletons: bool) -> bool:
    """Return whether the last dims, the mask's too, have stride 1.

    Args:
        exempt_singletons: accept any stride of a last dim of one element.
    """
    if not (_rows_are_dense(call) or (exempt_singletons and call.query.shape[-1] == 1)):
        return False
    return call.mask is None or call.mask.stride(-1) == 1


def _must_be_deterministic() -> bool:
    """Return whether torch raises for nondeterministic ops."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


_HALVES = frozenset({torch.float16, torch.bfloat16})
_EFFICIENT = _HALVES | {torch.float32}

#: Backend -> (whether the user lets it run, whether it fits a call on a GPU, the kernel).
_KERNELS: dict[
    int,
    tuple[
        Callable[[], bool],
        Callable[[AttentionCall, Gpu], bool],
        Callable[[AttentionCall], torch.Tensor],
    ],
] = {
    SDPBackend.CUDNN_ATTENTION.value: (torch.backends.cuda.cudnn_sdp_enabled, _fits_cudnn, _cudnn),
    SDPBackend.FLASH_ATTENTION.value: (torch.backends.cuda.flash_sdp_enabled, _fits_flash, _flash),
    SDPBackend.EFFICIENT_ATTENTION.value: (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        _fits_efficient,
        _efficient,
    ),
    SDPBackend.MATH.value: (torch.backends.cuda.math_sdp_enabled, lambda call, gpu: True, _math),
}
