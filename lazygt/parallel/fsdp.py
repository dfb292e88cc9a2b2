"""FSDP: parameters that are stored in blocks, and gathered to be used.

lazygt.fully_shard(model)                                # over the axis "data"
lazygt.fully_shard(model, "shard", wrap="one")           # HSDP: the batch lies on both axes
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lazygt.graph.mesh import FSDPUnit, Mesh, Placements, Sharding
from lazygt.graph.placement import Placement, Replicate, Shard, as_placement
from lazygt.parallel.distribute import own_parameter
from lazygt.parallel.fsdp_module import as_fsdp_module
from lazygt.parallel.fsdp_overrides import Knobs, Wrap, knobs_for, rewraps
from lazygt.parallel.mixed_precision import apply_policy
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.record.tensor import LazyTensor, is_lazy, storage_of, view_of
from lazygt.session import current

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
_LISTS = (nn.ModuleList, nn.Sequential)
_calls = itertools.count()


def fully_shard(
    module: nn.Module,
    mesh_dim: str = "data",
    wrap: Wrap = "auto",
    bucket_cap_mb: float | None = None,
    reshard_after_forward: bool | int | None = True,
    limit_all_gathers: bool = True,
    *,
    mesh: Any = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
) -> nn.Module:
    """Store a module's parameters in blocks along an axis of the mesh; ops use them whole.

    They are gathered for the forward, and their gradients are reduced to the blocks that the
    optimizer updates; its state is sharded as they are. Names and meaning are FSDP2's, and policies
    are torch's own objects. A parameter is cut along its first dim that has a row for every rank
    and that no other axis cuts; one without such a dim stays whole. On other axes parameters keep
    their placements. Parameters that an earlier call has taken stay in its unit.

    Args:
        wrap: the parameters that are gathered together. ``auto``: those of each repeated block
            (modules of one class in a ``ModuleList`` or ``Sequential``), and without blocks those
            of each direct child; ``block``: of each repeated block; ``one`` (or ``block2``, as
            some training scripts say): all of the module, in the fewest collectives that
            ``bucket_cap_mb`` allows; or a predicate of a module's name and the module that is true
            of a unit's root. Parameters in no unit form one of their own.
        bucket_cap_mb: MiB that are gathered, or reduced, at once. None: the session's, and without
            one 25; a tensor that takes longer to pack than to launch (on CPUs 512 KiB) goes alone.
        reshard_after_forward: gather again for the backward, so that whole weights are not kept
            until then. None is True, the number of ranks too, and 1 is False.
        limit_all_gathers: at most two gathers are under way at a time, and one reduction:
            unreduced gradients are freed as the backward goes.
        mesh: the axis as FSDP2 takes it: ``session.mesh["data"]``; of two axes (HSDP) the last is
            meant. None: ``mesh_dim``.
        shard_placement_fn: function from a parameter to its ``Shard(dim)``, or to None: as above.
        mp_policy: a ``MixedPrecisionPolicy``. ``param_dtype``: while the module runs its parameters
            are casts of the stored ones, and these are gathered; None: as they are stored.
            ``reduce_dtype``: the dtype in which the gradients of each backward are reduced, before
            they become the parameter's dtype; None: ``param_dtype``. ``cast_forward_inputs``:
            floating-point inputs of the module, and of each unit's, become ``param_dtype``.
            ``output_dtype``: that of the module's floating-point outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters, gradients and optimizer state in
            the host's memory, where those of CPU workers are in any case, pinned or not.
        ignored_params: parameters that stay as they are.

    Returns:
        The module, which is an ``FSDPModule`` now.

    Raises:
        ValueError: the mesh has no such axis, the module no repeated blocks, a cap is negative, a
            parameter is no lazygt tensor of its own, or can't be cut as it is told; no parameter
            has been placed then.
        TypeError: ``module`` is no module.
        NotImplementedError: to reshard to a part of the ranks, or to offload on GPU workers.
    """
    _check(module, bucket_cap_mb)
    asked = Knobs(wrap, bucket_cap_mb, reshard_after_forward, limit_all_gathers)
    knobs = knobs_for(asked, lambda: bool(repeated_blocks(module)))
    session = current()
    axis = _axis(mesh_dim, mesh, session.mesh)
    _check_offload(offload_policy, session.device_type)
    parts = session.mesh.size(axis)
    reshards = _reshards(knobs.reshard_after_forward, parts)
    unit = _unit(module, axis, knobs.bucket_cap_mb, reshards, knobs.limit_all_gathers)
    cut = _Cut(session.mesh.names.index(axis), parts, shard_placement_fn)
    units = fsdp_units(module, knobs.wrap)
    taken = _taken(module, units, unit, cut, ignored_params or ())
    if rewraps():
        _rewrap(module, units, unit)
    for parameter, sharding in taken:
        set_sharding(parameter, sharding)
    if mp_policy is not None:
        roots = {module, *map(module.get_submodule, _roots(module, knobs.wrap))}
        apply_policy(module, roots, [parameter for parameter, _ in taken], mp_policy)
    return as_fsdp_module(module)


# -- arguments -------------------------------------------------------------------------------------


def _check(module: Any, bucket_cap_mb: float | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard() takes a module, not a {type(module).__name__}; "
            f"lazygt.distribute(t, placements) stores a tensor in blocks"
        )
    if bucket_cap_mb is not None and not bucket_cap_mb >= 0:
        raise ValueError(f"fully_shard(bucket_cap_mb={bucket_cap_mb!r}): expected at least 0")


def _axis(mesh_dim: str, given: Any, mesh: Mesh) -> str:
    """Return the axis of the session's mesh along which parameters are cut."""
    if given is None:
        mesh.size(mesh_dim)
        return mesh_dim
    names = given.names if isinstance(given, Mesh) else getattr(given, "mesh_dim_names", None)
    if not names or len(names) > 2 or names[-1] not in mesh.names:
        raise ValueError(
            f"fully_shard(mesh={given!r}): expected an axis of the session's mesh {mesh}, such as "
            f"session.mesh[{mesh.names[-1]!r}], or mesh_dim={mesh.names[-1]!r}"
        )
    return str(names[-1])


