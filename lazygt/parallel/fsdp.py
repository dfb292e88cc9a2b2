"""FSDP: parameters that are stored in blocks, and gathered to be used.

lazygt.fully_shard(model)                                # over the axis "data"
lazygt.fully_shard(model, "shard", wrap="one")           # HSDP: the batch lies on both axes
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Literal

from torch import nn

from lazygt.graph.mesh import FSDPUnit, Placements, Sharding
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.parallel.distribute import own_parameter
from lazygt.record.annotate import set_sharding, stored_now
from lazygt.session import current

#: Whether a module, of this name, is the root of a unit.
Roots = Callable[[str, nn.Module], bool]
Wrap = Literal["auto", "block", "one", "block2"] | Roots
_LISTS = (nn.ModuleList, nn.Sequential)
_calls = itertools.count()


def fully_shard(
    module: nn.Module,
    mesh_dim: str = "data",
    wrap: Wrap = "auto",
    bucket_cap_mb: float | None = None,
    reshard_after_forward: bool = True,
    limit_all_gathers: bool = True,
) -> nn.Module:
    """Store a module's parameters in blocks along an axis of the mesh; ops use them whole.

    They are gathered for the forward, and their gradients are reduced to the blocks that the
    optimizer updates; its state lies as they do. Names and meaning are FSDP2's. A parameter is
    cut along its first dim that has a row for every rank and that no other axis cuts; one without
    such a dim stays whole. On other axes parameters keep what they have. Parameters that an
    earlier call has taken stay in its unit.

    Args:
        wrap: which parameters are gathered together. ``auto``: those of each repeated block
            (modules of one class in a ``ModuleList`` or ``Sequential``), and without blocks those
            of each direct child; ``block``: of each repeated block; ``one`` (or ``block2``, as
            some training scripts say): all of the module, in the fewest collectives that
            ``bucket_cap_mb`` allows; or a function of a module's name and the module that says
            whether it is a unit's root. What lies in no unit is one of its own.
        bucket_cap_mb: MiB that are gathered, or reduced, at once. None: the session's, and without
            one 25, with what takes longer to pack than to launch (on CPUs 512 KiB) alone.
        reshard_after_forward: gather again for the backward, so that whole weights are not kept
            until then.
        limit_all_gathers: at most two gathers are under way at a time, and one reduction: what
            was not reduced yet is freed as the backward goes.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, the module no repeated blocks, a cap is negative, or
            a parameter is no lazygt tensor of its own; no parameter has been placed then.
        TypeError: ``module`` is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard() takes a module, not a {type(module).__name__}; "
            f"lazygt.distribute(t, placements) stores a tensor in blocks"
        )
    if bucket_cap_mb is not None and not bucket_cap_mb >= 0:
        raise ValueError(f"fully_shard(bucket_cap_mb={bucket_cap_mb!r}): expected at least 0")
    mesh = current().mesh
    parts = mesh.size(mesh_dim)
    at = mesh.names.index(mesh_dim)
    named = [(name, own_parameter(name, p)) for name, p in module.named_parameters()]
    names = fsdp_units(module, wrap)
    call = f"{type(module).__name__}#{next(_calls)}"
    cap = None if bucket_cap_mb is None else round(bucket_cap_mb * (1 << 20))
    for name, t in named:
        before = stored_now(t)
        if before.unit is not None:
            continue
        unit = FSDPUnit(f"{call}.{names[name]}", mesh_dim, cap, reshard_after_forward,
                    limit_all_gathers)  # fmt: skip
        dim = dim_to_shard(tuple(t.shape), before.placements, at, parts)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        placements = (*before.placements[:at], placement, *before.placements[at + 1 :])
        set_sharding(t, Sharding(placements, True, None if dim is None else unit))
    return module


def dim_to_shard(shape: tuple[int, ...], placements: Placements, at: int, parts: int) -> int | None:
    """The dim of a parameter that is cut along axis ``at`` of ``parts`` ranks; None: whole."""
    taken = [placement for place, placement in enumerate(placements) if place != at]
    free = (dim for dim, size in enumerate(shape) if size >= parts and Shard(dim) not in taken)
    return next(free, None)


def fsdp_units(module: nn.Module, wrap: Wrap) -> dict[str, str]:
    """The unit of each parameter, by name; ``rest`` for those in none.

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
    """The modules whose parameters make a unit, by name, and the unit's name."""
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
    """The names of modules of one class, with modules inside, that stand in one list."""
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
