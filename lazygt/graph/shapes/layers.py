"""Shape rules of softmax, losses, norms, embeddings, and their backward ops.

A rule returns the metas of an op's results, or None for arguments that it does not cover: torch's
meta kernel infers those.
"""

from __future__ import annotations

import torch

from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.shapes.rules import (
    FLOATS,
    Metas,
    Rule,
    Shape,
    broadcast,
    contiguous,
    is_contiguous,
    is_dense,
    position,
    same_float,
)


def _softmax(source: TensorMeta, dim: int, half_to_float: bool) -> Metas | None:
    """Shape rule of softmax and log-softmax: the source's shape, row-major."""
    fits = is_contiguous(source) and source.dtype in FLOATS and not half_to_float
    if not fits or position(dim, len(source.shape)) is None:
        return None
    return (contiguous(source.shape, source.dtype),)


def _softmax_backward(
    grad: TensorMeta, output: TensorMeta, dim: int, input_dtype: torch.dtype
) -> Metas | None:
    """Shape rule of the backward ops of softmax and log-softmax."""
    fits = grad.shape == output.shape and input_dtype is grad.dtype and is_contiguous(output)
    return _softmax(grad, dim, False) if fits and same_float(grad, output) else None


def _nll(
    source: TensorMeta, target: TensorMeta, weight: TensorMeta | None, reduction: int, ignored: int
) -> Metas | None:
    """Shape rule of the negative log-likelihood of [N, C] scores: (loss, total weight)."""
    if len(source.shape) != 2 or target.shape != source.shape[:1] or weight is not None:
        return None
    if target.dtype != torch.int64 or source.dtype not in FLOATS or reduction not in (0, 1, 2):
        return None
    loss = contiguous(target.shape if reduction == 0 else (), source.dtype)
    return loss, contiguous((), source.dtype)


def _nll_backward(
    grad: TensorMeta,
    source: TensorMeta,
    target: TensorMeta,
    weight: TensorMeta | None,
    reduction: int,
    ignored: int,
    total: TensorMeta,
) -> Metas | None:
    """Shape rule of the backward of the negative log-likelihood: the gradient of the scores."""
    forward = _nll(source, target, weight, reduction, ignored)
    if forward is None or forward[0] is None or forward[0].shape != grad.shape or total.shape != ():
        return None
    return (contiguous(source.shape, source.dtype),) if is_contiguous(source) else None


def _mse(source: TensorMeta, target: TensorMeta, reduction: int = 1) -> Metas | None:
    """Shape rule of the mean or sum of squared errors of tensors of one shape."""
    if source.shape != target.shape or not same_float(source, target) or reduction not in (1, 2):
        return None
    return (contiguous((), source.dtype),)


def _mse_backward(
    grad: TensorMeta, source: TensorMeta, target: TensorMeta, reduction: int
) -> Metas | None:
    """Shape rule of the backward of squared errors of row-major tensors."""
    fits = _mse(source, target, reduction) == (grad,)
    return (source,) if fits and source.plain and target.plain else None


def _layer_norm(
    source: TensorMeta,
    shape: Shape,
    weight: TensorMeta | None,
    bias: TensorMeta | None,
    eps: float,
) -> Metas | None:
    """Shape rule of layer norm in float32: (output, mean, inverse deviation)."""
    tensors = [source, *(t for t in (weight, bias) if t is not None)]
    inner = len(source.shape) - len(shape)
    if inner < 0 or not shape or source.shape[inner:] != shape:
        return None
    if any(t.shape != shape for t in tensors[1:]) or not all(map(is_contiguous, tensors)):
        return None
    # other dtypes have statistics that differ from device to device
    if source.dtype != torch.float32 or not same_float(*tensors):
        return None
    statistics = contiguous(source.shape[:inner] + (1,) * len(shape), source.dtype)
    return contiguous(source.shape, source.dtype), statistics, statistics


