"""Placement annotations of tensors, recorded as ops and remembered by the storage.

A tensor that gets other values later, from the client or by ``.data = ...``, keeps its placement.
"""

from __future__ import annotations

import torch

from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Replicate, SingleRank
from lazygt.passes.sharding.marks import ENTER, PLACE, REDUCE_AS, place_node, reduce_as_node
from lazygt.record.tensor import LazyTensor, meta_of, storage_of, view_of


def mesh_of(t: LazyTensor) -> Mesh:
    """Return the mesh of the session that a tensor belongs to."""
    return storage_of(t).owner.mesh


def is_placed(t: LazyTensor) -> bool:
    """Return whether a tensor is, or will be, sharded or on one stage, not replicated."""
    storage = storage_of(t)
    return storage.placed is not None or (
        storage.remote is not None and storage.remote.sharding is not None
    )


def is_everywhere(t: LazyTensor) -> bool:
    """Return whether every worker already has the full tensor, as after an upload.

    A view has the placement of its base; for a view the answer is False.
    """
    return view_of(t) is None and storage_of(t).remote is not None and not is_placed(t)


def current_sharding(t: LazyTensor) -> Sharding:
    """Return the sharding that the user gave a tensor, else its actual one, else replication."""
    storage = storage_of(t)
    actual = None if storage.remote is None else storage.remote.sharding
    return storage.placed or actual or Sharding((Replicate(),) * len(mesh_of(t).names))


def set_sharding(t: LazyTensor, sharding: Sharding) -> None:
    """Reshard a tensor in place: later ops see its values stored as ``sharding``."""
    owner = storage_of(t).owner
    with owner.lock:
        owner.own(storage_of(t), record_place(t, meta_of(t), sharding))
        storage_of(t).placed = sharding


def assign_stage(t: LazyTensor, index: int, axis: str) -> None:
    """Move a tensor to one rank of a mesh axis (a pipeline stage), in place."""
    owner, before = storage_of(t).owner, current_sharding(t)
    placements = list(before.placements)
    placements[mesh_of(t).names.index(axis)] = SingleRank(index)
    with owner.lock:
        owner.own(storage_of(t), record_mark(ENTER, (t,), (index, axis), meta_of(t)))
        storage_of(t).placed = before._replace(placements=tuple(placements))


def restore_sharding(t: LazyTensor, sharding: Sharding) -> None:
    """Store a tensor's values with the sharding of another tensor of its shape."""
    for axis, placement in zip(mesh_of(t).names, sharding.placements, strict=True):
        if isinstance(placement, SingleRank):
            assign_stage(t, placement.rank, axis)
    if sharding.fixed or any(
        not isinstance(placement, SingleRank | Replicate) for placement in sharding.placements
    ):
        set_sharding(t, sharding)
    storage_of(t).placed = sharding


def record_place(t: LazyTensor, meta: TensorMeta, sharding: Sharding) -> int:
    """Record a tensor's placement; return the number of the placed value in the trace."""
    owner = storage_of(t).owner
    index = owner.index_of(t)
    return owner.internal((PLACE, index, sharding), place_node(index, meta, sharding))


def reduce_as(gradient: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Return a gradient in another dtype, in which partial sums of ranks are reduced."""
    owner = storage_of(gradient).owner
    with owner.lock:
        index = owner.index_of(gradient)
        node = reduce_as_node(index, meta_of(gradient), dtype)
        meta = node.fresh[0]
        assert meta is not None
        return owner.show(owner.internal((REDUCE_AS, index, dtype), node), meta)


def record_mark(
    op: str, operands: tuple[LazyTensor, ...], rest: tuple[int | str, ...], meta: TensorMeta
) -> int:
    """Record a mark (``passes.sharding.marks``) on the first operand.

    Returns:
        The number of the new value.

    Args:
        operands, rest: arguments of the mark: tensors, then others.
        meta: meta of the first operand.
    """
    owner = storage_of(operands[0]).owner
    numbers = [owner.index_of(t) for t in operands]
    node = Node(op, (*map(Ref, numbers), *rest), (), (meta,))
    return owner.internal((op, *numbers, *rest), node)
