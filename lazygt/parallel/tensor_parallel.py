"""Tables for whole modules: the style of each module, or the placements of each parameter.

    lazygt.parallelize_module(model, "model", {
        "tokens": lazygt.VocabParallel(),
        "blocks.*.qkv": lazygt.ColwiseParallel(), "blocks.*.out": lazygt.RowwiseParallel(),
        "blocks.*.mlp.0": lazygt.ColwiseParallel(), "blocks.*.mlp.2": lazygt.RowwiseParallel(),
    })

A style gives the placements of a module's own parameters, inputs and outputs on one axis of the
mesh; their gradients are placed alike. All of it is pinned: a user that names such a style wants
its collectives. Styles change where values lie, never the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.placement import Placement, Replicate, Unspecified
from lazygt.parallel.distribute import UserPlacements, own_parameter, placements_for, unsaid
from lazygt.parallel.style_hooks import ModuleLayouts, apply_style
from lazygt.parallel.styles import ParallelStyle, as_style
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.record.tensor import LazyTensor, Storage, meta_of, storage_of
from lazygt.session import current

_Plan = dict[str, UserPlacements | ParallelStyle]
#: Number of a module's names that an error shows.
_SHOWN = 8
#: Names of the default axis of a mesh of several.
_USUAL_AXES = ("model", "tp")


class _Styled(NamedTuple):
    """Style of a module in a plan.

    Attributes:
        pattern: the pattern that gives the module the style.
        axis: the mesh axis.
    """

    pattern: str
    axis: str
    layouts: ModuleLayouts

    @property
    def parameters(self) -> Mapping[str, Placement]:
        """Placements of the parameters that the style names."""
        return self.layouts.parameters or {}


#: By the module's name.
_Styles = dict[str, _Styled]


class _Said(NamedTuple):
    """Placements that one of a parameter's names gives it.

    Attributes:
        placements: one an axis; ``Unspecified`` on axes that the plan leaves open.
    """

    name: str
    parameter: LazyTensor
    placements: Placements
    pinned: bool


def data_parallel(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Replicate a module's parameters along an axis, pinned: gradients are summed, once each.

    Shard batches with ``lazygt.distribute(batch, {"data": Shard(0)})``.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or a parameter is no lazygt tensor of its own.
    """
    return parallelize_module(module, mesh_dim, {"*": {mesh_dim: Replicate()}}, pinned=True)


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Any = None,
    *,
    src_data_rank: int | None = 0,
    pinned: bool = False,
) -> nn.Module:
    """Store a module's parameters as a plan says; they stay the same objects.

    Args:
        device_mesh: the axis of the session's mesh that styles are for: its name, or a mesh of this
            one axis, such as ``session.mesh["model"]``. None: the only axis; of several, the one
            that is called ``model`` or ``tp``.
        parallelize_plan: names of modules -> styles, lazygt's or torch's own, with ``*`` for any
            text between two dots; ``""`` is the module itself, and a style alone is for that. Or
            names of parameters -> placements, with ``*`` for any text. The first pattern that fits
            a parameter's name counts; that of its module's style does if the style names the
            parameter. A parameter that nothing else places is whole along the axis of its module's
            style. Along other axes a parameter keeps its placement; whole at first. The
            placements by all names of one parameter (a tied head) are joined.
        src_data_rank: changes nothing: there is one client, and all workers get its values.
        pinned: see ``distribute``; of placements only, styles are pinned.

    A module's style is also that of its copies, and holds in later sessions with a mesh that has
    the axis.

    Returns:
        The module.

    Raises:
        ValueError: a pattern has no effect, a parameter can't have a placement or gets several,
            layouts don't fit together, or the mesh is none of the session's; nothing has been
            placed then.
        TypeError: there is no plan, or one of neither placements nor styles.
        NotImplementedError: a style does not fit its module.
    """
    mesh = current().mesh
    plan = _plan(parallelize_plan)
    styles = _styles(module, plan, device_mesh, mesh)
    _check_counted(module, plan, styles)
    together: dict[Storage, _Said] = {}
    for said in _said(module, plan, styles, pinned, mesh):
        first = together.setdefault(storage_of(said.parameter), said)
        _check_agree(first, said, mesh)
        both = first.pinned or said.pinned
        together[storage_of(said.parameter)] = _filled(first, said)._replace(pinned=both)
    for said in _left_whole(module, styles, mesh):
        first = together.setdefault(storage_of(said.parameter), said)
        together[storage_of(said.parameter)] = _filled(first, said)
    _store(together.values(), mesh)
    for name, styled in styles.items():
        apply_style(module.get_submodule(name), styled.axis, styled.layouts)
    return module


