"""Where a tensor is to lie: an annotation of what is recorded, and remembered by the tensor's cell.

So what gets other values later, from the client or by ``.data = ...``, lies where it lay.
"""

from __future__ import annotations

from lazygt.graph.label import Held, Replicated
from lazygt.graph.mesh import Mesh, Stored
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.places import ENTER, PLACE, place_node
from lazygt.tensor import LazyTensor, meta_of


def mesh_of(t: LazyTensor) -> Mesh:
    """The mesh of the session that a tensor belongs to."""
    return t._cell.recorder.shipper.mesh


def is_placed(t: LazyTensor) -> bool:
    """Whether a tensor is stored in another way than whole on every worker, or is to be."""
    cell = t._cell
    return cell.placed is not None or (cell.remote is not None and cell.remote.stored is not None)


def is_everywhere(t: LazyTensor) -> bool:
    """Whether every worker has the whole tensor and nobody asked for that, as after a loading.

    A view of a larger tensor lies as that does.
    """
    return t._view is None and t._cell.remote is not None and not is_placed(t)


def stored_now(t: LazyTensor) -> Stored:
    """How a tensor is to be kept, as far as it has been said; else how it lies."""
    cell = t._cell
    lies = None if cell.remote is None else cell.remote.stored
    return cell.placed or lies or Stored((Replicated(),) * len(mesh_of(t).names))


def store(t: LazyTensor, stored: Stored) -> None:
    """Keep a tensor's values as ``stored`` says from here on; it stays the object that it is."""
    recorder = t._cell.recorder
    with recorder.lock:
        recorder.own(t._cell, record_place(t, meta_of(t), stored))
        t._cell.placed = stored


def move(t: LazyTensor, index: int, axis: str) -> None:
    """From here on the stage has the tensor, and nobody else."""
    recorder, before = t._cell.recorder, stored_now(t)
    labels = list(before.labels)
    labels[mesh_of(t).names.index(axis)] = Held(index)
    with recorder.lock:
        recorder.own(t._cell, record_mark(ENTER, (t,), (index, axis), meta_of(t)))
        t._cell.placed = before._replace(labels=tuple(labels))


def keep(t: LazyTensor, stored: Stored) -> None:
    """Store a tensor's values as another of its shape is, or was, stored."""
    for axis, label in zip(mesh_of(t).names, stored.labels, strict=True):
        if isinstance(label, Held):
            move(t, label.rank, axis)
    if stored.pinned or any(not isinstance(label, Held | Replicated) for label in stored.labels):
        store(t, stored)
    t._cell.placed = stored


def record_place(t: LazyTensor, meta: TensorMeta, stored: Stored) -> int:
    """Record where a tensor's value is; returns the number of the new value, of this meta."""
    recorder = t._cell.recorder
    index = recorder.index_of(t)
    return recorder.internal((PLACE, index, stored), place_node(index, meta, stored))


def record_mark(
    op: str, operands: tuple[LazyTensor, ...], rest: tuple[int | str, ...], meta: TensorMeta
) -> int:
    """Record the mark of a stage on the first operand; returns the number of the new value."""
    recorder = operands[0]._cell.recorder
    numbers = [recorder.index_of(t) for t in operands]
    node = Node(op, (*map(Ref, numbers), *rest), (), (meta,))
    return recorder.internal((op, *numbers, *rest), node)
