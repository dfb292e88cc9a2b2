"""Parallelization plans: styles of modules by name, or placements of parameters by name.

    lazygt.parallelize_module(model, "model", {
        "tokens": lazygt.VocabParallel(),
        "blocks.*.qkv": lazygt.ColwiseParallel(), "blocks.*.out": lazygt.RowwiseParallel(),
        "blocks.*.mlp.0": lazygt.ColwiseParallel(), "blocks.*.mlp.2": lazygt.RowwiseParallel(),
    })

A style gives the placements of a module's own parameters, inputs and outputs on one axis of the
mesh; their gradients get the same placements. These placements are *fixed*: ops use the value in
them, even where the solver, which chooses placements by predicted time, would prefer others. So the
choice of a style is a choice of its collectives. Styles change the sharding of values, never the
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lazygt.errors import renamed
from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.placement import Placement, Replicate, Unspecified
from lazygt.parallel.distribute import (
    UserPlacements,
    placements_for,
    shardable_parameter,
    unspecified,
)
from lazygt.parallel.style_hooks import ModuleLayouts, apply_style
from lazygt.parallel.styles import ParallelStyle, as_style
from lazygt.record.annotate import current_sharding, set_sharding
from lazygt.record.tensor import LazyTensor, Storage, meta_of, storage_of
from lazygt.session import current

_Plan = dict[str, UserPlacements | ParallelStyle]
#: Maximum number of names in an error.
_MAX_NAMES = 8
#: Default axes of a mesh with several axes, by name.
_DEFAULT_AXES = ("model", "tp")


class _Styled(NamedTuple):
    """Style of a module in a plan.

    Attributes:
        pattern: the matching pattern of the plan.
        axis: the mesh axis.
        layouts: placements of the module's parameters, inputs and outputs.
    """

    pattern: str
    axis: str
    layouts: ModuleLayouts

    @property
    def parameters(self) -> Mapping[str, Placement]:
        """Placements of parameters by the style."""
        return self.layouts.parameters or {}


#: Module's name -> its style.
_Styles = dict[str, _Styled]


class _Request(NamedTuple):
    """Requested placements of a parameter under one of its names.

    Attributes:
        name: the name; tied parameters have several.
        placements: one for each axis; ``Unspecified`` on axes without a request.
        fixed: see the module's docstring.
    """

    name: str
    parameter: LazyTensor
    placements: Placements
    fixed: bool


def data_parallel(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Train data-parallel: replicate a module's parameters along one axis of the mesh.

    The placements are fixed (see above), so each gradient is all-reduced once. Shard the batches
    with ``lazygt.distribute(batch, {"data": Shard(0)})``.

    Args:
        module: the module, on device ``lazygt``.
        mesh_dim: name of the axis.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or a parameter is on another device, or a view of
            another tensor.
    """
    return parallelize_module(module, mesh_dim, {"*": {mesh_dim: Replicate()}}, fixed=True)


@renamed("pinned", "fixed")
def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    fixed: bool = False,
) -> nn.Module:
    """Shard a module's parameters by a plan; they stay the same objects.

    Args:
        device_mesh: the axis of the session's mesh for styles: its name, or a mesh of this one
            axis, such as ``session.mesh["model"]``. None: the only axis; of several, the one
            named ``model`` or ``tp``.
        parallelize_plan: names of modules -> styles, lazygt's or torch's own, with ``*`` for any
            text between two dots; ``""`` is the module itself, and a single style means that. Or
            names of parameters -> placements, with ``*`` for any text. The first matching pattern
            counts; the pattern of a module's style matches the parameters that the style places.
            The other parameters of a styled module are replicated along the style's axis. Along
            other axes a parameter keeps its placement, replicated at first. Placements under all
            names of one parameter (a tied head) are merged.
        src_data_rank: changes nothing: there is one client, and all workers get its values.
        fixed: see ``distribute``; concerns placements only, since styles are fixed.

    A module's style is also that of its copies, and holds in later sessions with a mesh that has
    the axis.

    Returns:
        The module.

    Raises:
        ValueError: a pattern has no effect, a parameter can't have a placement or gets several,
            layouts don't fit together, or the mesh is none of the session's; no parameter has
            been changed then.
        TypeError: there is no plan, or an entry is neither placements nor a style.
        NotImplementedError: a style does not support its module.
    """
    mesh = current().mesh
    plan = _parse_plan(parallelize_plan)
    styles = _match_styles(module, plan, device_mesh, mesh)
    _check_patterns(module, plan, styles)
    merged: dict[Storage, _Request] = {}
    for request in _requests(module, plan, styles, fixed, mesh):
        first = merged.setdefault(storage_of(request.parameter), request)
        _check_consistent(first, request, mesh)
        is_fixed = first.fixed or request.fixed
        merged[storage_of(request.parameter)] = _merged(first, request)._replace(fixed=is_fixed)
    for request in _replicated_rest(module, styles, mesh):
        first = merged.setdefault(storage_of(request.parameter), request)
        merged[storage_of(request.parameter)] = _merged(first, request)
    _store(merged.values(), mesh)
    for name, styled in styles.items():
        apply_style(module.get_submodule(name), styled.axis, styled.layouts)
    return module


