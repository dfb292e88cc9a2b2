"""Autograd formulas of ops with two formulas in torch: for plain tensors, and for all others.

torch's autograd tests for a plain tensor where the quicker formula needs its values, and uses
another formula for a device written in Python. That one rounds differently, so the plain one is
repeated here. It needs no values: the workers choose where torch would read them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.optim import optimizer, swa_utils
from torch.utils import _foreach_utils

from lazygt.record.context import NAME, computes_values, workers_device
from lazygt.record.patches import Patch
from lazygt.record.tensor import LazyTensor, is_lazy

# -- foreach formulas of optimizers ----------------------------------------------------------------
# torch has two formulas for each optimizer: a loop over the parameters, and horizontal (foreach)
# ops. It chooses the loop on CPUs and foreach on accelerators, device ``lazygt`` among them, so
# that few ops are recorded. Nearly all optimizers give the same bits by both. Those named here
# round differently, so on CPU workers they loop, unless the user requests foreach.

#: Optimizer (name of its module and function) -> predicate: foreach rounds differently.
_ROUNDS_DIFFERENTLY: dict[str, Callable[[dict[str, Any]], bool]] = {
    "asgd": lambda arguments: True,
    "nadam": lambda arguments: True,
    "radam": lambda arguments: True,
    "adamax": lambda arguments: isinstance(arguments["lr"], torch.Tensor),
}


def register_optimizers() -> None:
    """Let optimizers and gradient clipping use foreach formulas, as on any accelerator."""
    for module in (optimizer, _foreach_utils):
        module._foreach_supported_types.append(LazyTensor)


def _preferring_loop(
    update: Callable[..., None],
    differs: Callable[[dict[str, Any]], bool],
) -> Callable[..., None]:
    """Wrap an optimizer's function: it loops over parameters if foreach rounds differently."""
    signature = inspect.signature(update)

    @functools.wraps(update)
    def chosen(*args: Any, **kwargs: Any) -> None:
        """Call the optimizer's function with ``foreach=False`` where needed."""
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        lazy = any(is_lazy(p) for p in arguments["params"])
        if lazy and arguments.get("foreach") is None and workers_device() == "cpu":
            arguments["foreach"] = False if differs(arguments) else None
        update(*bound.args, **bound.kwargs)

    return chosen


_foreach_devices: Any = swa_utils._get_foreach_kernels_supported_devices  # type: ignore[attr-defined]


@functools.wraps(_foreach_devices)
def _averaging_devices() -> list[str]:
    """Return the devices on which ``AveragedModel`` (SWA) uses a foreach lerp."""
    return [d for d in _foreach_devices() if d != NAME or workers_device() != "cpu"]


def _patch(name: str, differs: Callable[[dict[str, Any]], bool]) -> Patch:
    """Return the patch of one optimizer's function."""
    module = importlib.import_module(f"torch.optim.{name}")
    return Patch(module, name, _preferring_loop(getattr(module, name), differs), _BITS)


_BITS = "on CPU workers the loop has eager torch's bits, and torch asks only for the device's type"
PATCHES = (
    *[_patch(name, differs) for name, differs in _ROUNDS_DIFFERENTLY.items()],
    Patch(swa_utils, "_get_foreach_kernels_supported_devices", _averaging_devices, _BITS),
)


# -- registration of derivatives -------------------------------------------------------------------

aten: Any = torch.ops.aten
_Kernel = Callable[..., torch.Tensor]


