"""Ops that take a number, rewritten to take a tensor of one element in its stead.

The compiled code of a group is made once for all numbers: they are operands of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_Optional = Tensor | None


def _add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.add(a, b * alpha)


def _sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(a, b * alpha)


def _rsub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(b, a * alpha)


def _addcmul(a: Any, b: Any, c: Any, value: Any = 1) -> Any:
    return a + value * b * c


def _addcdiv(a: Any, b: Any, c: Any, value: Any = 1) -> Any:
    return a + value * b / c


def _threshold_backward(grad: Tensor, of: Tensor, threshold: Any) -> Tensor:
    return torch.where(of <= threshold, torch.zeros_like(grad), grad)


def _var(x: Tensor, dims: Sequence[int] | None = None, *, correction: Any, keepdim: bool = False
         ) -> Tensor:  # fmt: skip
    dims = list(dims or range(x.dim()))
    around = torch.var(x, dims, correction=0, keepdim=keepdim)
    count = x.numel() / max(around.numel(), 1)
    return torch.mul(around, count / (count - correction).clamp(min=0))


def _std(x: Tensor, dims: Sequence[int] | None = None, *, correction: Any, keepdim: bool = False
         ) -> Tensor:  # fmt: skip
    return _var(x, dims, correction=correction, keepdim=keepdim).sqrt()


# -- normalizations ------------------------------------------------------------------------------


def _normalized(x: Tensor, dims: list[int], eps: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x normalized, its mean, its variance and the inverse of its deviation; keep dims."""
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    return (x - mean) * rstd, mean, var, rstd


def _scaled(x: Tensor, weight: _Optional, bias: _Optional) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: _Optional, bias: _Optional, eps: Any
) -> tuple[Tensor, ...]:
    normal, mean, _, rstd = _normalized(x, list(range(x.dim() - len(shape), x.dim())), eps)
    return _scaled(normal, weight, bias), mean, rstd


def _group_norm(
    x: Tensor, weight: _Optional, bias: _Optional, n: int, c: int, rest: int, groups: int, eps: Any
) -> tuple[Tensor, ...]:
    normal, mean, _, rstd = _normalized(x.reshape(n, groups, -1), [2], eps)
    normal = normal.reshape(x.shape)
    columns = [None if each is None else _by_channel(each, x) for each in (weight, bias)]
    return _scaled(normal, *columns), mean.reshape(n, groups), rstd.reshape(n, groups)


def _batch_norm(
    x: Tensor,
    weight: _Optional,
    bias: _Optional,
    running_mean: _Optional,
    running_var: _Optional,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Tensor, ...]:
    columns = [None if each is None else _by_channel(each, x) for each in (weight, bias)]
    if not training:
        assert running_mean is not None
        assert running_var is not None
        rstd = torch.rsqrt(running_var + eps)
        normal = (x - _by_channel(running_mean, x)) * _by_channel(rstd, x)
        return _scaled(normal, *columns), x.new_empty(0), x.new_empty(0)
    dims = [0, *range(2, x.dim())]
    normal, mean, var, rstd = _normalized(x, dims, eps)
    mean, var, rstd = mean.reshape(-1), var.reshape(-1), rstd.reshape(-1)
    results = [_scaled(normal, *columns), mean, rstd]
    if running_mean is not None and running_var is not None:
        count = x.numel() / x.shape[1]
        results.append(momentum * mean + (1 - momentum) * running_mean)
        results.append(momentum * var * (count / (count - 1)) + (1 - momentum) * running_var)
    return tuple(results)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: _Optional,
    running_mean: _Optional,
    running_var: _Optional,
    mean: _Optional,
    rstd: _Optional,
    training: bool,
    eps: Any,
    mask: Sequence[bool],
) -> tuple[_Optional, ...]:
    if not training:
        assert running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    assert mean is not None
    assert rstd is not None
    dims, count = [0, *range(2, x.dim())], x.numel() / x.shape[1]
    normal = (x - _by_channel(mean, x)) * _by_channel(rstd, x)
    bias_grad, weight_grad = grad.sum(dims), (grad * normal).sum(dims)
    inner = grad
    if training:
        inner = grad - _by_channel(bias_grad / count, x) - normal * _by_channel(
            weight_grad / count, x
        )  # fmt: skip
    scale = rstd if weight is None else rstd * weight
    grads = (inner * _by_channel(scale, x), weight_grad, bias_grad)
    return tuple(one if wanted else None for one, wanted in zip(grads, mask, strict=True))


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return one value per channel, in a shape that broadcasts to ``x``."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


#: Write operands although their schemas don't say so; those of ``BY_TENSOR`` return new versions.
WRITE_UNSAID = frozenset({"aten.native_batch_norm.default"})

BY_TENSOR: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": _add,
    "aten.sub.Tensor": _sub,
    "aten.mul.Tensor": torch.mul,
    "aten.div.Tensor": torch.div,
    "aten.rsub.Scalar": _rsub,
    "aten.add.Scalar": _add,
    "aten.sub.Scalar": _sub,
    "aten.mul.Scalar": torch.mul,
    "aten.div.Scalar": torch.div,
    "aten.addcmul.default": _addcmul,
    "aten.addcdiv.default": _addcdiv,
    "aten.lerp.Scalar": torch.lerp,
    "aten.masked_fill.Scalar": torch.masked_fill,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.eq.Scalar": torch.eq,
    "aten.ne.Scalar": torch.ne,
    "aten.gt.Scalar": torch.gt,
    "aten.ge.Scalar": torch.ge,
    "aten.lt.Scalar": torch.lt,
    "aten.le.Scalar": torch.le,
    "aten.var.correction": _var,
    "aten.std.correction": _std,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
}
