"""FSDP: sharded parameters, gathered for their use.

The parameters that are gathered together are a *unit*, as in FSDP2; its *root* is the module around
them.

lazygt.fully_shard(model)                                # over the axis "data"
lazygt.fully_shard(model, "shard", wrap="one")           # HSDP: both axes shard the batch
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
from lazygt.parallel.distribute import shardable_parameter
from lazygt.parallel.fsdp_module import apply_policy, as_fsdp_module
from lazygt.parallel.fsdp_overrides import Knobs, Wrap, knobs_for, rewraps
from lazygt.record.annotate import current_sharding, set_sharding
from lazygt.record.tensor import LazyTensor, is_lazy, storage_of, view_of
from lazygt.session import current

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
_LISTS = (nn.ModuleList, nn.Sequential)
#: Numbers of calls of `fully_shard`, which make the names of units unique.
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
    """Shard a module's parameters along an axis of the mesh (ZeRO-3); ops use full parameters.

    Parameters are gathered for the forward, and gradients are reduce-scattered to the blocks that
    the optimizer updates; the optimizer's state is sharded like the parameters. Names and
    meaning are FSDP2's, and policies are torch's own objects. A parameter is sharded along its
    first dim that is large enough for all ranks and not sharded by another axis; without such a dim
    it is replicated. On other axes parameters keep their placements. Parameters of an earlier call
    stay in its unit.

    Args:
        wrap: the parameters that are gathered together. ``auto``: those of each repeated block
            (modules of one class in a ``ModuleList`` or ``Sequential``), and without blocks those
            of each direct child; ``block``: of each repeated block; ``one`` (or ``block2``, as
            some training scripts say): all of the module, in the fewest collectives that
            ``bucket_cap_mb`` allows; or a predicate of a module's name and the module that is true
            of a unit's root. Parameters in no unit form one of their own.
        bucket_cap_mb: MiB that are gathered, or reduced, at once. None: the session's, and without
            one 25; a tensor that takes longer to pack than to launch (on CPUs 512 KiB) goes alone.
        reshard_after_forward: gather again for the backward, so that full weights are freed
            in between. None is True, the number of ranks too, and 1 is False.
        limit_all_gathers: at most two gathers and one reduction are in flight at a time;
            unreduced gradients are freed during the backward.
        mesh: the axis in FSDP2's form: ``session.mesh["data"]``; the last of two axes (HSDP).
            None: ``mesh_dim``.
        shard_placement_fn: function from a parameter to its ``Shard(dim)``, or to None: as above.
        mp_policy: a ``MixedPrecisionPolicy``. ``param_dtype``: while the module runs its parameters
            are casts of the stored ones, and the casts are gathered; None: the stored dtype.
            ``reduce_dtype``: the dtype in which the gradients of each backward are reduced, before
            they become the parameter's dtype; None: ``param_dtype``. ``cast_forward_inputs``:
            floating-point inputs of the module, and of each unit's, become ``param_dtype``.
            ``output_dtype``: that of the module's floating-point outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters, gradients and optimizer state in
            the host's memory, where those of CPU workers are in any case, page-locked or not.
        ignored_params: parameters that stay as they are.

    Returns:
        The module, which is an ``FSDPModule`` now.

    Raises:
        ValueError: the mesh has no such axis, the module no repeated blocks, a cap is negative, a
            parameter is on another device, or a view, or can't be sharded as requested; no
            parameter has been changed then.
        TypeError: ``module`` is no module.
        NotImplementedError: resharding to a subset of the ranks, or offloading on GPU workers.
    """
    _check(module, bucket_cap_mb)
    requested = Knobs(wrap, bucket_cap_mb, reshard_after_forward, limit_all_gathers)
    knobs = knobs_for(requested, lambda: bool(repeated_blocks(module)))
    session = current()
    axis = _axis(mesh_dim, mesh, session.mesh)
    _check_offload(offload_policy, session.device_type)
    axis_size = session.mesh.size(axis)
    reshards = _reshards(knobs.reshard_after_forward, axis_size)
    unit = _unit(module, axis, knobs.bucket_cap_mb, reshards, knobs.limit_all_gathers)
    sharder = _Sharder(session.mesh.names.index(axis), axis_size, shard_placement_fn)
    units = fsdp_units(module, knobs.wrap)
    shardings = _new_shardings(module, units, unit, sharder, ignored_params or ())
    if rewraps():
        _rewrap(module, units, unit)
    for parameter, sharding in shardings:
        set_sharding(parameter, sharding)
    if mp_policy is not None:
        roots = {module, *map(module.get_submodule, _roots(module, knobs.wrap))}
        apply_policy(module, roots, [parameter for parameter, _ in shardings], mp_policy)
    return as_fsdp_module(module)


# -- arguments -------------------------------------------------------------------------------------


def _check(module: Any, bucket_cap_mb: float | None) -> None:
    """Raise an error for another object than a module, or a negative bucket size."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard() takes a module, not a {type(module).__name__}; "
            f"lazygt.distribute(t, placements) stores a tensor in blocks"
        )
    if bucket_cap_mb is not None and not bucket_cap_mb >= 0:
        raise ValueError(f"fully_shard(bucket_cap_mb={bucket_cap_mb!r}): expected at least 0")


