"""Styles: ways to lay out one module on an axis of the mesh, named as in torch's own
``torch.distributed.tensor.parallel``. ``lazygt.parallelize`` gives modules their styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lazygt.graph.mesh import Sharding
from lazygt.parallel.distribute import drop_hooks, placed, placements_for, unsaid
from lazygt.record.annotate import mesh_of
from lazygt.record.tensor import LazyTensor, meta_of


@dataclass(frozen=True)
class Style:
    """How a module lies on one axis of the mesh.

    Attributes:
        mesh_dim: the axis.
        parameters: placements of the module's own parameters, by name; others are whole.
        inputs: placements of the arguments of ``forward``, in order; None: as it comes.
        output: the placement of what it returns, or of the first tensor of that; None: as it is.
    """

    mesh_dim: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, ...] = ()
    output: Any = None


def column_parallel(
    mesh_dim: str = "model", input_layouts: Any = None, output_layouts: Any = None
) -> Style:
    """A linear layer cut by its outputs: each rank computes some of the features.

    Args:
        input_layouts: how the input, and its gradient, lies; by default whole. ``Shard(1)``: in
            blocks of the sequence, which are gathered here.
        output_layouts: how the output lies; by default in blocks of features.
    """
    shard, whole = torch_placements()
    return Style(
        mesh_dim, {"weight": shard(0), "bias": shard(0)}, (input_layouts or whole,), output_layouts
    )


def row_parallel(mesh_dim: str = "model", output_layouts: Any = None) -> Style:
    """A linear layer cut by its inputs: each rank adds some of them, the sums are reduced.

    Args:
        output_layouts: how the output, and its gradient, lies; by default whole. ``Shard(1)``: in
            blocks of the sequence.
    """
    shard, whole = torch_placements()
    return Style(mesh_dim, {"weight": shard(1)}, (), output_layouts or whole)


def sequence_parallel(mesh_dim: str = "model", sequence_dim: int = 1) -> Style:
    """A norm or dropout on blocks of the sequence; its parameters are whole."""
    shard, _ = torch_placements()
    return Style(mesh_dim, {}, (shard(sequence_dim),), shard(sequence_dim))


def vocab_parallel(mesh_dim: str = "model", output_layouts: Any = None) -> Style:
    """An embedding cut by words: each rank looks up those it has, the results are reduced.

    For the head that gives logits, ``column_parallel()`` cuts by words as well: a cross-entropy
    of its output exchanges numbers a token, not logits.

    Args:
        output_layouts: as in ``row_parallel``.
    """
    shard, whole = torch_placements()
    return Style(mesh_dim, {"weight": shard(0)}, (), output_layouts or whole)


def prepare_module_input(*input_layouts: Any, mesh_dim: str = "model") -> Style:
    """How the arguments of any module lie, in order, for layers that share one input."""
    return Style(mesh_dim, {}, input_layouts)


def hold(module: nn.Module, style: Style) -> None:
    """Place what goes into a module, and what comes out, whenever it is called."""
    drop_hooks(module, _Laying, style.mesh_dim)
    if style.inputs:
        names = tuple(signature(module.forward).parameters)[: len(style.inputs)]
        before = _Before(style.mesh_dim, style.inputs, names)
        module.register_forward_pre_hook(before, with_kwargs=True)
    if style.output is not None:
        module.register_forward_hook(_After(style.mesh_dim, style.output))


@dataclass(frozen=True)
class _Laying:
    """The hook of a module that has a style."""

    mesh_dim: str
    layout: Any


@dataclass(frozen=True)
class _Before(_Laying):
    """Lays what goes in.

    Attributes:
        names: of the arguments that have a layout.
    """

    names: tuple[str, ...]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        here = [_laid(arg, self.mesh_dim, one) for arg, one in zip(args, self.layout, strict=False)]
        named = {
            name: _laid(kwargs[name], self.mesh_dim, one)
            for name, one in zip(self.names, self.layout, strict=False)
            if name in kwargs
        }
        return (*here, *args[len(here) :]), kwargs | named


class _After(_Laying):
    """Lays what comes out."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        at = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, LazyTensor)), None)
        if at is not None:
            leaves[at] = _laid(leaves[at], self.mesh_dim, self.layout)
        return tree_unflatten(leaves, spec)


def _laid(value: Any, mesh_dim: str, layout: Any) -> Any:
    """A tensor pinned on one axis, if its session has that; anything else as it is."""
    if layout is None or not isinstance(value, LazyTensor):
        return value
    mesh = mesh_of(value)
    if mesh_dim not in mesh.names:
        return value
    what = f"a tensor of {meta_of(value)}"
    placements = placements_for(what, value.dim(), {mesh_dim: layout}, mesh, unsaid(mesh))
    return placed(value, Sharding(placements, pinned=True))


def torch_placements() -> tuple[Callable[[int], Any], Any]:
    """torch's ``Shard`` and ``Replicate()``."""
    # why: torch.distributed.tensor takes 0.3 s to load, and few sessions shard
    from torch.distributed.tensor import Replicate, Shard

    return Shard, Replicate()
