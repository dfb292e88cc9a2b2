"""Ways to lay out whole modules on the mesh.

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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.placement import Replicate, Unspecified, placement_to_torch
from lazygt.parallel.distribute import UserPlacements, own_parameter, placements_for, unsaid
from lazygt.parallel.styles import Style, hold, torch_placements
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.record.tensor import LazyTensor, Storage, meta_of
from lazygt.session import current

Plan = Mapping[str, UserPlacements | Style]
#: The name of a module -> the pattern that gives it a style, and the style.
_Styles = Mapping[str, tuple[str, Style]]
#: Names that an error shows of a module's.
_SHOWN = 8


class _Said(NamedTuple):
    """What is said of a parameter by one of its names.

    Attributes:
        placements: one an axis; ``Unspecified`` on those that nothing is said of.
    """

    name: str
    parameter: LazyTensor
    placements: Placements
    pinned: bool


def data_parallel(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Pin a module's parameters whole along an axis: gradients are summed, once each.

    Batches are cut with ``lazygt.distribute(batch, {"data": Shard(0)})``.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or a parameter is no lazygt tensor of its own.
    """
    return parallelize(module, {"*": {mesh_dim: torch_placements()[1]}}, pinned=True)


def parallelize(module: nn.Module, plan: Plan, pinned: bool = False) -> nn.Module:
    """Store a module's parameters as ``plan`` says; each stays the object that it is.

    Args:
        plan: names of parameters -> placements, or names of modules -> styles, with ``*`` for any
            text. The first pattern that fits a parameter's name counts; the style of its module
            does where it names the parameter, and along the style's axis also where nothing else
            speaks of it: it is whole then. Along an axis of which nothing is said a parameter
            keeps what it has; whole at first. What is said of the names of one parameter (a tied
            head) is said together.
        pinned: see ``distribute``; of placements only, styles are pinned.

    A module's style is also that of its copies, and counts in later sessions whose mesh has the
    axis.

    Returns:
        The module.

    Raises:
        ValueError: a pattern that counts for nothing, a style for parameters that its module
            does not have, a placement that a parameter can't have, or several for one parameter;
            nothing has been placed then.
        TypeError: a pattern of neither placements nor a style.
    """
    mesh = current().mesh
    _check_kinds(plan)
    styles = _styles(module, plan, mesh)
    _check_counted(module, plan, styles)
    found: dict[Storage, _Said] = {}
    for said in _said(module, plan, styles, pinned, mesh):
        first = found.setdefault(said.parameter._storage, said)
        _check_agree(first, said, mesh)
        both = first.pinned or said.pinned
        found[said.parameter._storage] = _filled(first, said)._replace(pinned=both)
    for said in _left_whole(module, styles, mesh):
        first = found.setdefault(said.parameter._storage, said)
        found[said.parameter._storage] = _filled(first, said)
    _store(list(found.values()), mesh)
    for name, (_, style) in styles.items():
        hold(module.get_submodule(name), style)
    return module


# -- what counts ---------------------------------------------------------------------------------


def _check_kinds(plan: Plan) -> None:
    given: Mapping[str, object] = plan
    for pattern, one in given.items():
        if not isinstance(one, Style | Mapping | Sequence) or isinstance(one, str):
            raise TypeError(
                f"{pattern!r}: {one!r} is neither placements, as a list or a dict by axis, nor a "
                f"style of lazygt's, such as lazygt.column_parallel()"
            )


def _styles(module: nn.Module, plan: Plan, mesh: Mesh) -> _Styles:
    """The style of each module that has one, by name."""
    tables = [(pattern, one) for pattern, one in plan.items() if isinstance(one, Style)]
    found = {}
    for name, inner in module.named_modules():
        fits = next((table for table in tables if fnmatchcase(name, table[0])), None)
        if fits is not None:
            _check_style(name, inner, fits[1], mesh)
            found[name] = fits
    return found


def _check_style(name: str, module: nn.Module, style: Style, mesh: Mesh) -> None:
    mesh.size(style.mesh_dim)
    own = [one for one, _ in module.named_parameters(recurse=False)]
    if style.parameters and style.parameters.keys().isdisjoint(own):
        cut = " and ".join(map(repr, style.parameters))
        raise ValueError(
            f"the style of module {name!r} places its {cut}, but {type(module).__name__} has no "
            f"such parameter of its own; give the style to the layers inside it"
        )


