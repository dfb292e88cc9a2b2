"""What a user says about where values lie on the mesh of workers.

    x = lazygt.distribute(batch.to("lazygt"), {"data": Shard(0)})
    lazygt.parallelize(model, {"blocks.*.qkv.weight": {"model": Shard(0)}})

Placements are ``torch.distributed.tensor``'s, one for each axis of the mesh: a list in its order,
or a dict by name, in which an axis that is not named is ``Replicate()``. They say where a value is
stored. What else is cut, and what is exchanged, follows; the numbers never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from lazygt.graph.label import Label, Partial, Replicated, label_of
from lazygt.graph.mesh import Mesh, Placement
from lazygt.graph.meta import TensorMeta
from lazygt.passes.sharding.places import PLACE, place_node
from lazygt.recorder import Recorder
from lazygt.session import current
from lazygt.tensor import LazyTensor, meta_of

#: One torch placement for each axis of the mesh.
Placements = Sequence[Any] | Mapping[str, Any]


def distribute(t: torch.Tensor, placements: Placements, pinned: bool = False) -> torch.Tensor:
    """The same values, stored as ``placements`` say.

    Gradients pass through it as they are.

    Args:
        t: a lazygt tensor.
        pinned: it is also *used* so, and never moved for an op that would run faster otherwise.

    Raises:
        ValueError: a placement that the tensor or the mesh can't have.
        TypeError: ``t`` is no lazygt tensor.
    """
    mesh = current().mesh
    if not isinstance(t, LazyTensor):
        raise TypeError(
            f"distribute() takes a lazygt tensor, not a {type(t).__name__} on {t.device}; "
            f"move it with .to('lazygt')"
        )
    placement = placement_for(f"a tensor of {meta_of(t)}", t.dim(), placements, mesh)
    placed: torch.Tensor = _Place.apply(t, placement, pinned)  # type: ignore[no-untyped-call]
    return placed


def redistribute(t: torch.Tensor, placements: Placements) -> torch.Tensor:
    """The same values, moved to where ``placements`` say.

    Raises:
        ValueError, TypeError: as ``distribute``.
    """
    return distribute(t, placements)


def parallelize(
    module: torch.nn.Module, plan: Mapping[str, Placements], pinned: bool = False
) -> torch.nn.Module:
    """Store a module's parameters as ``plan`` says; each stays the object that it is.

    Args:
        plan: names of parameters, with ``*`` for any text -> placements. The first pattern that
            fits a name counts.
        pinned: see ``distribute``.

    Returns:
        The module.

    Raises:
        ValueError: a pattern that fits no parameter, or a placement that one can't have; no
            parameter has been placed then.
    """
    mesh = current().mesh
    found: list[tuple[LazyTensor, Placement]] = []
    unused = set(plan)
    for name, parameter in module.named_parameters():
        pattern = next((p for p in plan if fnmatchcase(name, p)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        if not isinstance(parameter, LazyTensor) or parameter._view is not None:
            raise ValueError(
                f"parameter {name!r} is no lazygt tensor of its own, but on {parameter.device}; "
                f"make the module inside the session"
            )
        what = f"parameter {name!r} of {meta_of(parameter)}"
        found.append((parameter, placement_for(what, parameter.dim(), plan[pattern], mesh)))
    if unused:
        names = ", ".join(name for name, _ in module.named_parameters())
        raise ValueError(f"no parameter fits {min(unused)!r}; the module has: {names}")
    for t, placement in found:
        recorder = t._cell.recorder
        with recorder.lock:
            recorder.own(t._cell, _record(recorder, t, meta_of(t), placement, pinned))
    return module


def placement_for(what: str, rank: int, placements: Placements, mesh: Mesh) -> Placement:
    """The labels, one an axis, that a user's placements stand for.

    Args:
        what: names the tensor in errors.
        rank: its number of dims.

    Raises:
        ValueError: naming the tensor and the mesh.
    """
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
    return tuple(
        _label(what, rank, one, axis, mesh)
        for one, axis in zip(listed, mesh.names, strict=True)
    )  # fmt: skip


def _label(what: str, rank: int, placement: Any, axis: str, mesh: Mesh) -> Label:
    if placement is None:
        return Replicated()
    try:
        label = label_of(placement, rank)
    except ValueError as error:
        raise ValueError(f"{what} on axis {axis!r} of the mesh {mesh}: {error}") from None
    if isinstance(label, Partial):
        raise ValueError(
            f"{what} on axis {axis!r} of the mesh {mesh}: a value is stored whole or in blocks, "
            f"not as {placement!r}; use Replicate() or Shard(dim)"
        )
    return label


class _Place(torch.autograd.Function):
    """The annotation as autograd sees it: the identity."""

    @staticmethod
    def forward(ctx: Any, t: LazyTensor, placement: Placement, pinned: bool) -> LazyTensor:
        recorder, meta = t._cell.recorder, _fresh(meta_of(t))
        with recorder.lock:
            return recorder.show(_record(recorder, t, meta, placement, pinned), meta)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _fresh(meta: TensorMeta) -> TensorMeta:
    """The meta of a value of its own: a view's, without what lies before it in memory."""
    return TensorMeta.of(meta.empty("meta")) if meta.offset else meta


def _record(
    recorder: Recorder, t: LazyTensor, meta: TensorMeta, placement: Placement, pinned: bool
) -> int:
    """Record the annotation of a tensor's value; returns the number of the new value."""
    index = recorder.index_of(t)
    return recorder.internal(
        (PLACE, index, placement, pinned), place_node(index, meta, placement, pinned)
    )
