"""Decompositions that torch lacks, or that need fewer collectives than torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lazygt.graph.ops import overload
from lazygt.passes.sharding.lower.builder import schema

Tensor = torch.Tensor
Formula = Callable[..., Any]
_NONE, _MEAN = 0, 1


def _loss(op: str) -> Formula:
    """Return the decomposition of a loss: unreduced by the op itself, then its mean or sum."""

    def formula(*args: Any) -> Tensor:
        arguments = _arguments_by_name(op, args)
        unreduced: Tensor = overload(op)(**{**arguments, "reduction": _NONE})
        return unreduced.mean() if arguments["reduction"] == _MEAN else unreduced.sum()

    return formula


def _loss_backward(op: str) -> Formula:
    """Return the decomposition of a loss' backward into the unreduced backward.

    For a mean the gradient is first divided by the number of elements.
    """

    def formula(*args: Any) -> Tensor:
        arguments = _arguments_by_name(op, args)
        gradient, value, target = arguments["grad_output"], arguments["self"], arguments["target"]
        if arguments["reduction"] == _MEAN:
            gradient = gradient / prod(torch.broadcast_shapes(value.shape, target.shape))
        input_gradient: Tensor = overload(op)(
            **{**arguments, "grad_output": gradient, "reduction": _NONE}
        )
        return input_gradient

    return formula


def _arguments_by_name(op: str, args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a loss by name.

    Raises:
        ValueError: the loss is unreduced, and the pointwise rule applies.
    """
    parameters = schema(op)
    values = {name: default for name, _, default in parameters}
    values.update(zip(values, args, strict=False))
    if values["reduction"] == _NONE:
        raise ValueError("nothing is reduced")
    return values


def _variance_and_mean(
    value: Tensor, dim: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean in two passes: the mean, then the squared deviations from it.

    A program that also computes the mean contains the same op, and common subexpression elimination
    shares the all-reduce.
    """
    if value.is_complex():
        raise ValueError("no decomposition of the variance of complex numbers")
    dims = [d % value.dim() for d in dim] if dim else list(range(value.dim()))
    count = prod(value.shape[d] for d in dims)
    mean = value.mean(dims, keepdim=keepdim)
    deviation = value - (mean if keepdim else _unsqueeze_dims(mean, dims))
    squares = (deviation * deviation).sum(dims, keepdim=keepdim)
    degrees_of_freedom: Any = count - (1 if correction is None else correction)
    divisor = (
        degrees_of_freedom.clamp_min(0)
        if isinstance(degrees_of_freedom, Tensor)
        else max(degrees_of_freedom, 0)
    )
    return squares / divisor, mean


def _unsqueeze_dims(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Insert dims of size 1 at ``dims``."""
    for dim in sorted(dims):
        value = value.unsqueeze(dim)
    return value


def _var(value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Decompose ``var`` into mean and squared deviations."""
    return _variance_and_mean(value, dim, correction, keepdim)[0]


def _std(value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Decompose ``std`` into mean and squared deviations."""
    return _variance_and_mean(value, dim, correction, keepdim)[0].sqrt()


def _var_mean(
    value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Decompose ``var_mean`` into mean and squared deviations."""
    return _variance_and_mean(value, dim, correction, keepdim)


def _std_mean(
    value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Decompose ``std_mean`` into mean and squared deviations."""
    variance, mean = _variance_and_mean(value, dim, correction, keepdim)
    return variance.sqrt(), mean


def _safe_softmax(value: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a softmax that is 0 where every element along ``dim`` is -inf.

    These positions follow from the maximum, which the softmax all-reduces anyway.
    """
    value = value if dtype is None else value.to(dtype)
    maximum = value.amax(dim, keepdim=True)
    exponentials = (value - maximum).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).masked_fill(
        maximum == float("-inf"), 0
    )


def _logsumexp(value: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Compute logsumexp by the maximum and the sum that a log_softmax of the value also computes.

    Common subexpression elimination then shares their all-reduces.
    """
    if not value.is_floating_point() or not value.dim():
        raise ValueError("no decomposition of 0-d or integer tensors")
    dims = [d % value.dim() for d in dim]
    maximum = value.amax(dims, keepdim=True)
    total = (value - maximum).exp().sum(dims, keepdim=True).log() + maximum
    total = torch.where(maximum.abs() == float("inf"), maximum, total)
    return total if keepdim else total.squeeze(dims)


def _multi_margin(
    value: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Compute multi_margin_loss as the kernel does: a NaN distance adds nothing.

    In torch's decomposition a NaN distance makes the loss NaN.
    """
    value, target = torch.atleast_2d(value), torch.atleast_1d(target).unsqueeze(1)
    distance = margin - value.gather(1, target) + value
    other = torch.arange(value.shape[1], device=value.device) != target
    loss = distance if p == 1 else distance * distance
    loss = loss if weight is None else loss * weight[target]
    loss = torch.where(other & (distance > 0), loss, 0)
    if reduction == _NONE:
        return loss.mean(1)
    return loss.mean() if reduction == _MEAN else loss.sum() / value.shape[1]


def _nll_backward(
    gradient: Tensor,
    value: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Compute the nll_loss gradient pointwise over the classes, so that they can be sharded."""
    dim = 0 if value.dim() == 1 else 1
    class_shape = [-1 if d == dim else 1 for d in range(value.dim())]
    target_classes = target.unsqueeze(dim)
    classes = torch.arange(value.shape[dim], device=value.device).view(class_shape)
    target_gradient = gradient.unsqueeze(dim) if reduction == _NONE else gradient
    if reduction == _MEAN:
        target_gradient = target_gradient / total_weight
    target_gradient = (
        -target_gradient if weight is None else -target_gradient * weight.view(class_shape)
    )
    is_target = (classes == target_classes) & (target_classes != ignore_index)
    return torch.where(is_target, target_gradient, torch.zeros_like(value))


def _convert_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Decompose ``prims.convert_element_type`` into a cast."""
    return value.to(dtype)


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
FORMULAS: dict[str, Formula] = {
    **{op: _loss(op) for op in (
        *(f"aten.{name}.default" for name in _LOSSES),
        "aten.binary_cross_entropy_with_logits.default")},
    **{op: _loss_backward(op) for op in (f"aten.{name}_backward.default" for name in _LOSSES)},
    "aten.var.correction": _var,
    "aten.std.correction": _std,
    "aten.var_mean.correction": _var_mean,
    "aten.std_mean.correction": _std_mean,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten.multi_margin_loss.default": _multi_margin,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
    "prims.convert_element_type.default": _convert_dtype,
}  # fmt: skip
