"""Hooks of styles: constrain the placements of a module's inputs and outputs at each call.

Placements of a style are fixed: the solver may choose no others. So are those of the gradients. A
value with the same fixed placement is returned as it is, and layers with the same layout of one
value get one object: a shared value is gathered once, and the sum of its gradients is reduced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import Placement
from lazygt.parallel.distribute import drop_hooks, placements_for, unspecified, with_sharding
from lazygt.record.annotate import mesh_of
from lazygt.record.tensor import LazyTensor, Owner, is_lazy, meta_of, storage_of, view_of


class Layout(NamedTuple):
    """Layout of an input or output tensor of a module.

    Attributes:
        placement: placement of the tensor and of its gradient.
        desired: placement of the tensor inside the module, without a constraint on its gradient.
            None: ``placement``.
        grad_placement: for outputs, placement of the gradient that the module's own ops receive.
            None: ``placement``.
    """

    placement: Placement
    desired: Placement | None = None
    grad_placement: Placement | None = None


@dataclass(frozen=True)
class ModuleLayouts:
    """Layouts that a style gives one module.

    Attributes:
        parameters: placements of the module's own parameters, by name; others are replicated. None:
            the style does not concern parameters.
        inputs: layouts of the arguments of ``forward``, in order; None: unchanged.
        keywords: layouts of keyword arguments.
        outputs: layouts of the results.
        counted: True if there must be a layout for each positional argument, and for each result.
    """

    parameters: Mapping[str, Placement] | None = None
    inputs: tuple[Layout | None, ...] = ()
    keywords: Mapping[str, Layout] = field(default_factory=dict)
    outputs: tuple[Layout | None, ...] = ()
    counted: bool = False


def apply_style(module: nn.Module, mesh_dim: str, layouts: ModuleLayouts) -> None:
    """Register hooks that constrain a module's inputs and outputs.

    The hooks of an earlier style along the axis are removed; a style without parameter placements
    removes only the hooks of inputs or outputs that it replaces.

    Args:
        mesh_dim: axis of the mesh.
        layouts: the style's placements of inputs and outputs.
    """
    arguments = layouts.inputs or layouts.keywords
    if layouts.parameters is not None or arguments:
        drop_hooks(module, _InputHook, mesh_dim)
    if layouts.parameters is not None or layouts.outputs:
        drop_hooks(module, _OutputHook, mesh_dim)
    if arguments:
        names = tuple(signature(module.forward).parameters)[: len(layouts.inputs)]
        module.register_forward_pre_hook(
            _InputHook(mesh_dim, layouts.inputs, layouts.counted, names, layouts.keywords),
            with_kwargs=True,
        )
    if layouts.outputs:
        module.register_forward_hook(_OutputHook(mesh_dim, layouts.outputs, layouts.counted))


@dataclass(frozen=True)
class _StyleHook:
    """Hook of a module that has a style."""

    mesh_dim: str
    layouts: tuple[Layout | None, ...]
    counted: bool

    def _check_count(self, kind: str, number: int) -> None:
        """Raise ValueError for more arguments or results than layouts."""
        if self.counted and number > len(self.layouts):
            raise ValueError(
                f"{number} {kind}, but {len(self.layouts)} layouts: say one of each, None for what "
                f"stays as it comes"
            )


@dataclass(frozen=True)
class _InputHook(_StyleHook):
    """Forward pre-hook that places inputs.

    Attributes:
        names: names of the arguments of ``layouts``.
        keywords: layouts of further keyword arguments.
    """

    names: tuple[str, ...]
    keywords: Mapping[str, Layout]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.layouts:
            self._check_count(f"arguments of {type(module).__name__}", len(args))
        by_name = {**dict(zip(self.names, self.layouts, strict=False)), **self.keywords}
        by_keyword = {
            name: _constrain(f"argument {name!r}", value, self.mesh_dim, by_name.get(name))
            for name, value in kwargs.items()
        }
        layouts = (*self.layouts, *(None,) * len(args))
        positional = tuple(
            _constrain(f"argument {number}", arg, self.mesh_dim, layout)
            for number, (arg, layout) in enumerate(zip(args, layouts, strict=False))
        )
        return positional, by_keyword


@dataclass(frozen=True)
class _OutputHook(_StyleHook):
    """Forward hook that places the tensors in a module's output, in order."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        self._check_count(f"results of {type(module).__name__}", len(leaves))
        if len(leaves) < len(self.layouts):
            raise ValueError(
                f"{type(module).__name__} returned {len(leaves)} results, but the style has "
                f"{len(self.layouts)} layouts for them"
            )
        for number, layout in enumerate(self.layouts):
            name = f"result {number} of {type(module).__name__}"
            leaves[number] = _constrain(name, leaves[number], self.mesh_dim, layout)
        return tree_unflatten(leaves, spec)


