"""Users' placements of values on the mesh of workers.

    x = lazygt.distribute(batch.to("lazygt"), {"data": Shard(0)})
    lazygt.parallelize_module(model, parallelize_plan={"blocks.*.qkv.weight": {"model": Shard(0)}})

Placements are ``torch.distributed.tensor``'s (``lazygt.Shard`` is the same class), one for each
axis of the mesh: a list in its order, or a dict by name. They define the sharding of
a stored value. The placements of all other values, and the collectives, follow by propagation; the
numbers never change. Plans for modules are in ``lazygt.parallel.tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lazygt.errors import renamed
from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.placement import Partial, Placement, Replicate, Unspecified, as_placement
from lazygt.record.annotate import mesh_of, record_place
from lazygt.record.tensor import LazyTensor, is_lazy, meta_of, storage_of, view_of
from lazygt.session import current

#: One torch placement for each axis of the mesh.
UserPlacements = Sequence[Any] | Mapping[str, Any]


@renamed("pinned", "fixed")
def distribute(t: torch.Tensor, placements: UserPlacements, fixed: bool = False) -> torch.Tensor:
    """Return the same values, stored with these placements.

    Gradients pass through unchanged; the gradient of a fixed value is fixed as well.

    Args:
        t: a lazygt tensor.
        placements: a list or a dict; an axis that a dict does not name is ``Replicate()``.
        fixed: ops also *use* the value in this placement, even if another would be faster.

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
    return with_sharding(t, Sharding(placements, fixed))


def redistribute(t: torch.Tensor, placements: UserPlacements) -> torch.Tensor:
    """Return the same values, moved to these placements.

    Raises:
        ValueError, TypeError: as ``distribute``.
    """
    return distribute(t, placements)


def with_sharding(
    t: LazyTensor,
    sharding: Sharding,
    with_gradient: bool = True,
    grad_sharding: Sharding | None = None,
) -> LazyTensor:
    """Return ``t`` annotated with a sharding; a fixed one also holds for its gradient.

    Args:
        with_gradient: the gradient of the result has the sharding, too, if it is fixed.
        grad_sharding: sharding of the gradient for the ops that computed ``t``; None: as it comes.
    """
    if meta_of(t).extent < t.numel():
        t = t.contiguous()  # type: ignore[assignment]  # an expanded tensor, in which elements share memory
    annotated: LazyTensor = _Annotate.apply(t, sharding, with_gradient, grad_sharding)  # type: ignore[no-untyped-call]
    return annotated


def placements_for(
    name: str,
    ndim: int,
    placements: UserPlacements,
    mesh: Mesh,
    others: Placements | None = None,
) -> Placements:
    """Resolve a user's placements to one for each axis of the mesh.

    Args:
        name: the tensor's name in errors.
        ndim: the tensor's number of dims.
        others: the placements on axes that are not named; None: replicated.

    Raises:
        ValueError: a placement is impossible; the message names the tensor and the mesh.
        TypeError: ``placements`` is neither a list nor a dict.
    """
    defaults = others or (Replicate(),) * len(mesh.names)
    if isinstance(placements, str) or not isinstance(placements, Mapping | Sequence):
        raise TypeError(
            f"{name}: {placements!r} is neither a list with one placement for each axis of the "
            f"mesh {mesh}, nor a dict by axis"
        )
    if isinstance(placements, Mapping):
        unknown = [axis for axis in placements if axis not in mesh.names]
        if unknown:
            raise ValueError(f"{name}: the mesh {mesh} has no axis {unknown[0]!r}")
        by_axis = [placements.get(axis) for axis in mesh.names]
    else:
        by_axis = list(placements)
        if len(by_axis) != len(mesh.names):
            raise ValueError(
                f"{name}: {len(by_axis)} placements, but the mesh {mesh} has {len(mesh.names)} axes"
            )
    return tuple([
        default if placement is None else _placement(name, ndim, placement, axis, mesh)
        for placement, axis, default in zip(by_axis, mesh.names, defaults, strict=True)
    ])  # fmt: skip


def _placement(name: str, ndim: int, user_placement: Any, axis: str, mesh: Mesh) -> Placement:
    """Check and convert one placement; only Replicate and Shard are stored.

    Args:
        name: the tensor's name in errors.
        ndim: the tensor's number of dims.
    """
    try:
        placement = as_placement(user_placement, ndim)
    except ValueError as error:
        raise ValueError(f"{name} on axis {axis!r} of the mesh {mesh}: {error}") from None
    if isinstance(placement, Partial):
        raise ValueError(
            f"{name} on axis {axis!r} of the mesh {mesh}: a value is stored whole or in blocks, "
            f"not as {user_placement!r}; use Replicate() or Shard(dim)"
        )
    return placement


