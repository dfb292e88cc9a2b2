"""Placements of values on the mesh of workers, as users give them.

    x = lazygt.distribute(batch.to("lazygt"), {"data": Shard(0)})
    lazygt.parallelize_module(model, parallelize_plan={"blocks.*.qkv.weight": {"model": Shard(0)}})

Placements are ``torch.distributed.tensor``'s (``lazygt.Shard`` is the same class), one for each
axis of the mesh: a list in its order, or a dict by name. They say where a value is stored. The
placements of all other values, and the collectives, follow; the numbers never change. Tables for
whole modules are in ``lazygt.parallel.tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import Partial, Placement, Replicate, Unspecified, as_placement
from lazygt.record.annotate import record_place
from lazygt.record.tensor import LazyTensor, is_lazy, meta_of, storage_of, view_of
from lazygt.session import current

#: One torch placement for each axis of the mesh.
UserPlacements = Sequence[Any] | Mapping[str, Any]


def distribute(t: torch.Tensor, placements: UserPlacements, pinned: bool = False) -> torch.Tensor:
    """Return the same values, stored as ``placements`` say.

    Gradients pass through unchanged; the gradient of a pinned value is pinned as well.

    Args:
        t: a lazygt tensor.
        placements: a list or a dict; an axis that a dict does not name is ``Replicate()``.
        pinned: ops also *use* it so; it is never moved for an op that would run faster otherwise.

    Raises:
        ValueError: the tensor or the mesh can't have one of the placements.
        TypeError: ``t`` is no lazygt tensor, or ``placements`` neither a list nor a dict.
    """
    mesh = current().mesh
    if not is_lazy(t):
        device = getattr(t, "device", None)
        hint = "" if device is None else f" on {device}; move it with .to('lazygt')"
        raise TypeError(f"distribute() takes a lazygt tensor, not a {type(t).__name__}{hint}")
    placements = placements_for(f"a tensor of {meta_of(t)}", t.dim(), placements, mesh)
    return placed(t, Sharding(placements, pinned))


def redistribute(t: torch.Tensor, placements: UserPlacements) -> torch.Tensor:
    """Return the same values, moved to where ``placements`` say.

    Raises:
        ValueError, TypeError: as ``distribute``.
    """
    return distribute(t, placements)


def placed(
    t: LazyTensor, sharding: Sharding, with_gradient: bool = True, behind: Sharding | None = None
) -> LazyTensor:
    """Return ``t`` with a checked annotation; a pinned one also holds for its gradient.

    Args:
        behind: the gradient's sharding towards the ops that computed ``t``; None: the same.
    """
    if meta_of(t).extent < t.numel():
        t = t.contiguous()  # type: ignore[assignment]  # expanded: elements share memory
    same: LazyTensor = _Place.apply(t, sharding, with_gradient, behind)  # type: ignore[no-untyped-call]
    return same


def placements_for(
    what: str,
    rank: int,
    placements: UserPlacements,
    mesh: Mesh,
    others: Placements | None = None,
) -> Placements:
    """Return the placements, one an axis, that a user's placements stand for.

    Args:
        what: the tensor's name in errors.
        rank: the tensor's number of dims.
        others: the placements on axes that are not named; None: replicated.

    Raises:
        ValueError: a placement is impossible; the message names the tensor and the mesh.
        TypeError: ``placements`` is neither a list nor a dict.
    """
    rest = others or (Replicate(),) * len(mesh.names)
    if isinstance(placements, str) or not isinstance(placements, Mapping | Sequence):
        raise TypeError(
            f"{what}: {placements!r} is neither a list with one placement for each axis of the "
            f"mesh {mesh}, nor a dict by axis"
        )
    if isinstance(placements, Mapping):
        unknown = [name for name in placements if name not in mesh.names]
        if unknown:
            raise ValueError(f"{what}: the mesh {mesh} has no axis {unknown[0]!r}")
        listed = [placements.get(name) for name in mesh.names]
    else:
        listed = list(placements)
        if len(listed) != len(mesh.names):
            raise ValueError(
                f"{what}: {len(listed)} placements, but the mesh {mesh} has {len(mesh.names)} axes"
            )
    return tuple([
        other if one is None else _placement(what, rank, one, axis, mesh)
        for one, axis, other in zip(listed, mesh.names, rest, strict=True)
    ])  # fmt: skip


def _placement(what: str, rank: int, given: Any, axis: str, mesh: Mesh) -> Placement:
    try:
        placement = as_placement(given, rank)
    except ValueError as error:
        raise ValueError(f"{what} on axis {axis!r} of the mesh {mesh}: {error}") from None
    if isinstance(placement, Partial):
        raise ValueError(
            f"{what} on axis {axis!r} of the mesh {mesh}: a value is stored whole or in blocks, "
            f"not as {given!r}; use Replicate() or Shard(dim)"
        )
    return placement


def own_parameter(name: str, parameter: torch.Tensor) -> LazyTensor:
    """Return the parameter, if it can be stored in another way.

    Raises:
        ValueError: it is not on the workers, or is a view of another tensor.
    """
    if not is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} is no lazygt tensor of its own, but on {parameter.device}; "
            f"make the module inside the session, or move it with .to('lazygt')"
        )
    if view_of(parameter) is not None:
        raise ValueError(
            f"parameter {name!r} is a view of another tensor, and can't be stored in another way "
            f"than that; give it memory of its own first: parameter.data = parameter.data.clone()"
        )
    return parameter


def drop_hooks(module: nn.Module, kind: type, mesh_dim: str | None = None) -> None:
    """Remove a module's hooks of class ``kind``, along one axis or any."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kind) and mesh_dim in (None, hook.mesh_dim):  # type: ignore[attr-defined]
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


class _Place(torch.autograd.Function):
    """Annotation as autograd sees it: the identity."""

    @staticmethod
    def forward(
        ctx: Any, t: LazyTensor, sharding: Sharding, with_gradient: bool, behind: Sharding | None
    ) -> LazyTensor:
        ctx.sharding, ctx.with_gradient, ctx.behind = sharding, with_gradient, behind
        owner, meta = storage_of(t).owner, fresh_meta(meta_of(t))
        with owner.lock:
            same = owner.show(record_place(t, meta, sharding), meta)
        storage_of(same).placed = sharding
        return same

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.with_gradient and ctx.sharding.pinned:
            grad = placed(grad, ctx.sharding)
        if ctx.behind is not None:
            grad = placed(grad, ctx.behind)
        return grad, None, None, None


def fresh_meta(meta: TensorMeta) -> TensorMeta:
    """Return the meta of a value with memory of its own: a view's, with offset 0."""
    return TensorMeta.of(meta.empty("meta")) if meta.offset else meta


def unsaid(mesh: Mesh) -> Placements:
    """Return placements that are ``Unspecified`` on every axis."""
    return (Unspecified(),) * len(mesh.names)