def _constrain(name: str, value: Any, mesh_dim: str, layout: Layout | None) -> Any:
    """Return a tensor with a fixed placement on one axis, if the session's mesh has it.

    Args:
        name: the value's name in errors.
        layout: None: the value is returned as it is.

    Raises:
        TypeError: the value is no tensor.
        ValueError: the tensor has no such dim.
    """
    if layout is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} has the layout {layout.placement!r}, but is a {type(value).__name__}; say "
            f"None for what is no tensor"
        )
    if not is_lazy(value) or mesh_dim not in mesh_of(value).names:
        return value
    if not (torch.is_grad_enabled() and value.requires_grad):
        return _constrained(name, value, mesh_dim, layout)
    forms = _cached_forms(value)
    if (mesh_dim, layout) not in forms:
        forms[mesh_dim, layout] = _constrained(name, value, mesh_dim, layout)
    return forms[mesh_dim, layout]


def _constrained(name: str, value: LazyTensor, mesh_dim: str, layout: Layout) -> LazyTensor:
    """Return a tensor with a layout's fixed placement; the tensor itself if it has it."""
    mesh, current = mesh_of(value), storage_of(value).placed
    axis_index = mesh.names.index(mesh_dim)
    full_name = f"{name}, a tensor of {meta_of(value)},"

    def fixed(placement: Placement) -> Sharding:
        """Return a fixed sharding with this placement on the axis, and open on the others."""
        placements = placements_for(
            full_name, value.dim(), {mesh_dim: placement}, mesh, unspecified(mesh)
        )
        return Sharding(placements, fixed=True)

    sharding = fixed(layout.placement)
    is_constrained = (
        current is not None
        and current.fixed
        and current.placements[axis_index] == sharding.placements[axis_index]
        and view_of(value) is None
    )
    if not is_constrained:
        grad_sharding = None if layout.grad_placement is None else fixed(layout.grad_placement)
        value = with_sharding(value, sharding, grad_sharding=grad_sharding)
    if layout.desired is not None:
        value = with_sharding(value, fixed(layout.desired), with_gradient=False)
    return value


# -- cache of constrained tensors, for values that layers share -----------------------------------

#: Constrained forms of a tensor: (axis, layout) -> the tensor with that layout.
_Forms = dict[tuple[str, Layout], LazyTensor]


class _TraceCache(NamedTuple):
    """Cache of one trace, which has a serial number."""

    serial: int
    #: tensor -> (index of its value in the trace, its grad_fn, its constrained forms)
    tensors: WeakIdKeyDictionary


_caches: WeakKeyDictionary[Owner, _TraceCache] = WeakKeyDictionary()


def _cached_forms(value: LazyTensor) -> _Forms:
    """Return the cached constrained forms of a tensor in this trace.

    A write to the tensor, or another ``grad_fn``, invalidates them.
    """
    owner = storage_of(value).owner
    with owner.lock:
        index, cache = owner.index_of(value), _caches.get(owner)
        if cache is None or cache.serial != owner.serial:
            cache = _caches[owner] = _TraceCache(owner.serial, WeakIdKeyDictionary())
        forms: _Forms
        cached_index, grad_fn, forms = cache.tensors.get(value, (None, None, {}))
        if cached_index != index or grad_fn is not value.grad_fn:
            forms = {}
            cache.tensors[value] = index, value.grad_fn, forms
        return forms
