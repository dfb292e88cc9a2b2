"""Decompositions that torch lacks, or that exchange less where ranks must meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lazygt.graph.ops import overload
from lazygt.passes.sharding.builder import schema

Tensor = torch.Tensor
Formula = Callable[..., Any]
_NONE, _MEAN = 0, 1


def _loss(op: str) -> Formula:
    """Return the formula of a loss: of each element by the op itself, then the mean or sum."""

    def formula(*args: Any) -> Tensor:
        named = _named(op, args)
        each: Tensor = overload(op)(**{**named, "reduction": _NONE})
        return each.mean() if named["reduction"] == _MEAN else each.sum()

    return formula


def _loss_backward(op: str) -> Formula:
    """Return the formula of a loss' backward.

    Each element has the whole gradient, or its share of it.
    """

    def formula(*args: Any) -> Tensor:
        named = _named(op, args)
        gradient, value, target = named["grad_output"], named["self"], named["target"]
        if named["reduction"] == _MEAN:
            gradient = gradient / prod(torch.broadcast_shapes(value.shape, target.shape))
        made: Tensor = overload(op)(**{**named, "grad_output": gradient, "reduction": _NONE})
        return made

    return formula


def _named(op: str, args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a loss by name.

    Raises:
        ValueError: nothing is reduced; such a loss is left to the pointwise rule.
    """
    arguments = schema(op)
    named = {name: default for name, _, default in arguments}
    named.update(zip(named, args, strict=False))
    if named["reduction"] == _NONE:
        raise ValueError("nothing is reduced")
    return named


def _moments(
    value: Tensor, dim: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Return variance and mean: the mean first, so that distances from it are small.

    It is made as one that stands beside the variance in a program, so that ranks meet for both
    once.
    """
    if value.is_complex():
        raise ValueError("of complex numbers, the kernel alone knows the variance")
    dims = [d % value.dim() for d in dim] if dim else list(range(value.dim()))
    count = prod(value.shape[d] for d in dims)
    mean = value.mean(dims, keepdim=keepdim)
    distance = value - (mean if keepdim else _unsqueezed(mean, dims))
    squares = (distance * distance).sum(dims, keepdim=keepdim)
    rest: Any = count - (1 if correction is None else correction)
    divisor = rest.clamp_min(0) if isinstance(rest, Tensor) else max(rest, 0)
    return squares / divisor, mean


def _unsqueezed(value: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims):
        value = value.unsqueeze(dim)
    return value


def _var(value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(value, dim, correction, keepdim)[0]


def _std(value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(value, dim, correction, keepdim)[0].sqrt()


def _var_mean(
    value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return _moments(value, dim, correction, keepdim)


def _std_mean(
    value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    variance, mean = _moments(value, dim, correction, keepdim)
    return variance.sqrt(), mean


def _safe_softmax(value: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a softmax that is 0 where every element is -inf.

    There the maximum is -inf, which ranks have met for anyway.
    """
    value = value if dtype is None else value.to(dtype)
    top = value.amax(dim, keepdim=True)
    powers = (value - top).exp()
    return (powers / powers.sum(dim, keepdim=True)).masked_fill(top == float("-inf"), 0)


def _logsumexp(value: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Compute logsumexp by the maximum and the sum of a log_softmax of the same value.

    So ranks meet for them once.
    """
    if not value.is_floating_point() or not value.dim():
        raise ValueError("of single numbers and whole ones, the kernel is as good")
    dims = [d % value.dim() for d in dim]
    top = value.amax(dims, keepdim=True)
    total = (value - top).exp().sum(dims, keepdim=True).log() + top
    total = torch.where(top.abs() == float("inf"), top, total)
    return total if keepdim else total.squeeze(dims)


def _multi_margin(
    value: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Compute the loss as the kernel does: a distance of NaN adds nothing.

    In torch's decomposition it does.
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
    """Compute the gradient class by class, so that classes may be cut too."""
    dim = 0 if value.dim() == 1 else 1
    along = [-1 if d == dim else 1 for d in range(value.dim())]
    placements = target.unsqueeze(dim)
    classes = torch.arange(value.shape[dim], device=value.device).view(along)
    flow = gradient.unsqueeze(dim) if reduction == _NONE else gradient
    if reduction == _MEAN:
        flow = flow / total_weight
    flow = -flow if weight is None else -flow * weight.view(along)
    chosen = (classes == placements) & (placements != ignore_index)
    return torch.where(chosen, flow, torch.zeros_like(value))


def _converted(value: Tensor, dtype: torch.dtype) -> Tensor:
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
    "prims.convert_element_type.default": _converted,
}  # fmt: skip
