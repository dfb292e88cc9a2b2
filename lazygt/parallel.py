"""Ways to lay out whole modules on the mesh, named as in ``torch.distributed.tensor.parallel``.

    lazygt.parallelize(model, {
        "tokens": lazygt.vocab_parallel(),
        "blocks.*.qkv": lazygt.column_parallel(), "blocks.*.out": lazygt.row_parallel(),
        "blocks.*.mlp.0": lazygt.column_parallel(), "blocks.*.mlp.2": lazygt.row_parallel(),
    })

A style says how a module's own parameters are stored, and how what goes into the module and what
comes out lies on one axis of the mesh; gradients there lie alike. All of it is pinned: who names
such a style wants its collectives. Styles change where values lie, never the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lazygt.graph.label import Replicated
from lazygt.graph.mesh import Stored
from lazygt.session import current
from lazygt.sharding import (
    Placements,
    drop_hooks,
    mesh_of,
    own_parameter,
    placed,
    placement_for,
    store,
    stored_now,
    unsaid,
)
from lazygt.tensor import LazyTensor, meta_of


@dataclass(frozen=True)
class Style:
    """How a module lies on one axis of the mesh.

    Attributes:
        mesh_dim: the axis.
        parameters: placements of the module's own parameters, by name; others are whole.
        inputs: placements of the positional arguments, in order; None: as it comes.
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
    shard, whole = _placements()
    return Style(
        mesh_dim, {"weight": shard(0), "bias": shard(0)}, (input_layouts or whole,), output_layouts
    )


def row_parallel(mesh_dim: str = "model", output_layouts: Any = None) -> Style:
    """A linear layer cut by its inputs: each rank adds some of them, the sums are reduced.

    Args:
        output_layouts: how the output, and its gradient, lies; by default whole. ``Shard(1)``: in
            blocks of the sequence.
    """
    shard, whole = _placements()
    return Style(mesh_dim, {"weight": shard(1)}, (), output_layouts or whole)


def sequence_parallel(mesh_dim: str = "model", sequence_dim: int = 1) -> Style:
    """A norm or dropout on blocks of the sequence; its parameters are whole."""
    shard, _ = _placements()
    return Style(mesh_dim, {}, (shard(sequence_dim),), shard(sequence_dim))


def vocab_parallel(mesh_dim: str = "model", output_layouts: Any = None) -> Style:
    """An embedding cut by words: each rank looks up those it has, the results are reduced.

    For the head that gives logits, ``column_parallel()`` cuts by words as well: a cross-entropy
    of its output exchanges numbers a token, not logits.

    Args:
        output_layouts: as in ``row_parallel``.
    """
    shard, whole = _placements()
    return Style(mesh_dim, {"weight": shard(0)}, (), output_layouts or whole)


def prepare_module_input(*input_layouts: Any, mesh_dim: str = "model") -> Style:
    """How the positional arguments of any module lie, for layers that share one input."""
    return Style(mesh_dim, {}, input_layouts)