def _axis(mesh_dim: str, submesh: Any, mesh: Mesh) -> str:
    """Return the axis of the session's mesh along which parameters are sharded.

    Args:
        mesh_dim, submesh: the arguments ``mesh_dim`` and ``mesh`` of ``fully_shard``.
        mesh: the session's mesh.
    """
    if submesh is None:
        mesh.size(mesh_dim)
        return mesh_dim
    names = submesh.names if isinstance(submesh, Mesh) else getattr(submesh, "mesh_dim_names", None)
    if not names or len(names) > 2 or names[-1] not in mesh.names:
        raise ValueError(
            f"fully_shard(mesh={submesh!r}): expected an axis of the session's mesh {mesh}, such "
            f"as session.mesh[{mesh.names[-1]!r}], or mesh_dim={mesh.names[-1]!r}"
        )
    return str(names[-1])


def _reshards(requested: bool | int | None, axis_size: int) -> bool:
    """Return whether weights are gathered again for the backward."""
    if requested is None or isinstance(requested, bool):
        return requested is not False
    if requested in (1, axis_size):
        return requested == axis_size
    raise NotImplementedError(
        f"fully_shard(reshard_after_forward={requested}): weights are kept in blocks of all "
        f"{axis_size} ranks of the axis (True), or whole (False); for blocks of {requested} ranks "
        f"make the mesh of two axes, shard the batch along both, and parameters along the one of "
        f"{requested}"
    )


def _check_offload(policy: Any, device_type: str) -> None:
    """Raise NotImplementedError for offloading from GPU workers."""
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
    """Return the common settings of a call's units; each unit is a copy with its own name.

    Args:
        cap_mb, reshards, limit: ``bucket_cap_mb``, ``reshard_after_forward`` and
            ``limit_all_gathers`` of ``fully_shard``.
    """
    cap = None if cap_mb is None else round(cap_mb * (1 << 20))
    return FSDPUnit(f"{type(module).__name__}#{next(_calls)}", axis, cap, reshards, limit)


def _new_shardings(
    module: nn.Module,
    units: Mapping[str, str],
    unit: FSDPUnit,
    sharder: _Sharder,
    ignored: Collection[nn.Parameter],
) -> list[tuple[LazyTensor, Sharding]]:
    """Return the parameters that are in no unit yet, each with its new sharding.

    Args:
        units: the name of each parameter's unit, by the parameter's name.

    Raises:
        ValueError: a parameter is on another device, or a view, or can't be sharded as requested.
    """
    ignored_ids = set(map(id, ignored))
    return [
        (t, sharder.sharding(name, t, unit._replace(name=f"{unit.name}.{units[name]}")))
        for name, parameter in module.named_parameters()
        if id(parameter) not in ignored_ids
        and current_sharding(t := shardable_parameter(name, parameter)).unit is None
    ]


def _rewrap(module: nn.Module, units: Mapping[str, str], unit: FSDPUnit) -> None:
    """Move parameters of earlier calls along the same axis to new units, for a forced ``wrap``.

    Their placements stay.

    Args:
        units: as in ``_new_shardings``.
    """
    for name, parameter in module.named_parameters():
        if not is_lazy(parameter):
            continue
        current = current_sharding(parameter)
        if current.unit is not None and current.unit.axis == unit.axis:
            new_unit = unit._replace(name=f"{unit.name}.{units[name]}")
            set_sharding(parameter, current._replace(unit=new_unit))


