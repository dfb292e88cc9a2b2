"""Storages of lazy tensors: an identity and a size, no memory.

Libraries ask a storage's address whether tensors share it, as safetensors and accelerate do of tied
weights. Each cell has an address that no process can read, as one of a GPU can't be read here.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch

from lazygt.record.tensor import DEVICE_0, LazyTensor, Storage, meta_of

#: Beyond what an x86 or ARM processor can address, so that whoever reads there fails at once.
_FIRST = 1 << 60
#: What CUDA's allocator rounds to as well.
_ALIGNMENT = 512


class LazyStorage(torch.UntypedStorage):
    """What ``t.untyped_storage()`` gives: equal addresses mean the same storage."""

    cell: Storage

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: torch would go on with a storage that has no memory, and crash."""
        raise NotImplementedError(
            "a lazygt storage can't be made or copied: clone the tensor that shows it, or fetch "
            "that with .cpu() and take the storage of the copy"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """``lazygt:0``."""
        return DEVICE_0

    @property
    def _cdata(self) -> int:
        return _ADDRESSES.of(self.cell)

    def data_ptr(self) -> int:
        """An address that nobody can read; 0 of an empty storage, as in torch."""
        return _ADDRESSES.of(self.cell) if self.nbytes() else 0

    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return _nbytes(self.cell)

    size = nbytes
    __len__ = nbytes

    def resize_(self, size: int) -> NoReturn:
        """Refused: it would expose memory that no op has written."""
        raise NotImplementedError(
            f"resize_ of a lazygt storage from {self.nbytes()} to {size} bytes: its memory is the "
            f"workers'; give the tensor another value with .data = ..."
        )


class _Addresses:
    """Hands out ranges of addresses one after the other; none comes twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = _FIRST

    def of(self, cell: Storage) -> int:
        """The cell's own; it is made when it is first asked for."""
        with self._lock:
            if not hasattr(cell, "address"):
                cell.address = self._free
                self._free += (_nbytes(cell) // _ALIGNMENT + 1) * _ALIGNMENT
            return cell.address


_ADDRESSES = _Addresses()


def _nbytes(cell: Storage) -> int:
    return cell.meta.extent * cell.meta.dtype.itemsize


def untyped_storage(self: LazyTensor) -> LazyStorage:
    """The storage of a lazy tensor."""
    storage: Any = torch.Tensor.untyped_storage(self)
    storage.__class__ = LazyStorage
    storage.cell = self._storage
    made: LazyStorage = storage
    return made


def data_ptr(self: LazyTensor) -> int:
    """Where the first element is in the storage's range of addresses; 0 of an empty tensor."""
    if not self.numel():
        return 0
    return _ADDRESSES.of(self._storage) + meta_of(self).offset * self.dtype.itemsize


def install() -> None:
    """Lazy tensors have storages."""
    lazy: Any = LazyTensor
    lazy.untyped_storage, lazy.data_ptr = untyped_storage, data_ptr
