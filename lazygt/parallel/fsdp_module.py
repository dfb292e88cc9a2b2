"""FSDP2's methods of a sharded module, with their meaning in lazygt.

One plan covers a full step and decides the order of gathers, prefetching and the number of gradient
reductions. Methods for these decisions only check their arguments. Methods that would change
numbers, or the collectives' backend, raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from lazygt.graph.mesh import FSDPUnit, Sharding
from lazygt.graph.placement import Placement, SingleRank, Unspecified
from lazygt.parallel.distribute import with_sharding
from lazygt.parallel.fsdp_overrides import forced_reshard
from lazygt.record.annotate import current_sharding, reduce_as, set_sharding
from lazygt.record.tensor import LazyTensor, is_lazy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# -- mixed precision of FSDP: modules compute with casts of their parameters -----------------------
# Parameters, their gradients and an optimizer's state keep their dtype. While a module runs,
# casts replace its parameters. Blocks are cast before they are gathered, so a gather moves bytes
# of the casts' dtype. A gradient is reduced in a dtype of its own, and then cast to the
# parameter's.


class _Slot(NamedTuple):
    """Attribute of a module that has a parameter; a tied parameter has several slots."""

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
    existing_slots = {slot for hook in hooks if isinstance(hook, _CastHook) for slot in hook.slots}
    for submodule in modules:
        slots = [slot for slot in _slots(submodule, parameter_ids) if slot not in existing_slots]
        if slots and (dtype or policy.reduce_dtype):
            submodule.register_forward_pre_hook(_CastHook(casts, slots), prepend=True)
            submodule.register_forward_hook(_RestoreHook(casts), always_call=True)
        if slots and dtype and policy.cast_forward_inputs and submodule in units:
            cast = _CastInputs(dtype)
            submodule.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(_CastOutputs(policy.output_dtype))


def _slots(module: nn.Module, parameter_ids: Collection[int]) -> list[_Slot]:
    """Return all slots of these parameters in a module and its submodules."""
    return [
        _Slot(submodule, name)
        for submodule in module.modules()
        for name, parameter in submodule._parameters.items()
        if id(parameter) in parameter_ids
    ]


# -- casts of parameters during a call -------------------------------------------------------------


@dataclass
class _Casts:
    """Casts that replace the parameters of one `fully_shard` call while its modules run.

    Attributes:
        param_dtype, reduce_dtype: see `fully_shard`; None: the parameter's.
        running: the outermost running module, and the replaced parameters with their slots.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    running: tuple[nn.Module, list[tuple[_Slot, nn.Parameter]]] | None = None
    #: recursion depth of the outermost module
    depth: int = 0

    def enter(self, module: nn.Module, slots: Collection[_Slot]) -> None:
        """Replace a module's parameters by casts, unless an outer module has done it."""
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
        """Cast a parameter; the cast of a lazy one is hidden from dispatch modes.

        Selective checkpointing is such a mode. It pairs the values that the forward saves with
        those of the recomputation by their count, but only the recomputation casts a checkpointed
        module's parameters inside of the module.
        """
        dtype = self.param_dtype or parameter.dtype
        with _disable_current_modes() if is_lazy(parameter) else nullcontext():
            cast: Tensor = _CastParameter.apply(parameter, dtype, self.reduce_dtype or dtype)  # type: ignore[no-untyped-call]
        return cast


def _set(slot: _Slot, value: Tensor) -> None:
    """Set a module's parameter to a tensor, which need not be an nn.Parameter."""
    slot.module._parameters[slot.name] = value  # type: ignore[assignment]
    if isinstance(slot.module, nn.RNNBase):  # RNNs have a second list of their weights
        index = slot.module._flat_weights_names.index(slot.name)
        slot.module._flat_weights[index] = value


class _CastParameter(torch.autograd.Function):
    """Cast of a parameter; backward reduces the gradient in ``reduce_dtype``."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Tensor:
        ctx.dtype, ctx.reduce_dtype = parameter.dtype, reduce_dtype
        ctx.sharding = current_sharding(parameter) if is_lazy(parameter) else None
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


def _gradient_placement(placement: Placement) -> Placement:
    """Return the placement of a gradient: its parameter's, but open for a single-rank one."""
    return Unspecified() if isinstance(placement, SingleRank) else placement


# -- hooks, which are copied with their modules ----------------------------------------------------


@dataclass(frozen=True)
class _CastHook:
    """Forward pre-hook that casts parameters."""

    casts: _Casts
    slots: list[_Slot] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.casts.enter(module, self.slots)


@dataclass(frozen=True)
class _RestoreHook:
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


# -- FSDP2's methods of a sharded module, with their meaning in lazygt -----------------------------