# -- arguments ----------------------------------------------------------------------------------


def _parse_plan(plan: Any) -> _Plan:
    """Convert the argument ``parallelize_plan`` to a dict, and torch's styles to lazygt's."""
    style = as_style(plan)
    if style is not None:
        return {"": style}
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"parallelize_plan={plan!r}: expected a style, or a dict from names of modules to "
            f"styles; the plan is the third argument, after the axis of the mesh"
        )
    return {pattern: _parse_entry(pattern, value) for pattern, value in plan.items()}


def _parse_entry(pattern: str, entry: object) -> UserPlacements | ParallelStyle:
    """Check and convert one entry of a plan."""
    style = as_style(entry)
    if style is not None:
        return style
    if isinstance(entry, Mapping | Sequence) and not isinstance(entry, str):
        return entry
    raise TypeError(
        f"{pattern!r}: {entry!r} is neither placements, as a list or a dict by axis, nor a "
        f"style, such as lazygt.ColwiseParallel()"
    )


def _axis(device_mesh: Any, mesh: Mesh) -> str:
    """Resolve ``device_mesh`` to an axis of the session's mesh."""
    defaults = [name for name in _DEFAULT_AXES if name in mesh.names]
    if device_mesh is None and (len(mesh.names) == 1 or defaults):
        return (*defaults, *mesh.names)[0]
    if isinstance(device_mesh, str):
        mesh.size(device_mesh)
        return device_mesh
    names = (
        device_mesh.names
        if isinstance(device_mesh, Mesh)
        else getattr(device_mesh, "mesh_dim_names", None)
    )
    if names is not None and len(names) == 1 and names[0] in mesh.names:
        sizes = device_mesh.sizes if isinstance(device_mesh, Mesh) else tuple(device_mesh.shape)
        if sizes == (mesh.size(names[0]),):
            return str(names[0])
    raise ValueError(
        f"device_mesh={device_mesh!r}: styles are for one axis of the session's mesh {mesh}; name "
        f"it, as in parallelize_module(module, {mesh.names[-1]!r}, plan)"
    )


# -- matching patterns --------------------------------------------------------------------------


def _match_styles(module: nn.Module, plan: _Plan, device_mesh: Any, mesh: Mesh) -> _Styles:
    """Return the styles of submodules by name; the first matching pattern counts.

    Args:
        device_mesh: the argument of ``parallelize_module``.
        mesh: the session's mesh.
    """
    plan_styles = {
        pattern: style for pattern, style in plan.items() if isinstance(style, ParallelStyle)
    }
    if not plan_styles and device_mesh is None:
        return {}
    axis = _axis(device_mesh, mesh)
    styled = {}
    for name, submodule in module.named_modules():
        pattern = next((pattern for pattern in plan_styles if _matches(name, pattern)), None)
        if pattern is not None:
            styled[name] = _Styled(
                pattern, axis, _layouts_of(name, submodule, plan_styles[pattern])
            )
    return styled


def _matches(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern, component by component."""
    components, pattern_components = name.split("."), pattern.split(".")
    if not name or len(components) != len(pattern_components):
        return name == pattern
    return all(map(fnmatchcase, components, pattern_components))


def _layouts_of(name: str, module: nn.Module, style: ParallelStyle) -> ModuleLayouts:
    """Return a style's layouts of a module; errors name the module."""
    try:
        layouts = style.layouts(module)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"module {name!r}: {error}") from None
    names = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if layouts.parameters and layouts.parameters.keys().isdisjoint(names):
        placed = " and ".join(map(repr, layouts.parameters))
        raise ValueError(
            f"the style of module {name!r} places its {placed}, but {type(module).__name__} has no "
            f"such parameter of its own"
        )
    return layouts


def _effective_pattern(name: str, plan: _Plan, styles: _Styles) -> str | None:
    """Return the first pattern of a plan that places a parameter; None: no pattern does."""
    path, _, own_name = name.rpartition(".")
    styled = styles.get(path)
    for pattern, entry in plan.items():
        if isinstance(entry, ParallelStyle):
            if styled is not None and pattern == styled.pattern and own_name in styled.parameters:
                return pattern
        elif fnmatchcase(name, pattern):
            return pattern
    return None