class _Sharder(NamedTuple):
    """Sharding of parameters along one axis.

    Attributes:
        axis_index: index of the axis in the mesh.
        axis_size: ranks along the axis.
        placement_of: function from a parameter to its ``Shard``, or to None for any dim.
    """

    axis_index: int
    axis_size: int
    placement_of: Callable[[nn.Parameter], Any] | None

    def sharding(self, name: str, parameter: Any, unit: FSDPUnit) -> Sharding:
        """Return a parameter's new sharding.

        Raises:
            ValueError: ``placement_of`` returns an impossible placement.
        """
        current = current_sharding(parameter).placements
        requested = None if self.placement_of is None else self.placement_of(parameter)
        dim = dim_to_shard(tuple(parameter.shape), current, self.axis_index, self.axis_size)
        if requested is not None:
            dim = self._requested_dim(name, parameter, requested, current)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        placements = (*current[: self.axis_index], placement, *current[self.axis_index + 1 :])
        return Sharding(placements, True, None if dim is None else unit)

    def _requested_dim(self, name: str, parameter: Any, requested: Any, current: Placements) -> int:
        """Return the dim of a requested ``Shard``, if it is possible.

        Args:
            requested: the result of ``placement_of``.
            current: the parameter's present placements.
        """
        try:
            placement = as_placement(requested, parameter.dim())
        except ValueError as error:
            raise ValueError(f"shard_placement_fn of parameter {name!r}: {error}") from None
        others = (*current[: self.axis_index], *current[self.axis_index + 1 :])
        if not isinstance(placement, Shard) or placement in others:
            raise ValueError(
                f"shard_placement_fn of parameter {name!r}: expected None or Shard(dim) of a dim "
                f"that no other axis shards, not {requested!r}; its placements are {current}"
            )
        return placement.dim


def dim_to_shard(
    shape: tuple[int, ...], placements: Placements, axis_index: int, axis_size: int
) -> int | None:
    """Return the first dim that can be sharded along an axis; None: the parameter is replicated."""
    others = [placement for index, placement in enumerate(placements) if index != axis_index]
    free = (dim for dim, size in enumerate(shape) if size >= axis_size and Shard(dim) not in others)
    return next(free, None)


def fsdp_units(module: nn.Module, wrap: Wrap) -> dict[str, str]:
    """Return parameter's name -> unit's name: that of the innermost root around it, or ``rest``.

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
    """Return the names of the units by the names of their root modules."""
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
    """Return the names of repeated blocks: modules of one class in a list, with children."""
    blocks: list[str] = []
    for name, inner in module.named_modules():
        if not isinstance(inner, _LISTS) or any(name.startswith(f"{block}.") for block in blocks):
            continue
        class_counts = Counter(type(child) for child in inner)
        blocks += [
            f"{name}.{key}".lstrip(".")
            for key, child in inner.named_children()
            if class_counts[type(child)] > 1 and any(True for _ in child.children())
        ]
    return blocks


# -- sharding of an optimizer's state (ZeRO-1 and 2) -----------------------------------------------
# By default the state has the sharding of its parameter. State loaded from a checkpoint comes from
# the client in full, and gets the parameter's sharding at the next step.


def shard_optimizer_state(
    optimizer: torch.optim.Optimizer, mesh_dim: str = "data"
) -> torch.optim.Optimizer:
    """Shard an optimizer's state of each parameter along an axis (ZeRO-1 and 2).

    Parameters stay replicated along the axis. From the second step on gradients are
    reduce-scattered, each rank updates its block of every parameter, and the blocks are gathered.
    The sharded dim is chosen as in ``fully_shard``; on other axes the state has its parameter's
    placements.

    Returns:
        The optimizer.

    Raises:
        ValueError: the mesh has no such axis.
    """
    mesh = current().mesh
    axis_size = mesh.size(mesh_dim)
    axis_index = mesh.names.index(mesh_dim)

    def shard_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step hook: shard new state tensors of the parameters' shapes."""
        for parameter, state in optimizer.state.items():
            if not is_lazy(parameter):
                continue
            for t in state.values():
                if is_lazy(t) and view_of(t) is None and t.shape == parameter.shape:
                    placed = storage_of(t).placed
                    if placed is None or not isinstance(placed.placements[axis_index], Shard):
                        shard(t, current_sharding(parameter))

    def shard(t: LazyTensor, parameter_sharding: Sharding) -> None:
        """Shard a state tensor along the axis, if one of its dims can be."""
        dim = dim_to_shard(tuple(t.shape), parameter_sharding.placements, axis_index, axis_size)
        if dim is not None:
            placements = (
                *parameter_sharding.placements[:axis_index],
                Shard(dim),
                *parameter_sharding.placements[axis_index + 1 :],
            )
            set_sharding(t, Sharding(placements, True))

    optimizer.register_step_post_hook(shard_all)
    return optimizer
