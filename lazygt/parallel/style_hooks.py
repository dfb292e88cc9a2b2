"""Hooks that a style registers on its module: they place inputs and outputs at each call.

A placement that a style asks for is pinned, and so is that of the gradient. A value that is pinned
so already is returned itself, and layers that ask the same of one value get one object: a shared
value is gathered once, and the sum of its gradients is reduced once.
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
from lazygt.parallel.distribute import drop_hooks, placed, placements_for, unsaid
from lazygt.record.annotate import mesh_of
from lazygt.record.tensor import LazyTensor, Owner, is_lazy, meta_of, storage_of, view_of


class Layout(NamedTuple):
    """Layout of a tensor that goes into a module or comes out of it.

    Attributes:
        placement: placement of the tensor and of its gradient.
        desired: placement in which the module gets the tensor; that of its gradient stays free.
            None: ``placement``.
        behind: of a result, placement in which the module gets its gradient. None: ``placement``.
    """

    placement: Placement
    desired: Placement | None = None
    behind: Placement | None = None


@dataclass(frozen=True)
class ModuleLayouts:
    """Layouts that a style gives one module.

    Attributes:
        parameters: placements of the module's own parameters, by name, others are whole; None: the
            style says nothing of parameters.
        inputs: layouts of the arguments of ``forward``, in order; None: unchanged.
        keywords: layouts of arguments given by name.
        outputs: layouts of the results.
        counted: there is one layout for each positional argument, and for each result.
    """

    parameters: Mapping[str, Placement] | None = None
    inputs: tuple[Layout | None, ...] = ()
    keywords: Mapping[str, Layout] = field(default_factory=dict)
    outputs: tuple[Layout | None, ...] = ()
    counted: bool = False


def apply_style(module: nn.Module, mesh_dim: str, layouts: ModuleLayouts) -> None:
    """Place a module's inputs and outputs whenever it is called.

    The hooks of an earlier style along the axis are removed; a style that says nothing of the
    parameters removes only those of the sides (inputs, outputs) that it has layouts for.
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

    def _check_count(self, what: str, number: int) -> None:
        if self.counted and number > len(self.layouts):
            raise ValueError(
                f"{number} {what}, but {len(self.layouts)} layouts: say one of each, None for what "
                f"stays as it comes"
            )


@dataclass(frozen=True)
class _InputHook(_StyleHook):
    """Forward pre-hook that places inputs.

    Attributes:
        names: names of the arguments that ``layouts`` are for.
        keywords: layouts of further arguments that are given by name.
    """

    names: tuple[str, ...]
    keywords: Mapping[str, Layout]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.layouts:
            self._check_count(f"arguments of {type(module).__name__}", len(args))
        by_name = {**dict(zip(self.names, self.layouts, strict=False)), **self.keywords}
        named = {
            name: _constrain(f"argument {name!r}", value, self.mesh_dim, by_name.get(name))
            for name, value in kwargs.items()
        }
        padded = (*self.layouts, *(None,) * len(args))
        listed = tuple(
            _constrain(f"argument {number}", arg, self.mesh_dim, layout)
            for number, (arg, layout) in enumerate(zip(args, padded, strict=False))
        )
        return listed, named


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
            what = f"result {number} of {type(module).__name__}"
            leaves[number] = _constrain(what, leaves[number], self.mesh_dim, layout)
        return tree_unflatten(leaves, spec)


def _constrain(what: str, value: Any, mesh_dim: str, layout: Layout | None) -> Any:
    """Return a tensor pinned on one axis, if its session's mesh has the axis.

    Raises:
        TypeError: the value is no tensor.
        ValueError: the tensor has no such dim.
    """
    if layout is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{what} has the layout {layout.placement!r}, but is a {type(value).__name__}; say "
            f"None for what is no tensor"
        )
    if not is_lazy(value) or mesh_dim not in mesh_of(value).names:
        return value
    if not (torch.is_grad_enabled() and value.requires_grad):
        return _laid(what, value, mesh_dim, layout)
    laid = _laid_before(value)
    if (mesh_dim, layout) not in laid:
        laid[mesh_dim, layout] = _laid(what, value, mesh_dim, layout)
    return laid[mesh_dim, layout]


def _laid(what: str, value: LazyTensor, mesh_dim: str, layout: Layout) -> LazyTensor:
    """Return a tensor pinned as a layout says; one that is so already, itself."""
    mesh, before = mesh_of(value), storage_of(value).placed
    at = mesh.names.index(mesh_dim)
    full = f"{what}, a tensor of {meta_of(value)},"

    def pin(placement: Placement) -> Sharding:
        placements = placements_for(full, value.dim(), {mesh_dim: placement}, mesh, unsaid(mesh))
        return Sharding(placements, pinned=True)

    sharding = pin(layout.placement)
    is_so = (
        before is not None
        and before.pinned
        and before.placements[at] == sharding.placements[at]
        and view_of(value) is None
    )
    if not is_so:
        behind = None if layout.behind is None else pin(layout.behind)
        value = placed(value, sharding, behind=behind)
    if layout.desired is not None:
        value = placed(value, pin(layout.desired), with_gradient=False)
    return value


# -- values that layers share --------------------------------------------------------------------

#: (axis, layout) -> a tensor placed so.
_Laid = dict[tuple[str, Layout], LazyTensor]


class _Trace(NamedTuple):
    """Tensors placed in one trace: tensor -> (its value then, its grad_fn, its placed forms)."""

    serial: int
    tensors: WeakIdKeyDictionary


_traces: WeakKeyDictionary[Owner, _Trace] = WeakKeyDictionary()


def _laid_before(value: LazyTensor) -> _Laid:
    """Return the forms of a tensor that styles have placed in this trace, to be shared.

    For a tensor that was written since, or has another ``grad_fn`` now, there are none.
    """
    owner = storage_of(value).owner
    with owner.lock:
        index, trace = owner.index_of(value), _traces.get(owner)
        if trace is None or trace.serial != owner.serial:
            trace = _traces[owner] = _Trace(owner.serial, WeakIdKeyDictionary())
        laid: _Laid
        was, grad_fn, laid = trace.tensors.get(value, (None, None, {}))
        if was != index or grad_fn is not value.grad_fn:
            laid = {}
            trace.tensors[value] = index, value.grad_fn, laid
        return laid
