"""What ops that only GPUs have compute, in ops that CPUs have too: for the tests of their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support import cudnn_rnn

aten: Any = torch.ops.aten
Tensor = torch.Tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Any) -> Any:
    """Output, and logarithms of the sums of each query's weights."""
    if not query.numel() or not key.numel():
        raise AssertionError("the kernels take no empty blocks")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    bias: Any,
) -> list[Any]:
    """As the kernels: from the whole result and its sums, which may be those of more keys."""
    if not query.numel() or not key.numel():
        raise AssertionError("the kernels take no empty blocks")
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5
    scores = query @ keys.mT * scale + (0 if bias is None else bias)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = (scores - sums[:, :, : query.shape[2]].unsqueeze(-1)).exp()
    of_weights = gradient @ values.mT - (gradient * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights
    of_keys, of_values = of_scores.mT @ query * scale, weights.mT @ gradient
    shared = (key.shape[0], key.shape[1], groups, *key.shape[2:3], -1)
    of_bias = None if bias is None else of_scores.sum_to_size(bias.shape)
    return [of_scores @ keys * scale, of_keys.view(shared).sum(2), of_values.view(shared).sum(2),
            of_bias]  # fmt: skip


def flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, *rest: Any) -> Any:
    out, sums = _attention(q, k, v, causal, None)
    return out, sums.float(), None, None, *_state(), torch.zeros(0, dtype=q.dtype)


def _state() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> Any:
    assert rest[2:4] == (q.shape[2], k.shape[2])
    return _gradients(g, q, k, v, out, sums, rest[5], None)[:3]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, want: bool, p: float, causal: bool
) -> Any:
    out, sums = _attention(q, k, v, causal, bias)
    padded = torch.nn.functional.pad(sums.float(), (0, -q.shape[2] % 32), value=torch.inf)
    return out, padded if want else padded[..., :0], *[torch.zeros((), dtype=torch.int64)] * 2


def efficient_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    out: Tensor,
    sums: Tensor,
    *rest: Any,
) -> Any:
    return _gradients(g, q, k, v, out, sums, rest[4], bias)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, want: bool, p: float, causal: bool, *rest: Any
) -> Any:
    out, sums = _attention(q, k, v, causal, bias)
    seeds = [torch.zeros((), dtype=torch.int64)] * 2
    return out, sums.float().unsqueeze(-1), None, None, *seeds, None


def cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> Any:
    bias, _, _, queries, keys, _, causal = rest[2:9]
    assert (queries, keys) == (q.shape[2], k.shape[2])
    return _gradients(g, q, k, v, out, sums.squeeze(-1), causal, bias)[:3]


def rms_norm_backward(
    g: Tensor, value: Tensor, shape: list[int], rstd: Tensor, weight: Any, mask: list[bool]
) -> Any:
    dims = tuple(range(value.dim() - len(shape), value.dim()))
    if not value.numel():
        raise AssertionError("the kernel takes no empty blocks")
    scaled, flow = value * rstd, g if weight is None else g * weight
    made = (flow - scaled * (flow * scaled).mean(dims, keepdim=True)) * rstd
    batch = tuple(range(value.dim() - len(shape)))
    own = (g * scaled).sum(batch) if batch else g * scaled
    return made if mask[0] else None, own if mask[1] else None


def cudnn_batch_norm(*args: Any) -> Any:
    return *aten.native_batch_norm(*args), torch.zeros(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(value: Tensor, gradient: Tensor, weight: Tensor, *rest: Any) -> Any:
    *statistics, eps, reserve = rest
    assert not reserve.numel(), "the reserve of a forward that a stand-in did"
    return aten.native_batch_norm_backward(gradient, value, weight, *statistics, True, eps,
                                           [True] * 3)  # fmt: skip


def cudnn_grid_sampler(value: Tensor, grid: Tensor) -> Tensor:
    sampled: Tensor = aten.grid_sampler_2d(value, grid, 0, 0, True)
    return sampled


def cudnn_grid_sampler_backward(value: Tensor, grid: Tensor, gradient: Tensor) -> Any:
    return aten.grid_sampler_2d_backward(gradient, value, grid, 0, 0, True, [True, True])


def cudnn_rnn_backward(*args: Any) -> Any:
    *others, reserve, mask = args
    return cudnn_rnn.backward(*others, reserve.clone(), mask)  # it is written into


STAND_INS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": flash,
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._scaled_dot_product_cudnn_attention.default": cudnn,
    "aten._scaled_dot_product_cudnn_attention_backward.default": cudnn_backward,
    "aten._cudnn_rnn.default": cudnn_rnn.forward,
    "aten._cudnn_rnn_backward.default": cudnn_rnn_backward,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.cudnn_batch_norm.default": cudnn_batch_norm,
    "aten.cudnn_batch_norm_backward.default": cudnn_batch_norm_backward,
    "aten.cudnn_grid_sampler.default": cudnn_grid_sampler,
    "aten.cudnn_grid_sampler_backward.default": cudnn_grid_sampler_backward,
}