# -- arguments ----------------------------------------------------------------------------------


def _plan(given: Any) -> _Plan:
    """Return a plan as a table, with lazygt's own styles."""
    style = as_style(given)
    if style is not None:
        return {"": style}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"parallelize_plan={given!r}: expected a style, or a dict from names of modules to "
            f"styles; the plan is the third argument, after the axis of the mesh"
        )
    return {pattern: _entry(pattern, value) for pattern, value in given.items()}


def _entry(pattern: str, given: object) -> UserPlacements | ParallelStyle:
    style = as_style(given)
    if style is not None:
        return style
    if isinstance(given, Mapping | Sequence) and not isinstance(given, str):
        return given
    raise TypeError(
        f"{pattern!r}: {given!r} is neither placements, as a list or a dict by axis, nor a "
        f"style, such as lazygt.ColwiseParallel()"
    )


def _axis(given: Any, mesh: Mesh) -> str:
    """Return the axis of the session's mesh that ``device_mesh`` means."""
    usual = [name for name in _USUAL_AXES if name in mesh.names]
    if given is None and (len(mesh.names) == 1 or usual):
        return (*usual, *mesh.names)[0]
    if isinstance(given, str):
        mesh.size(given)
        return given
    names = given.names if isinstance(given, Mesh) else getattr(given, "mesh_dim_names", None)
    if names is not None and len(names) == 1 and names[0] in mesh.names:
        sizes = given.sizes if isinstance(given, Mesh) else tuple(given.shape)
        if sizes == (mesh.size(names[0]),):
            return str(names[0])
    raise ValueError(
        f"device_mesh={given!r}: styles are for one axis of the session's mesh {mesh}; name it, as "
        f"in parallelize_module(module, {mesh.names[-1]!r}, plan)"
    )


# -- matching patterns --------------------------------------------------------------------------


def _styles(module: nn.Module, plan: _Plan, device_mesh: Any, mesh: Mesh) -> _Styles:
    """Return the style of each module that has one, by name."""
    tables = {pattern: style for pattern, style in plan.items() if isinstance(style, ParallelStyle)}
    if not tables and device_mesh is None:
        return {}
    axis = _axis(device_mesh, mesh)
    styled = {}
    for name, inner in module.named_modules():
        pattern = next((pattern for pattern in tables if _fits(name, pattern)), None)
        if pattern is not None:
            styled[name] = _Styled(pattern, axis, _layouts(name, inner, tables[pattern]))
    return styled


def _fits(name: str, pattern: str) -> bool:
    """Return whether a module's name fits a pattern, part by part between dots."""
    parts, patterns = name.split("."), pattern.split(".")
    if not name or len(parts) != len(patterns):
        return name == pattern
    return all(map(fnmatchcase, parts, patterns))


def _layouts(name: str, module: nn.Module, style: ParallelStyle) -> ModuleLayouts:
    try:
        layouts = style.layouts(module)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"module {name!r}: {error}") from None
    names = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if layouts.parameters and layouts.parameters.keys().isdisjoint(names):
        cut = " and ".join(map(repr, layouts.parameters))
        raise ValueError(
            f"the style of module {name!r} places its {cut}, but {type(module).__name__} has no "
            f"such parameter of its own"
        )
    return layouts


def _pattern(name: str, plan: _Plan, styles: _Styles) -> str | None:
    """Return the pattern that counts for a parameter of this name; None: none fits."""
    path, _, last = name.rpartition(".")
    styled = styles.get(path)
    for pattern, entry in plan.items():
        if isinstance(entry, ParallelStyle):
            if styled is not None and pattern == styled.pattern and last in styled.parameters:
                return pattern
        elif fnmatchcase(name, pattern):
            return pattern
    return None