def _reshards(asked: bool | int | None, parts: int) -> bool:
    """Return whether weights are gathered again for the backward."""
    if asked is None or isinstance(asked, bool):
        return asked is not False
    if asked in (1, parts):
        return asked == parts
    raise NotImplementedError(
        f"fully_shard(reshard_after_forward={asked}): weights are kept in blocks of all {parts} "
        f"ranks of the axis (True), or whole (False); for blocks of {asked} ranks make the mesh of "
        f"two axes, cut the batch along both, and shard along the one of {asked}"
    )


def _check_offload(policy: Any, device_type: str) -> None:
    if policy is None or device_type == "cpu":
        return
    # why: the import takes a second, and a caller with a policy has done it already
    from torch.distributed.fsdp import CPUOffloadPolicy

    if isinstance(policy, CPUOffloadPolicy):
        raise NotImplementedError(
            "fully_shard(offload_policy=CPUOffloadPolicy()): what GPU workers store stays on their "
            "GPUs; shard over more ranks, or leave the policy out. On CPU workers it is met anyhow"
        )


def _unit(
    module: nn.Module, axis: str, cap_mb: float | None, reshards: bool, limit: bool
) -> FSDPUnit:
    """Return the template of a call's units; each is a copy with a name of its own."""
    cap = None if cap_mb is None else round(cap_mb * (1 << 20))
    return FSDPUnit(f"{type(module).__name__}#{next(_calls)}", axis, cap, reshards, limit)


def _taken(
    module: nn.Module,
    units: Mapping[str, str],
    unit: FSDPUnit,
    cut: _Cut,
    ignored: Collection[nn.Parameter],
) -> list[tuple[LazyTensor, Sharding]]:
    """Return the parameters that no call has taken yet, each with its new sharding.

    Args:
        units: the name of each parameter's unit, by the parameter's name.

    Raises:
        ValueError: a parameter is no lazygt tensor of its own, or can't be cut as it is told.
    """
    left_out = set(map(id, ignored))
    return [
        (t, cut.sharding(name, t, unit._replace(name=f"{unit.name}.{units[name]}")))
        for name, parameter in module.named_parameters()
        if id(parameter) not in left_out
        and stored_now(t := own_parameter(name, parameter)).unit is None
    ]


def _rewrap(module: nn.Module, units: Mapping[str, str], unit: FSDPUnit) -> None:
    """Take parameters over from earlier calls along the same axis; placements stay.

    Args:
        units: as in ``_taken``.
    """
    for name, parameter in module.named_parameters():
        if not is_lazy(parameter):
            continue
        before = stored_now(parameter)
        if before.unit is not None and before.unit.axis == unit.axis:
            taken_over = unit._replace(name=f"{unit.name}.{units[name]}")
            set_sharding(parameter, before._replace(unit=taken_over))