def shardable_parameter(name: str, parameter: torch.Tensor) -> LazyTensor:
    """Return the parameter, after checks that its sharding can be changed.

    Raises:
        ValueError: the parameter is not on the workers, or is a view of another tensor.
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


class _Annotate(torch.autograd.Function):
    """Identity with a sharding annotation; backward annotates the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        t: LazyTensor,
        sharding: Sharding,
        with_gradient: bool,
        grad_sharding: Sharding | None,
    ) -> LazyTensor:
        ctx.sharding, ctx.with_gradient, ctx.grad_sharding = sharding, with_gradient, grad_sharding
        owner, meta = storage_of(t).owner, without_offset(meta_of(t))
        with owner.lock:  # record the annotation as an op, and create a tensor for its result
            annotated = owner.show(record_place(t, meta, sharding), meta)
        storage_of(annotated).placed = sharding
        return annotated

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.with_gradient and ctx.sharding.fixed:
            grad = with_sharding(grad, ctx.sharding)
        if ctx.grad_sharding is not None:
            grad = with_sharding(grad, ctx.grad_sharding)
        return grad, None, None, None


def without_offset(meta: TensorMeta) -> TensorMeta:
    """Return the meta of a value in its own memory: the same, with storage offset 0."""
    return TensorMeta.of(meta.empty("meta")) if meta.offset else meta


def unspecified(mesh: Mesh) -> Placements:
    """Return placements that are ``Unspecified`` on every axis."""
    return (Unspecified(),) * len(mesh.names)


# -- batch norm with each rank's own statistics, as in ``DistributedDataParallel`` -----------------
# By default the statistics are those of the global batch, as on one device, so each batch norm
# exchanges them between ranks (``SyncBatchNorm``). Local statistics need no exchange, but the
# numbers depend on the number of ranks of the axis, because each block of samples is normalised
# separately.


def local_batch_norm(module: nn.Module, mesh_dim: str = "data") -> nn.Module:
    """Make every batch norm in a module compute statistics of each rank's block of samples.

    ``lazygt.distribute(batch, {"data": Shard(0)})`` shards the batches. Running statistics are of
    the first block, as DDP keeps those of rank 0. Evaluation is unchanged, and so is training in a
    session with a mesh that lacks the axis.

    Returns:
        The module.

    Raises:
        ValueError: the mesh has no such axis, or the module no batch norm; later, in training, the
            ranks can't share a batch evenly.
    """
    current().mesh.size(mesh_dim)
    norms = [inner for inner in module.modules() if isinstance(inner, _BatchNorm)]
    if not norms:
        raise ValueError(f"{type(module).__name__} has no batch norm")
    for norm in norms:
        norm.forward = _LocalForward(norm, mesh_dim)  # type: ignore[assignment, method-assign]
    return module


@dataclass(frozen=True)
class _LocalForward:
    """Forward of one batch norm, with separate statistics of each rank's block of samples."""

    norm: _BatchNorm
    mesh_dim: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self._block_count(x)
        if blocks == 1:
            output: torch.Tensor = type(self.norm).forward(self.norm, x)
            return output
        self.norm._check_input_dim(x)
        if x.shape[0] % blocks:
            raise ValueError(
                f"local_batch_norm: a batch of {list(x.shape)} can't be shared evenly by the "
                f"{blocks} ranks of axis {self.mesh_dim!r}; leave the last samples out "
                f"(DataLoader(drop_last=True)), or use the statistics of the whole batch"
            )
        # (N, C, ...) -> (N / blocks, blocks * C, ...): blocks become separate channels
        stacked = x.unflatten(0, (blocks, -1)).transpose(0, 1).flatten(1, 2)
        y = self._normalise(stacked, blocks)
        joined: torch.Tensor = y.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(0, 1)
        return joined

    def _block_count(self, x: torch.Tensor) -> int:
        """Return the number of blocks with statistics of their own."""
        uses_batch = self.norm.training or self.norm.running_mean is None
        if not uses_batch or not is_lazy(x) or self.mesh_dim not in mesh_of(x).names:
            return 1
        return mesh_of(x).size(self.mesh_dim)

    def _normalise(self, stacked: torch.Tensor, blocks: int) -> torch.Tensor:
        """Normalise (N / blocks, blocks * C, ...); update the running statistics by block 0."""
        norm, momentum = self.norm, self._momentum()
        mean, var = (
            _repeated(t if norm.training else None, blocks)
            for t in (norm.running_mean, norm.running_var)
        )
        weight, bias = _repeated(norm.weight, blocks), _repeated(norm.bias, blocks)
        y = F.batch_norm(stacked, mean, var, weight, bias, True, momentum, norm.eps)
        with torch.no_grad():
            for running, new in ((norm.running_mean, mean), (norm.running_var, var)):
                if running is not None and new is not None:
                    running.copy_(new[: norm.num_features])
        return y

    def _momentum(self) -> float:
        """Return the weight of the new batch in the running statistics; count the batch."""
        norm = self.norm
        if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if norm.momentum is None:  # cumulative mean of all batches
                return 1.0 / float(norm.num_batches_tracked)
        return 0.0 if norm.momentum is None else norm.momentum


def _repeated(t: torch.Tensor | None, blocks: int) -> torch.Tensor | None:
    """Repeat a tensor of channels (C,) for each block: (blocks * C,)."""
    return None if t is None else t.repeat(blocks)
