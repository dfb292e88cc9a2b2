"""FSDP2's methods of a sharded module, with their meaning in lazygt.

One plan covers a full step and decides the order of gathers, prefetching and the number of gradient
reductions. Methods for these decisions only check their arguments. Methods that would change
numbers, or the collectives' backend, raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from lazygt.graph.mesh import FSDPUnit
from lazygt.parallel.fsdp_overrides import forced_reshard
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.record.tensor import LazyTensor, is_lazy


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
                set_sharding(t, stored_now(t)._replace(unit=changed))

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


def _unsupported(name: str, why: str) -> Any:
    """Return a method that raises NotImplementedError with a reason."""

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
    """Return the original class of a module."""
    return cast("type[nn.Module]", fsdp_class.__plain_class__)  # type: ignore[attr-defined]


def _empty(plain_class: type[nn.Module]) -> nn.Module:
    """Return a module without state, for ``copy`` and ``pickle`` to fill."""
    fsdp_class = _fsdp_class(plain_class)
    return fsdp_class.__new__(fsdp_class)


def _sharded(module: nn.Module, recurse: bool) -> Iterator[tuple[LazyTensor, FSDPUnit]]:
    """Yield the sharded parameters of a module, each with its FSDP unit."""
    fsdp_children = [
        child for child in module.modules() if child is not module and isinstance(child, FSDPModule)
    ]
    excluded = (
        set()
        if recurse
        else {id(p) for child in fsdp_children for p in cast("Any", child).parameters()}
    )
    for parameter in module.parameters():
        unit = stored_now(parameter).unit if is_lazy(parameter) else None
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
