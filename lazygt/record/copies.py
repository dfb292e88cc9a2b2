"""Deep copies of lazy tensors, and copies on the host for saving."""

from __future__ import annotations

import copy
import weakref
from typing import Any, cast

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.record.tensor import (
    LazyTensor,
    Storage,
    attributes,
    host_class,
    storage_of,
    view_of,
    wrapper,
)

_make_subclass = torch.Tensor._make_subclass


def deep_copy(t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """Return the result of ``copy.deepcopy``.

    Raises:
        RuntimeError: ``t`` is no leaf of the autograd graph.
    """
    if id(t) in memo:
        return memo[id(t)]  # type: ignore[no-any-return]
    if not t.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    result = _copied(t, memo)
    result.requires_grad = t.requires_grad
    memo[id(t)] = result
    if t.grad is not None:
        result.grad = copy.deepcopy(t.grad, memo)
    for name, value in attributes(t).items():
        result.__dict__[name] = copy.deepcopy(value, memo)
    if type(t) is not type(result):
        object.__setattr__(result, "__class__", type(t))
    return result


def saved_form(t: LazyTensor) -> torch.Tensor:
    """Return a CPU tensor with the class, values and user-set attributes of ``t``, for pickling."""
    host_tensor: torch.Tensor = _make_subclass(host_class(t), host_copy(t), t.requires_grad)
    host_tensor.__dict__.update(attributes(t))
    host_tensor.__dict__.pop("_is_param", None)
    return host_tensor


def _copied(t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
    """Return a handle like ``t`` on a copied storage; ``memo`` maps a storage's id to its copy."""
    storage = storage_of(t)
    copied_storage = memo.get(id(storage))
    if copied_storage is None:
        base = wrapper(storage.meta, storage, None)
        with torch.no_grad(), torch._C._DisableFuncTorch():  # a transform would wrap the copy
            copied = cast(LazyTensor, base.clone())
        storage.owner.keep_sharding(copied, storage)
        copied_storage = storage_of(copied)
        memo[id(storage)] = copied_storage
    view = view_of(t)
    copied_view = None if view is None else view.copy()
    return wrapper(TensorMeta.of(t), copied_storage, copied_view)


def host_copy(t: LazyTensor) -> torch.Tensor:
    """Return a CPU tensor with the values, shape and strides of ``t``, for saving.

    Handles that share a storage get tensors that share one, so the file ties them too.
    """
    storage, meta = storage_of(t), TensorMeta.of(t)
    if view_of(t) is not None and (meta.conj or meta.neg or meta.dtype != storage.meta.dtype):
        return cast(torch.Tensor, storage.owner.fetch(t, "save"))
    saved = _saved(storage)
    if saved is None:
        full = storage.owner.fetch(wrapper(storage.meta, storage, None), "save")
        if full.stride() != storage.meta.stride:
            laid_out = torch.empty_strided(
                storage.meta.shape, storage.meta.stride, dtype=full.dtype, device="cpu"
            )
            full = laid_out.copy_(full)
        saved = full.untyped_storage()
        storage.saved = weakref.ref(saved), storage.remote
    flat = torch.empty(0, dtype=meta.dtype, device="cpu")
    return flat.set_(saved, meta.offset, meta.shape, meta.stride)


def _saved(storage: Storage) -> torch.UntypedStorage | None:
    """Return the CPU storage that another handle was saved with, in the same ``torch.save``."""
    reference, remote = getattr(storage, "saved", (None, None))
    if reference is None or remote is None or remote is not storage.remote:
        return None
    return cast("torch.UntypedStorage | None", reference())