class FSDPModule:
    """Module that ``fully_shard`` was called on; its class derives from the original one."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Do nothing: ops always use full parameters, and gathers are launched ahead.

        Returns:
            With ``async_op`` a handle of a finished operation; else None.
        """
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Do nothing: full weights are freed after their last use."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Gather weights again for each backward from now on, or retain full weights until then.

        Args:
            recurse: include modules inside that ``fully_shard`` was called on.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward({reshard_after_forward!r}): expected a bool"
            )
        reshards = forced_reshard(reshard_after_forward)
        for t, unit in _sharded(cast("nn.Module", self), recurse):
            changed = unit._replace(reshard_after_forward=reshards)
            if changed != unit:
                set_sharding(t, current_sharding(t)._replace(unit=changed))

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Check the argument: full weights are freed after each backward in any case.

        Raises:
            NotImplementedError: False for modules that are resharded after the forward.
        """
        retained = not reshard_after_backward
        if retained and any(
            unit.reshard_after_forward for _, unit in _sharded(cast("nn.Module", self), recurse)
        ):
            raise NotImplementedError(
                "set_reshard_after_backward(False): weights are kept whole over the microbatches "
                "of a step where they are kept for the backward, too; call "
                "set_reshard_after_forward(False)"
            )

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: the plan decides how often gradients of microbatches are reduced.

        The decision depends on bytes and ``fully_shard(bucket_cap_mb=)``; no number changes.
        """

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Do nothing, as `set_requires_gradient_sync`."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: the recorded step shows the last backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Do nothing: a backward gathers only weights that it reads."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Check the modules: gathers are launched one ahead, in the order of recorded ops.

        Raises:
            ValueError: one of them is not fully sharded.
        """
        _check_sharded("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Check the modules, as `set_modules_to_forward_prefetch`."""
        _check_sharded("set_modules_to_backward_prefetch", modules)

    def reset_iter_state(self) -> None:
        """Do nothing: a failed step leaves no state behind."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the original class and the state, since `_fsdp_class` is not importable."""
        _, _, *state = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _empty, (_plain_class(type(self)),), *state


class UnshardHandle:
    """Handle that ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Return at once."""


_COMMUNICATION = "the session's collectives carry gradients and weights"
#: unsupported method -> reason, and the replacement
_UNSUPPORTED = {
    "set_gradient_divide_factor": "gradients are those of the loss as it is written; divide that",
    "set_reduce_scatter_divide_factor": "gradients are those of the loss as it is written; "
    "divide that",
    "set_all_reduce_hook": "register a hook on the parameter: p.register_hook(...)",
    "set_custom_all_gather": _COMMUNICATION,
    "set_custom_reduce_scatter": _COMMUNICATION,
    "set_force_sum_reduction_for_comms": _COMMUNICATION,
    "set_reduce_scatter_unused_params": "a parameter that no loss depends on has no gradient",
    "set_reduce_scatter_max_input_buffers": "one reduction is under way at a time, or as many as "
    "there are with fully_shard(limit_all_gathers=False)",
    "set_separate_reduce_scatter_group": _COMMUNICATION,
    "set_allocate_memory_from_process_group_for_comm": _COMMUNICATION,
    "set_symm_mem_for_comm": _COMMUNICATION,
    "set_post_optim_event": "gathers follow the update in the plan of the step",
}


def _unsupported(name: str, why: str) -> Callable[..., None]:
    """Return a method of ``FSDPModule`` that raises NotImplementedError with a reason."""

    def refuse(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}() has no meaning for a lazygt module: {why}")

    refuse.__name__, refuse.__doc__ = name, f"Raises NotImplementedError: {why}."
    return refuse


for _name, _why in _UNSUPPORTED.items():
    setattr(FSDPModule, _name, _unsupported(_name, _why))


def as_fsdp_module(module: nn.Module) -> nn.Module:
    """Mix ``FSDPModule`` into a module's class, and return the module."""
    if not isinstance(module, FSDPModule):
        module.__class__ = _fsdp_class(type(module))
    return module


#: class of a module -> its subclass with the methods of FSDPModule
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fsdp_class(plain_class: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module class with FSDPModule as a mixin, cached."""
    fsdp_class = _classes.get(plain_class)
    if fsdp_class is None:
        fsdp_class = type(
            f"FSDP{plain_class.__name__}",
            (FSDPModule, plain_class),
            {"__module__": plain_class.__module__, "__plain_class__": plain_class},
        )
        _classes[plain_class] = fsdp_class
    return fsdp_class


def _plain_class(fsdp_class: type) -> type[nn.Module]:
    """Return the original class behind a class of `_fsdp_class`."""
    return cast("type[nn.Module]", fsdp_class.__plain_class__)  # type: ignore[attr-defined]


def _empty(plain_class: type[nn.Module]) -> nn.Module:
    """Return a module without state, for ``copy`` and ``pickle`` to fill."""
    fsdp_class = _fsdp_class(plain_class)
    return fsdp_class.__new__(fsdp_class)


def _sharded(module: nn.Module, recurse: bool) -> Iterator[tuple[LazyTensor, FSDPUnit]]:
    """Yield the sharded parameters of a module, each with its FSDP unit.

    Args:
        recurse: include those of modules inside that ``fully_shard`` was called on.
    """
    fsdp_children = [
        child for child in module.modules() if child is not module and isinstance(child, FSDPModule)
    ]
    excluded = (
        set()
        if recurse
        else {id(p) for child in fsdp_children for p in cast("Any", child).parameters()}
    )
    for parameter in module.parameters():
        unit = current_sharding(parameter).unit if is_lazy(parameter) else None
        if unit is not None and id(parameter) not in excluded:
            yield cast("LazyTensor", parameter), unit


def _check_sharded(method: str, modules: Iterable[Any]) -> None:
    """Raise ValueError for a module that is not fully sharded."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{method}() takes modules that fully_shard was called on, "
                f"not a {type(module).__name__}"
            )