def data_parallel(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Pin a module's parameters whole along an axis: gradients are summed, once each.

    Batches are cut with ``lazygt.distribute(batch, {"data": Shard(0)})``.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or a parameter is no lazygt tensor of its own.
    """
    return parallelize(module, {"*": {mesh_dim: _placements()[1]}}, pinned=True)


def parallelize(
    module: nn.Module, plan: Mapping[str, Placements | Style], pinned: bool = False
) -> nn.Module:
    """Store a module's parameters as ``plan`` says; each stays the object that it is.

    Args:
        plan: names of parameters -> placements, or names of modules -> styles, with ``*`` for any
            text. The first pattern that fits a name counts. Along an axis that a dict of
            placements does not name, a parameter keeps what it has; whole at first. Of a
            parameter with several names (a tied head) the first that fits a pattern counts.
        pinned: see ``distribute``; of placements only, styles are pinned.

    A module's style is also that of its copies, and counts in later sessions whose mesh has the
    axis.

    Returns:
        The module.

    Raises:
        ValueError: a pattern that fits nothing, or a placement that a parameter can't have;
            nothing has been placed then.
    """
    tables = {pattern: one for pattern, one in plan.items() if isinstance(one, Style)}
    found, fits = _styled(module, tables)
    wanted = _of_styles(module, found)
    rest = {pattern: one for pattern, one in plan.items() if not isinstance(one, Style)}
    unused = set(rest)
    for name, _ in module.named_parameters(remove_duplicate=False):
        pattern = next((p for p in rest if fnmatchcase(name, p)), None)
        if pattern is not None:
            unused.discard(pattern)
            wanted.setdefault(name, (rest[pattern], pinned))
    _check_used(module, unused, set(tables) - fits)
    _store(module, wanted)
    for name, style in found.items():
        _hold(module.get_submodule(name), style)
    return module


def _styled(module: nn.Module, tables: Mapping[str, Style]) -> tuple[dict[str, Style], set[str]]:
    """The style of each module that has one, and the patterns that fitted."""
    found, fits = {}, set()
    for name, _ in module.named_modules():
        pattern = next((p for p in tables if fnmatchcase(name, p)), None)
        if pattern is not None:
            found[name] = tables[pattern]
            fits.add(pattern)
    for style in found.values():
        current().mesh.size(style.mesh_dim)
    return found, fits


def _of_styles(module: nn.Module, found: Mapping[str, Style]) -> dict[str, tuple[Placements, bool]]:
    """How the parameters of modules that have a style are stored: placements, and pinned."""
    return {
        f"{name}.{own}".lstrip("."): (
            {style.mesh_dim: style.parameters.get(own, _placements()[1])},
            True,
        )
        for name, style in found.items()
        for own, _ in module.get_submodule(name).named_parameters(recurse=False)
    }


def _check_used(module: nn.Module, parameters: set[str], modules: set[str]) -> None:
    if parameters:
        names = ", ".join(name for name, _ in module.named_parameters())
        raise ValueError(f"no parameter fits {min(parameters)!r}; the module has: {names}")
    if modules:
        names = ", ".join(name for name, _ in module.named_modules() if name)
        raise ValueError(f"no module fits {min(modules)!r}; there are: {names}")


def _store(module: nn.Module, wanted: Mapping[str, tuple[Placements, bool]]) -> None:
    mesh = current().mesh
    named = _named(module, wanted)
    made: list[tuple[LazyTensor, Stored]] = []
    for (name, t), before in zip(named, stored_now(t for _, t in named), strict=True):
        placements, pinned = wanted[name]
        what = f"parameter {name!r} of {meta_of(t)}"
        labels = placement_for(what, t.dim(), placements, mesh, before.labels)
        unit = before.unit
        if unit is not None and labels[mesh.names.index(unit.axis)] == Replicated():
            unit = None
        made.append((t, Stored(labels, pinned or before.pinned, unit)))
    for t, stored in made:
        store(t, stored)


def _named(module: nn.Module, names: Container[str]) -> list[tuple[str, LazyTensor]]:
    """The parameters of these names; one that has several of them, only by the first."""
    found: dict[int, tuple[str, LazyTensor]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names:
            found.setdefault(id(parameter), (name, own_parameter(name, parameter)))
    return list(found.values())


def _hold(module: nn.Module, style: Style) -> None:
    """Place what goes into a module, and what comes out, whenever it is called."""
    drop_hooks(module, _Laying, style.mesh_dim)
    if style.inputs:
        module.register_forward_pre_hook(_Before(style.mesh_dim, style.inputs))
    if style.output is not None:
        module.register_forward_hook(_After(style.mesh_dim, style.output))


@dataclass(frozen=True)
class _Laying:
    """The hook of a module that has a style."""

    mesh_dim: str
    layout: Any


class _Before(_Laying):
    """Lays what goes in."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        here = [_laid(arg, self.mesh_dim, one) for arg, one in zip(args, self.layout, strict=False)]
        return (*here, *args[len(here) :])


class _After(_Laying):
    """Lays what comes out."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_laid(output[0], self.mesh_dim, self.layout), *output[1:])
        return _laid(output, self.mesh_dim, self.layout)


def _laid(value: Any, mesh_dim: str, layout: Any) -> Any:
    """A tensor pinned on one axis, if its session has that; anything else as it is."""
    if layout is None or not isinstance(value, LazyTensor):
        return value
    mesh = mesh_of(value)
    if mesh_dim not in mesh.names:
        return value
    what = f"a tensor of {meta_of(value)}"
    labels = placement_for(what, value.dim(), {mesh_dim: layout}, mesh, unsaid(mesh))
    return placed(value, Stored(labels, pinned=True))


def _placements() -> tuple[Callable[[int], Any], Any]:
    """torch's ``Shard`` and ``Replicate()``."""
    # why: torch.distributed.tensor takes 0.3 s to load, and few sessions shard
    from torch.distributed.tensor import Replicate, Shard

    return Shard, Replicate()