class _Cut(NamedTuple):
    """Cut of parameters along an axis.

    Attributes:
        at: number of the axis.
        parts: ranks along it.
        placement_of: function from a parameter to its ``Shard``, or to None where any will do.
    """

    at: int
    parts: int
    placement_of: Callable[[nn.Parameter], Any] | None

    def sharding(self, name: str, parameter: Any, unit: FSDPUnit) -> Sharding:
        """Return a parameter's new sharding.

        Raises:
            ValueError: ``placement_of`` returns an impossible placement.
        """
        before = stored_now(parameter).placements
        told = None if self.placement_of is None else self.placement_of(parameter)
        dim = dim_to_shard(tuple(parameter.shape), before, self.at, self.parts)
        if told is not None:
            dim = self._told(name, parameter, told, before)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        placements = (*before[: self.at], placement, *before[self.at + 1 :])
        return Sharding(placements, True, None if dim is None else unit)

    def _told(self, name: str, parameter: Any, told: Any, before: Placements) -> int:
        try:
            placement = as_placement(told, parameter.dim())
        except ValueError as error:
            raise ValueError(f"shard_placement_fn of parameter {name!r}: {error}") from None
        others = (*before[: self.at], *before[self.at + 1 :])
        if not isinstance(placement, Shard) or placement in others:
            raise ValueError(
                f"shard_placement_fn of parameter {name!r}: expected None or Shard(dim) of a dim "
                f"that no other axis cuts, not {told!r}; it lies as {before}"
            )
        return placement.dim


def dim_to_shard(shape: tuple[int, ...], placements: Placements, at: int, parts: int) -> int | None:
    """Return the dim of a parameter to cut along axis ``at`` of ``parts`` ranks; None: whole."""
    taken = [placement for place, placement in enumerate(placements) if place != at]
    free = (dim for dim, size in enumerate(shape) if size >= parts and Shard(dim) not in taken)
    return next(free, None)


def fsdp_units(module: nn.Module, wrap: Wrap) -> dict[str, str]:
    """Return the unit of each parameter, by name; ``rest`` for those in none.

    Raises:
        ValueError: see ``fully_shard``.
    """
    roots = _roots(module, wrap)
    unit_of = {}
    for name, _ in module.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in roots:
            owner = owner.rpartition(".")[0]
        unit_of[name] = roots.get(owner, "rest")
    return unit_of


def _roots(module: nn.Module, wrap: Wrap) -> dict[str, str]:
    """Return the unit's name of each module that is the root of one, by the module's name."""
    if callable(wrap):
        return {name: name for name, inner in module.named_modules() if name and wrap(name, inner)}
    if wrap in ("one", "block2"):
        return {}
    if wrap not in ("auto", "block"):
        raise ValueError(
            f"wrap={wrap!r}: expected 'auto', 'block', 'one' (or 'block2'), or a function"
        )
    blocks = repeated_blocks(module)
    if blocks:
        return {name: name for name in blocks}
    if wrap != "auto":
        raise ValueError(
            f"wrap={wrap!r}: {type(module).__name__} has no repeated blocks in a ModuleList or "
            f"Sequential; use wrap='auto' or a function"
        )
    return {name: name for name, _ in module.named_children()}


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return the names of modules of one class, with modules inside, that share a list."""
    blocks: list[str] = []
    for name, inner in module.named_modules():
        if not isinstance(inner, _LISTS) or any(name.startswith(f"{block}.") for block in blocks):
            continue
        kinds = Counter(type(child) for child in inner)
        blocks += [
            f"{name}.{key}".lstrip(".")
            for key, child in inner.named_children()
            if kinds[type(child)] > 1 and any(True for _ in child.children())
        ]
    return blocks


# -- placement of an optimizer's state: its parameter's, or blocks of its own (ZeRO) ---------------
# A step leaves the state where its parameter lies. A checkpoint's state comes from the client,
# whole, and is stored as the parameter is at the next step.


def shard_optimizer_state(
    optimizer: torch.optim.Optimizer, mesh_dim: str = "data"
) -> torch.optim.Optimizer:
    """Store an optimizer's state of each parameter in blocks along an axis (ZeRO-1 and 2).

    Parameters stay whole there. From the second step on gradients are reduced to blocks, each rank
    updates its block of every parameter, and the blocks are gathered. The choice of the dim to cut
    is that of ``fully_shard``; on other axes the state lies as its parameter does.

    Returns:
        The optimizer.

    Raises:
        ValueError: the mesh has no such axis.
    """
    mesh = current().mesh
    parts = mesh.size(mesh_dim)
    at = mesh.names.index(mesh_dim)

    def place(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            if not is_lazy(parameter):
                continue
            for t in state.values():
                if is_lazy(t) and view_of(t) is None and t.shape == parameter.shape:
                    placed = storage_of(t).placed
                    if placed is None or not isinstance(placed.placements[at], Shard):
                        cut(t, stored_now(parameter))

    def cut(t: LazyTensor, home: Sharding) -> None:
        dim = dim_to_shard(tuple(t.shape), home.placements, at, parts)
        if dim is not None:
            placements = (*home.placements[:at], Shard(dim), *home.placements[at + 1 :])
            set_sharding(t, Sharding(placements, True))

    optimizer.register_step_post_hook(place)
    return optimizer
