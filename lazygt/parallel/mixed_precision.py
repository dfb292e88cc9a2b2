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
from lazygt.parallel.distribute import with_sharding
from lazygt.record.annotate import reduce_as, set_sharding, stored_now
from lazygt.record.tensor import is_lazy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class _Slot(NamedTuple):
    """Attribute of a module with a parameter."""

    module: nn.Module
    name: str


def apply_policy(
    module: nn.Module,
    units: Collection[nn.Module],
    parameters: Collection[Tensor],
    policy: MixedPrecisionPolicy,
) -> None:
    """Register the hooks of a mixed-precision policy on a module.

    The policy also holds for a submodule that is called alone, such as a checkpointed module in the
    backward.

    Args:
        units: modules with inputs to cast, if they have any of the parameters.
        parameters: parameters to cast; an earlier policy of a parameter remains in effect.
    """
    dtype, casts = policy.param_dtype, _Casts(policy.param_dtype, policy.reduce_dtype)
    parameter_ids, modules = set(map(id, parameters)), list(module.modules())
    hooks = [hook for submodule in modules for hook in submodule._forward_pre_hooks.values()]
    existing_slots = {slot for hook in hooks if isinstance(hook, _Enter) for slot in hook.slots}
    for submodule in modules:
        slots = [slot for slot in _slots(submodule, parameter_ids) if slot not in existing_slots]
        if slots and (dtype or policy.reduce_dtype):
            submodule.register_forward_pre_hook(_Enter(casts, slots), prepend=True)
            submodule.register_forward_hook(_Leave(casts), always_call=True)
        if slots and dtype and policy.cast_forward_inputs and submodule in units:
            cast = _CastInputs(dtype)
            submodule.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(_CastOutputs(policy.output_dtype))


def _slots(module: nn.Module, parameter_ids: Collection[int]) -> list[_Slot]:
    """Return the slots of these parameters in a module and its submodules; all slots if tied."""
    return [
        _Slot(submodule, name)
        for submodule in module.modules()
        for name, parameter in submodule._parameters.items()
        if id(parameter) in parameter_ids
    ]


# -- casts of parameters during a call -------------------------------------------------------------


@dataclass
class _Casts:
    """Casts of one call's parameters.

    Attributes:
        running: the outermost running module, and the replaced parameters with their slots.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    running: tuple[nn.Module, list[tuple[_Slot, nn.Parameter]]] | None = None
    #: recursion depth of the outermost module
    depth: int = 0

    def enter(self, module: nn.Module, slots: Collection[_Slot]) -> None:
        """Replace a module's parameters by casts, unless an outer module is running."""
        if self.running is not None:
            self.depth += self.running[0] is module
            return
        replaced = []
        casts: dict[int, Tensor] = {}
        for slot in slots:
            parameter = slot.module._parameters.get(slot.name)
            if isinstance(parameter, nn.Parameter) and self._needs_cast(parameter):
                if id(parameter) not in casts:
                    casts[id(parameter)] = self._cast(parameter)
                _set(slot, casts[id(parameter)])
                replaced.append((slot, parameter))
        self.running, self.depth = (module, replaced), 1

    def leave(self, module: nn.Module) -> None:
        """Restore the parameters at the end of the outermost call."""
        if self.running is None or self.running[0] is not module:
            return
        self.depth -= 1
        if not self.depth:
            for slot, parameter in self.running[1]:
                _set(slot, parameter)
            self.running = None

    def _needs_cast(self, parameter: nn.Parameter) -> bool:
        """Return whether a dtype of the policy differs from the parameter's."""
        other_dtypes = {self.param_dtype, self.reduce_dtype} - {None, parameter.dtype}
        return bool(other_dtypes) and parameter.is_floating_point()

    def _cast(self, parameter: nn.Parameter) -> Tensor:
        """Cast a parameter, hidden from dispatch modes.

        Selective checkpointing matches the saved values of both passes by their count, but only
        the second pass casts a block's parameters inside of the block.
        """
        dtype = self.param_dtype or parameter.dtype
        with _disable_current_modes() if is_lazy(parameter) else nullcontext():
            cast: Tensor = _Cast.apply(parameter, dtype, self.reduce_dtype or dtype)  # type: ignore[no-untyped-call]
        return cast


def _set(slot: _Slot, value: Tensor) -> None:
    """Set a module's parameter to a tensor, which need not be an nn.Parameter."""
    slot.module._parameters[slot.name] = value  # type: ignore[assignment]
    if isinstance(slot.module, nn.RNNBase):  # RNNs have a second list of their weights
        index = slot.module._flat_weights_names.index(slot.name)
        slot.module._flat_weights[index] = value


class _Cast(torch.autograd.Function):
    """Cast of a parameter; backward reduces the gradient in ``reduce_dtype``."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Tensor:
        ctx.dtype, ctx.reduce_dtype = parameter.dtype, reduce_dtype
        ctx.sharding = stored_now(parameter) if is_lazy(parameter) else None
        if dtype == parameter.dtype:
            return parameter.view_as(parameter)
        cast = parameter.to(dtype)
        if is_lazy(cast) and ctx.sharding.unit is not None:
            set_sharding(cast, ctx.sharding)  # the cast is sharded even before a sync point
        return cast

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.sharding is None:
            return grad.to(ctx.reduce_dtype).to(ctx.dtype), None, None
        if grad.dtype != ctx.reduce_dtype:
            grad = reduce_as(grad, ctx.reduce_dtype)
        placements = tuple(map(_gradient_placement, ctx.sharding.placements))
        return with_sharding(grad, Sharding(placements)).to(ctx.dtype), None, None


def _gradient_placement(placement: Any) -> Any:
    """Return the placement of a gradient: free where its parameter is on a single rank."""
    return Unspecified() if isinstance(placement, SingleRank) else placement


# -- hooks, which are copied with their modules ----------------------------------------------------


@dataclass(frozen=True)
class _Enter:
    """Forward pre-hook that casts parameters."""

    casts: _Casts
    slots: list[_Slot] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.casts.enter(module, self.slots)


@dataclass(frozen=True)
class _Leave:
    """Forward hook that restores parameters."""

    casts: _Casts

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.casts.leave(module)


@dataclass(frozen=True)
class _CastInputs:
    """Forward pre-hook that casts floating-point inputs."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast_floats((args, kwargs), self.dtype)


@dataclass(frozen=True)
class _CastOutputs:
    """Forward hook that casts floating-point outputs."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast_floats(output, self.dtype)


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Cast each floating-point tensor of nested containers."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, values)