def register_derivatives() -> torch.library.Library:
    """Register the formulas for max, min, median, prod and masked_fill."""
    library = torch.library.Library("aten", "IMPL")
    for op in (aten.max, aten.min, aten.median, aten.nanmedian):
        _register(library, op.default, _minmax(op.default))
    _register(library, aten.prod.default, _product)
    _register(library, aten.prod.dim_int, _product_along)

    def filled(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        needs_grad = value.requires_grad
        return _Filled.apply(x, mask, value) if needs_grad else NotImplemented  # type: ignore[no-untyped-call]

    def filled_(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        needs_grad = value.requires_grad
        return x.copy_(x.masked_fill(mask, value)) if needs_grad else NotImplemented

    _register(library, aten.masked_fill.Tensor, filled)
    _register(library, aten.masked_fill_.Tensor, filled_)
    return library


def _register(library: torch.library.Library, op: Any, formula: Callable[..., Any]) -> None:
    """Register a formula for calls with a gradient; others go to torch's own kernel.

    Args:
        formula: function with the op's arguments; ``NotImplemented``: torch's kernel is called.
    """
    keys = torch._C.DispatchKey

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the formula, or redispatch to torch's kernel."""
        all_lazy = all(is_lazy(a) for a in args if isinstance(a, torch.Tensor))
        needs_grad = any(a.requires_grad for a in args if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and all_lazy and needs_grad and forward_ad._current_level < 0:
            result = formula(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # AutogradOther still has torch's own formula, which this kernel hides for the device
        remaining_keys = keyset.remove(keys.AutogradPrivateUse1)
        remaining_keys = remaining_keys | torch._C.DispatchKeySet(keys.AutogradOther)
        return op.redispatch(remaining_keys, *args, **kwargs)

    library.impl(op, kernel, "AutogradPrivateUse1", with_keyset=True)


# -- max, min and median ---------------------------------------------------------------------------


def _minmax(op: Any) -> _Kernel:
    """Return the differentiable function of max, min or median over all elements."""

    class Extreme(torch.autograd.Function):
        """Reduction with a gradient that all elements equal to the result share."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = op(x)
            ctx.save_for_backward(x, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            x, result = ctx.saved_tensors
            mask = (x == result).logical_or_(x.isnan().logical_and_(result.isnan()))
            return grad.new_zeros(x.shape).masked_fill_(mask, grad / mask.sum())

    return Extreme.apply


# -- products --------------------------------------------------------------------------------------


def _product(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """Return the product of all elements, with its formula."""
    return _Product.apply(x, None, False, dtype)  # type: ignore[no-untyped-call]


def _product_along(
    x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Return the product along a dim, with its formula."""
    return _Product.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """Product; its gradient is the product divided by each element, without division by zero."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        reduction_args = () if dim is None else (dim, keepdim)
        result: torch.Tensor = torch.prod(x, *reduction_args, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        x = x.to(grad.dtype)
        if x.dim() == 0:
            return grad, None, None, None
        dim = ctx.dim
        if dim is not None and not ctx.keepdim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        return _product_gradient(grad, x, result, dim), None, None, None


def _product_gradient(
    grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None
) -> torch.Tensor:
    """Return the gradient of a product: result / x, or leave-one-out products if x has zeros."""
    zeros = x == 0
    # zeros are replaced in the divisor: the second gradient must not divide by zero, even where
    # the other formula gives the result
    quotient = grad * (result / torch.where(zeros, 1, x)).conj()
    if x.numel() == 0:
        return quotient
    if dim is not None:
        leave_one_out = _leave_one_out_products(grad, x, dim)
    else:
        leave_one_out = _leave_one_out_products(grad, x.contiguous().view(-1), 0).view_as(x)
        if not torch.is_grad_enabled():
            leave_one_out = torch.where(zeros.sum() > 1, 0, leave_one_out)
    return torch.where(zeros.any().logical_not(), quotient, leave_one_out)


def _leave_one_out_products(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return grad times the product of all other elements, by prefix and suffix products."""
    size = x.shape[dim]
    if size == 1:
        return grad
    shape = list(x.shape)
    shape[dim] = 1
    ones = torch.ones(shape, dtype=grad.dtype, device=grad.device)
    before = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    behind = torch.cat([ones, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


# -- masked_fill with a differentiable value -------------------------------------------------------


class _Filled(torch.autograd.Function):
    """``masked_fill`` by a tensor; its gradient is the sum over the filled elements.

    The sum is a sync point, as on a GPU, except where nothing is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        rest = grad.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[2]:
            return rest, None, None
        filled = grad.masked_select(mask) if computes_values() else torch.where(mask, grad, 0)
        return rest, None, filled.sum()