def _check_patterns(module: nn.Module, plan: _Plan, styles: _Styles) -> None:
    """Raise ValueError for a pattern without an effect."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in module.named_modules()]
    effective = {_effective_pattern(name, plan, styles) for name in parameters}
    effective |= {styled.pattern for styled in styles.values()}
    for pattern in (pattern for pattern in plan if pattern not in effective):
        is_style = isinstance(plan[pattern], ParallelStyle)
        kind, names = ("module", modules) if is_style else ("parameter", parameters)
        matching = (
            name for name in names if (_matches if is_style else fnmatchcase)(name, pattern)
        )
        name = next(matching, None)
        if name is None:
            hint = ", where * is for what stands between two dots" * (is_style and "*" in pattern)
            raise ValueError(f"no {kind} fits {pattern!r}{hint}; {_closest_names(pattern, names)}")
        raise ValueError(
            f"{pattern!r} counts for no {kind}: for {name!r} a pattern before it does; put what "
            f"is special first"
        )


def _closest_names(pattern: str, names: Iterable[str]) -> str:
    """Return a hint with the names that are most similar to a pattern."""
    shown = get_close_matches(pattern, filter(None, names), _MAX_NAMES, cutoff=0)
    return f"the nearest names are: {', '.join(shown)}" if shown else "there is none"


# -- placements of parameters --------------------------------------------------------------------


def _requests(
    module: nn.Module, plan: _Plan, styles: _Styles, fixed: bool, mesh: Mesh
) -> Iterator[_Request]:
    """Yield the requested placements of each parameter's name with a matching pattern.

    Args:
        fixed: the argument of ``parallelize_module``; a style's placements are fixed anyway.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        pattern = _effective_pattern(name, plan, styles)
        entry = None if pattern is None else plan[pattern]
        if isinstance(entry, ParallelStyle):
            path, _, own_name = name.rpartition(".")
            styled = styles[path]
            yield _request(name, parameter, {styled.axis: styled.parameters[own_name]}, True, mesh)
        elif entry is not None:
            yield _request(name, parameter, entry, fixed, mesh)


def _replicated_rest(module: nn.Module, styles: _Styles, mesh: Mesh) -> Iterator[_Request]:
    """Yield replicated placements for the parameters of styled modules, as a fallback."""
    for name, styled in styles.items():
        if styled.layouts.parameters is None:
            continue
        for own_name, parameter in module.get_submodule(name).named_parameters(recurse=False):
            full_name = f"{name}.{own_name}".lstrip(".")
            yield _request(full_name, parameter, {styled.axis: Replicate()}, True, mesh)


def _request(
    name: str, parameter: nn.Parameter, placements: UserPlacements, fixed: bool, mesh: Mesh
) -> _Request:
    """Resolve and check the placements of a parameter's name."""
    t = shardable_parameter(name, parameter)
    description = f"parameter {name!r} of {meta_of(t)}"
    return _Request(
        name, t, placements_for(description, t.dim(), placements, mesh, unspecified(mesh)), fixed
    )


def _check_consistent(first: _Request, other: _Request, mesh: Mesh) -> None:
    """Raise ValueError if two names of one parameter have different placements."""
    for axis, a, b in zip(mesh.names, first.placements, other.placements, strict=True):
        if a != b and not isinstance(a, Unspecified) and not isinstance(b, Unspecified):
            raise ValueError(
                f"parameters {first.name!r} and {other.name!r} are one tensor, but on axis "
                f"{axis!r} of the mesh {mesh} the plan says {a!r} of the first and {b!r} of the "
                f"second; say the same of both"
            )


def _merged(first: _Request, other: _Request) -> _Request:
    """Return the first request, with ``Unspecified`` placements replaced by the other's."""
    placements = tuple([
        b if isinstance(a, Unspecified) else a
        for a, b in zip(first.placements, other.placements, strict=True)
    ])  # fmt: skip
    if placements == first.placements:
        return first
    return first._replace(placements=placements, fixed=first.fixed or other.fixed)


def _store(requests: Iterable[_Request], mesh: Mesh) -> None:
    """Set the parameters' shardings; ``Unspecified`` axes keep their placements.

    A parameter that is now replicated along the axis of its FSDP unit leaves the unit.
    """
    for request in requests:
        current = current_sharding(request.parameter)
        placements = tuple([
            previous if isinstance(placement, Unspecified) else placement
            for placement, previous in zip(request.placements, current.placements, strict=True)
        ])  # fmt: skip
        unit = current.unit
        if unit is not None and placements[mesh.names.index(unit.axis)] == Replicate():
            unit = None
        set_sharding(request.parameter, Sharding(placements, request.fixed or current.fixed, unit))
