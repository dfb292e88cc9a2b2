"""Mixed precision of FSDP: modules compute with casts of their parameters.

Parameters, their gradients and an optimizer's state keep their dtype. While a module runs, casts
replace its parameters. Blocks are cast before they are gathered, so a gather moves bytes of the
casts' dtype. A gradient is reduced in a dtype of its own, and then cast to the parameter's.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import SingleRank, Unspecified
from lazygt.parallel.distribute import placed
from lazygt.record.annotate import reduce_as, set_sharding, stored_now
from lazygt.record.tensor import is_lazy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class _Slot(NamedTuple):
    """Place of a parameter: a module and an attribute name."""

    module: nn.Module
    name: str


def apply_policy(
    module: nn.Module,
    units: Collection[nn.Module],
    parameters: Collection[Tensor],
    policy: MixedPrecisionPolicy,
) -> None:
    """Make a module compute as a policy says.

    The policy also holds for each module inside that is called alone, as a checkpointed module is
    in the backward.

    Args:
        units: modules with inputs to cast, if they have any of the parameters.
        parameters: parameters to cast; one that has an earlier policy keeps it.
    """
    dtype, casts = policy.param_dtype, _Casts(policy.param_dtype, policy.reduce_dtype)
    taken, modules = set(map(id, parameters)), list(module.modules())
    hooks = [hook for inner in modules for hook in inner._forward_pre_hooks.values()]
    earlier = {slot for hook in hooks if isinstance(hook, _Enter) for slot in hook.slots}
    for inner in modules:
        slots = [slot for slot in _slots(inner, taken) if slot not in earlier]
        if slots and (dtype or policy.reduce_dtype):
            inner.register_forward_pre_hook(_Enter(casts, slots), prepend=True)
            inner.register_forward_hook(_Leave(casts), always_call=True)
        if slots and dtype and policy.cast_forward_inputs and inner in units:
            cast = _CastInputs(dtype)
            inner.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(_CastOutputs(policy.output_dtype))


def _slots(module: nn.Module, taken: Collection[int]) -> list[_Slot]:
    """Return the slots of these parameters in a module and those inside, tied ones at each."""
    return [
        _Slot(inner, name)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if id(parameter) in taken
    ]


# -- while a module runs ---------------------------------------------------------------------------


@dataclass
class _Casts:
    """Casts of one call's parameters.

    Attributes:
        running: the outermost running module, and the parameters that its casts replace.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    running: tuple[nn.Module, list[tuple[_Slot, nn.Parameter]]] | None = None
    #: recursion depth of the outermost module
    depth: int = 0

    def enter(self, module: nn.Module, slots: Collection[_Slot]) -> None:
        """Replace a module's parameters by casts as it begins to run, unless another one runs."""
        if self.running is not None:
            self.depth += self.running[0] is module
            return
        stands_for = []
        casts: dict[int, Tensor] = {}
        for slot in slots:
            parameter = slot.module._parameters.get(slot.name)
            if isinstance(parameter, nn.Parameter) and self._concerns(parameter):
                if id(parameter) not in casts:
                    casts[id(parameter)] = self._cast(parameter)
                _set(slot, casts[id(parameter)])
                stands_for.append((slot, parameter))
        self.running, self.depth = (module, stands_for), 1

    def leave(self, module: nn.Module) -> None:
        """Restore the parameters when the outermost module has run, or failed."""
        if self.running is None or self.running[0] is not module:
            return
        self.depth -= 1
        if not self.depth:
            for slot, parameter in self.running[1]:
                _set(slot, parameter)
            self.running = None

    def _concerns(self, parameter: nn.Parameter) -> bool:
        others = {self.param_dtype, self.reduce_dtype} - {None, parameter.dtype}
        return bool(others) and parameter.is_floating_point()

    def _cast(self, parameter: nn.Parameter) -> Tensor:
        """Cast a parameter, unseen by dispatch modes.

        A checkpoint's policy counts the kept values in both passes, and only the second pass casts
        a block's parameters inside of it.
        """
        dtype = self.param_dtype or parameter.dtype
        with _disable_current_modes() if is_lazy(parameter) else nullcontext():
            cast: Tensor = _Cast.apply(parameter, dtype, self.reduce_dtype or dtype)  # type: ignore[no-untyped-call]
        return cast


def _set(slot: _Slot, value: Tensor) -> None:
    """Put a tensor in a parameter's place; it need not be a parameter itself."""
    slot.module._parameters[slot.name] = value  # type: ignore[assignment]
    if isinstance(slot.module, nn.RNNBase):  # it has them in a list, too
        at = slot.module._flat_weights_names.index(slot.name)
        slot.module._flat_weights[at] = value


class _Cast(torch.autograd.Function):
    """Cast of a parameter; its gradient is reduced in a dtype of its own."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Tensor:
        ctx.dtype, ctx.reduce_dtype = parameter.dtype, reduce_dtype
        ctx.home = stored_now(parameter) if is_lazy(parameter) else None
        if dtype == parameter.dtype:
            return parameter.view_as(parameter)
        cast = parameter.to(dtype)
        if is_lazy(cast) and ctx.home.unit is not None:
            set_sharding(cast, ctx.home)  # so it is stored even where a sync point follows
        return cast

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.home is None:
            return grad.to(ctx.reduce_dtype).to(ctx.dtype), None, None
        if grad.dtype != ctx.reduce_dtype:
            grad = reduce_as(grad, ctx.reduce_dtype)
        placements = tuple(map(_of_gradient, ctx.home.placements))
        return placed(grad, Sharding(placements)).to(ctx.dtype), None, None


def _of_gradient(placement: Any) -> Any:
    return Unspecified() if isinstance(placement, SingleRank) else placement


# -- hooks: they are copied with their modules -----------------------------------------------------


@dataclass(frozen=True)
class _Enter:
    casts: _Casts
    slots: list[_Slot] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.casts.enter(module, self.slots)


@dataclass(frozen=True)
class _Leave:
    casts: _Casts

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.casts.leave(module)


@dataclass(frozen=True)
class _CastInputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _in_dtype((args, kwargs), self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _in_dtype(output, self.dtype)


def _in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Return the same with each floating-point tensor in a dtype."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, values)