def _layer_norm_backward(
    grad: TensorMeta,
    source: TensorMeta,
    shape: Shape,
    mean: TensorMeta,
    rstd: TensorMeta,
    weight: TensorMeta | None,
    bias: TensorMeta | None,
    mask: tuple[bool, ...],
) -> Metas | None:
    """Shape rule of layer norm's backward: gradients of source, weight, bias by ``mask``."""
    forward = _layer_norm(source, shape, weight, bias, 0.0)
    if forward != (contiguous(grad.shape, grad.dtype), mean, rstd) or not is_contiguous(grad):
        return None
    shapes = (grad.shape, shape, shape)
    missing = (False, weight is None, bias is None)
    if any(is_wanted and is_missing for is_wanted, is_missing in zip(mask, missing, strict=True)):
        return None
    pairs = zip(mask, shapes, strict=True)
    return tuple(contiguous(size, grad.dtype) if is_wanted else None for is_wanted, size in pairs)


_INDICES = (torch.int32, torch.int64)


def _embedding(
    weight: TensorMeta,
    indices: TensorMeta,
    padding: int = -1,
    scale_by_frequency: bool = False,
    sparse: bool = False,
) -> Metas | None:
    """Shape rule of an embedding: one row of ``weight`` for each index."""
    if len(weight.shape) != 2 or indices.dtype not in _INDICES or not indices.is_contiguous():
        return None
    return (contiguous((*indices.shape, weight.shape[1]), weight.dtype),)


def _embedding_backward(
    grad: TensorMeta, indices: TensorMeta, count: int, padding: int, scale_by_frequency: bool
) -> Metas | None:
    """Shape rule of an embedding's backward: the gradient of a weight of ``count`` rows."""
    if grad.shape[:-1] != indices.shape or indices.dtype not in _INDICES or not is_contiguous(grad):
        return None
    return (contiguous((count, grad.shape[-1]), grad.dtype),) if grad.dtype in FLOATS else None


def _attention_on_cpus(
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: TensorMeta | None = None,
    scale: float | None = None,
) -> Metas | None:
    """Shape rule of CPU flash attention: (output, logsumexp); supports grouped key heads."""
    if not len(query.shape) == len(key.shape) == 4 or key.shape != value.shape or dropout:
        return None
    batch, heads, length, size = query.shape
    fits = (key.shape[0], key.shape[3]) == (batch, size) and heads % key.shape[1] == 0
    if not fits or query.dtype is not torch.float32 or not same_float(query, key, value):
        return None
    weights = (batch, heads, length, key.shape[2])
    if attn_mask is not None and not _masks(attn_mask, weights):
        return None
    if not is_dense(query):
        return None
    mixed = intern(query.shape, query.stride, query.dtype)
    return mixed, intern(weights[:3], (length * heads, 1, heads), query.dtype)


def _attention_backward_on_cpus(
    grad: TensorMeta,
    query: TensorMeta,
    key: TensorMeta,
    value: TensorMeta,
    output: TensorMeta,
    logsumexp: TensorMeta,
    dropout: float,
    causal: bool,
    *,
    attn_mask: TensorMeta | None = None,
    scale: float | None = None,
) -> Metas | None:
    """Shape rule of CPU flash attention's backward: the gradients of query, key and value."""
    forward = _attention_on_cpus(query, key, value, dropout, causal, attn_mask=attn_mask)
    if forward is None or forward[0] is None or forward[1] is None:
        return None
    expected = output.shape, logsumexp.shape, grad.shape
    if expected != (query.shape, forward[1].shape, query.shape) or not same_float(
        query, grad, output, logsumexp
    ):
        return None
    return tuple([_by_length(meta) for meta in (query, key, value)])


def _by_length(meta: TensorMeta) -> TensorMeta:
    """Return the meta of (batch, heads, length, size) in memory as (batch, length, heads, size)."""
    _, heads, length, size = meta.shape
    return intern(meta.shape, (length * heads * size, size, heads * size, 1), meta.dtype)


def _masks(mask: TensorMeta, weights: Shape) -> bool:
    """Return whether a mask broadcasts to the attention weights."""
    known = mask.dtype in (torch.bool, torch.float32) and len(mask.shape) in (2, 4)
    return known and broadcast([mask.shape, weights]) == weights


#: Op -> rule.
LAYERS: dict[str, Rule] = {
    "aten._softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax.default": _softmax,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_on_cpus,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        _attention_backward_on_cpus
    ),
}
