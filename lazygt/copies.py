"""Copies of handles: deep copies, and CPU copies for saving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.tensor import LazyTensor, View, wrapper

if TYPE_CHECKING:
    from lazygt.recorder import Recorder


def deep_copy(recorder: Recorder, t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """A handle like ``t`` on a copied cell; handles that shared a cell share the copy."""
    cell = t._cell
    twin = memo.get(id(cell))
    if twin is None:
        base = wrapper(cell.meta, cell, None)
        with torch.no_grad():
            twin = cast(LazyTensor, base.clone())._cell
        memo[id(cell)] = twin
    view = t._view
    shown = None if view is None else View(view.steps, 0, 0, 0)
    return wrapper(TensorMeta.of(t), twin, shown)


def host_copy(recorder: Recorder, t: LazyTensor) -> torch.Tensor:
    """A CPU tensor with the values, shape and strides of ``t``, for saving."""
    value = recorder.fetch(t, "save")
    if value.stride() != t.stride() and TensorMeta.of(t).extent == t.numel():
        value = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(value)
    return value
