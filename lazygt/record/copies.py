"""Copies of handles: deep copies, and CPU copies for saving."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.record.tensor import LazyTensor, Storage, ViewChain, wrapper

if TYPE_CHECKING:
    from lazygt.record.recorder import Recorder


def deep_copy(recorder: Recorder, t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """A handle like ``t`` on a copied cell; handles that shared a cell share the copy."""
    cell = t._storage
    twin = memo.get(id(cell))
    if twin is None:
        base = wrapper(cell.meta, cell, None)
        with torch.no_grad():
            copied = cast(LazyTensor, base.clone())
        recorder.keep_sharding(copied, cell)
        twin = copied._storage
        memo[id(cell)] = twin
    view = t._view
    shown = None if view is None else ViewChain(view.steps, 0, 0, 0)
    return wrapper(TensorMeta.of(t), twin, shown)


def host_copy(recorder: Recorder, t: LazyTensor) -> torch.Tensor:
    """A CPU tensor with the values, shape and strides of ``t``, for saving.

    Handles that share a cell get tensors that share a storage, so they are tied in the file too.
    """
    cell, meta = t._storage, TensorMeta.of(t)
    if t._view is not None and (meta.conj or meta.neg or meta.dtype != cell.meta.dtype):
        return recorder.fetch(t, "save")
    storage = _saved_storage(cell)
    if storage is None:
        whole = recorder.fetch(wrapper(cell.meta, cell, None), "save")
        if whole.stride() != cell.meta.stride:
            laid_out = torch.empty_strided(
                cell.meta.shape, cell.meta.stride, dtype=whole.dtype, device="cpu"
            )
            whole = laid_out.copy_(whole)
        storage = whole.untyped_storage()
        cell.saved = weakref.ref(storage), cell.remote
    flat = torch.empty(0, dtype=meta.dtype, device="cpu")
    return flat.set_(storage, meta.offset, meta.shape, meta.stride)


def _saved_storage(cell: Storage) -> torch.UntypedStorage | None:
    """The storage that another handle of the cell was saved with, in the same ``torch.save``."""
    found, remote = getattr(cell, "saved", (None, None))
    if found is None or remote is None or remote is not cell.remote:
        return None
    return cast("torch.UntypedStorage | None", found())