def _pattern(name: str, plan: Plan, styles: _Styles) -> str | None:
    """The pattern that counts for a parameter of this name; None: none speaks of it."""
    module, _, own = name.rpartition(".")
    for pattern, one in plan.items():
        if isinstance(one, Style):
            if styles.get(module) == (pattern, one) and own in one.parameters:
                return pattern
        elif fnmatchcase(name, pattern):
            return pattern
    return None


def _check_counted(module: nn.Module, plan: Plan, styles: _Styles) -> None:
    """Raise ValueError for a pattern that counts for no name."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in module.named_modules()]
    counted = {_pattern(name, plan, styles) for name in parameters}
    counted |= {pattern for pattern, _ in styles.values()}
    for pattern in (one for one in plan if one not in counted):
        is_style = isinstance(plan[pattern], Style)
        what, names = ("module", modules) if is_style else ("parameter", parameters)
        fits = next((name for name in names if fnmatchcase(name, pattern)), None)
        if fits is None:
            raise ValueError(f"no {what} fits {pattern!r}; {_nearest(pattern, names)}")
        raise ValueError(
            f"{pattern!r} counts for no {what}: for {fits!r} a pattern before it does; put what "
            f"is special first"
        )


def _nearest(pattern: str, names: Iterable[str]) -> str:
    shown = get_close_matches(pattern, filter(None, names), _SHOWN, cutoff=0)
    return f"the nearest names are: {', '.join(shown)}" if shown else "there is none"


# -- what is said --------------------------------------------------------------------------------


def _said(
    module: nn.Module, plan: Plan, styles: _Styles, pinned: bool, mesh: Mesh
) -> Iterator[_Said]:
    """What the pattern that counts says, for each name of a parameter that has one."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        pattern = _pattern(name, plan, styles)
        one = None if pattern is None else plan[pattern]
        if isinstance(one, Style):
            placements = one.parameters[name.rpartition(".")[2]]
            yield _of(name, parameter, {one.mesh_dim: placements}, True, mesh)
        elif one is not None:
            yield _of(name, parameter, one, pinned, mesh)


def _left_whole(module: nn.Module, styles: _Styles, mesh: Mesh) -> Iterator[_Said]:
    """What a style says of its module's parameters where nothing else does."""
    _, whole = torch_placements()
    for name, (_, style) in styles.items():
        for own, parameter in module.get_submodule(name).named_parameters(recurse=False):
            full = f"{name}.{own}".lstrip(".")
            yield _of(full, parameter, {style.mesh_dim: whole}, True, mesh)


def _of(
    name: str, parameter: nn.Parameter, placements: UserPlacements, pinned: bool, mesh: Mesh
) -> _Said:
    t = own_parameter(name, parameter)
    what = f"parameter {name!r} of {meta_of(t)}"
    return _Said(name, t, placements_for(what, t.dim(), placements, mesh, unsaid(mesh)), pinned)


def _check_agree(first: _Said, other: _Said, mesh: Mesh) -> None:
    """Raise ValueError where two names of one parameter are to lie differently."""
    for axis, a, b in zip(mesh.names, first.placements, other.placements, strict=True):
        if a != b and not isinstance(a, Unspecified) and not isinstance(b, Unspecified):
            raise ValueError(
                f"parameters {first.name!r} and {other.name!r} are one tensor, but on axis "
                f"{axis!r} of the mesh {mesh} the plan says {placement_to_torch(a)!r} of the first and "
                f"{placement_to_torch(b)!r} of the second; say the same of both"
            )


def _filled(first: _Said, other: _Said) -> _Said:
    """The first; of what it says nothing of, what the other says."""
    placements = tuple([
        b if isinstance(a, Unspecified) else a for a, b in zip(first.placements, other.placements, strict=True)
    ])  # fmt: skip
    if placements == first.placements:
        return first
    return first._replace(placements=placements, pinned=first.pinned or other.pinned)


def _store(found: Collection[_Said], mesh: Mesh) -> None:
    for said in found:
        before = stored_now(said.parameter)
        placements = tuple([
            had if isinstance(placement, Unspecified) else placement
            for placement, had in zip(said.placements, before.placements, strict=True)
        ])  # fmt: skip
        unit = before.unit
        if unit is not None and placements[mesh.names.index(unit.axis)] == Replicate():
            unit = None
        set_sharding(said.parameter, Sharding(placements, said.pinned or before.pinned, unit))