def _check_counted(module: nn.Module, plan: _Plan, styles: _Styles) -> None:
    """Raise ValueError for a pattern that counts for no name."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in module.named_modules()]
    counted = {_pattern(name, plan, styles) for name in parameters}
    counted |= {styled.pattern for styled in styles.values()}
    for pattern in (one for one in plan if one not in counted):
        is_style = isinstance(plan[pattern], ParallelStyle)
        what, names = ("module", modules) if is_style else ("parameter", parameters)
        fitting = (name for name in names if (_fits if is_style else fnmatchcase)(name, pattern))
        name = next(fitting, None)
        if name is None:
            stars = ", where * is for what stands between two dots" * (is_style and "*" in pattern)
            raise ValueError(f"no {what} fits {pattern!r}{stars}; {_nearest(pattern, names)}")
        raise ValueError(
            f"{pattern!r} counts for no {what}: for {name!r} a pattern before it does; put what "
            f"is special first"
        )


def _nearest(pattern: str, names: Iterable[str]) -> str:
    shown = get_close_matches(pattern, filter(None, names), _SHOWN, cutoff=0)
    return f"the nearest names are: {', '.join(shown)}" if shown else "there is none"


# -- placements of parameters --------------------------------------------------------------------


def _said(
    module: nn.Module, plan: _Plan, styles: _Styles, pinned: bool, mesh: Mesh
) -> Iterator[_Said]:
    """Yield the placements by the pattern that counts, for each name with one."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        pattern = _pattern(name, plan, styles)
        entry = None if pattern is None else plan[pattern]
        if isinstance(entry, ParallelStyle):
            path, _, last = name.rpartition(".")
            styled = styles[path]
            yield _of(name, parameter, {styled.axis: styled.parameters[last]}, True, mesh)
        elif entry is not None:
            yield _of(name, parameter, entry, pinned, mesh)


def _left_whole(module: nn.Module, styles: _Styles, mesh: Mesh) -> Iterator[_Said]:
    """Yield whole placements for the parameters of styled modules, as a fallback."""
    for name, styled in styles.items():
        if styled.layouts.parameters is None:
            continue
        for last, parameter in module.get_submodule(name).named_parameters(recurse=False):
            full = f"{name}.{last}".lstrip(".")
            yield _of(full, parameter, {styled.axis: Replicate()}, True, mesh)


def _of(
    name: str, parameter: nn.Parameter, placements: UserPlacements, pinned: bool, mesh: Mesh
) -> _Said:
    t = own_parameter(name, parameter)
    what = f"parameter {name!r} of {meta_of(t)}"
    return _Said(name, t, placements_for(what, t.dim(), placements, mesh, unsaid(mesh)), pinned)


def _check_agree(first: _Said, other: _Said, mesh: Mesh) -> None:
    """Raise ValueError where two names of one parameter give it different placements."""
    for axis, a, b in zip(mesh.names, first.placements, other.placements, strict=True):
        if a != b and not isinstance(a, Unspecified) and not isinstance(b, Unspecified):
            raise ValueError(
                f"parameters {first.name!r} and {other.name!r} are one tensor, but on axis "
                f"{axis!r} of the mesh {mesh} the plan says {a!r} of the first and {b!r} of the "
                f"second; say the same of both"
            )


def _filled(first: _Said, other: _Said) -> _Said:
    """Return the first with its ``Unspecified`` placements taken from the other."""
    placements = tuple([
        b if isinstance(a, Unspecified) else a
        for a, b in zip(first.placements, other.placements, strict=True)
    ])  # fmt: skip
    if placements == first.placements:
        return first
    return first._replace(placements=placements, pinned=first.pinned or other.pinned)


def _store(everything: Iterable[_Said], mesh: Mesh) -> None:
    for said in everything:
        before = stored_now(said.parameter)
        placements = tuple([
            had if isinstance(placement, Unspecified) else placement
            for placement, had in zip(said.placements, before.placements, strict=True)
        ])  # fmt: skip
        unit = before.unit
        if unit is not None and placements[mesh.names.index(unit.axis)] == Replicate():
            unit = None
        set_sharding(said.parameter, Sharding(placements, said.pinned or before.pinned, unit))
