"""``untyped_storage()`` of lazy tensors: an identity and a size, no memory.

Libraries compare addresses of storages to find shared ones, as safetensors and accelerate do for
tied weights. Each storage has an address that no process can read, like a GPU's in this process.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, NoReturn

import torch

#: Device 0, by the backend's name from before device.py renames it.
DEVICE_0 = torch.device("privateuseone", 0)
#: First address: beyond those of an x86 or ARM processor, so that a read there fails at once.
_FIRST = 1 << 60
#: Alignment of addresses, as of CUDA's allocator.
_ALIGNMENT = 512


class AddressRange(NamedTuple):
    """Addresses that a storage's bytes would have."""

    first: int
    nbytes: int


class LazyStorage(torch.UntypedStorage):
    """Result of ``t.untyped_storage()``: equal addresses mean the same storage."""

    range: AddressRange

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: torch would go on with a storage that has no memory, and crash."""
        raise NotImplementedError(
            "a lazygt storage can't be made or copied: clone the tensor that shows it, or fetch "
            "that with .cpu() and take the storage of the copy"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device ``lazygt:0``."""
        return DEVICE_0

    @property
    def _cdata(self) -> int:
        return self.range.first

    def data_ptr(self) -> int:
        """Return an address that nobody can read; 0 for an empty storage, as in torch."""
        return self.range.first if self.range.nbytes else 0

    def nbytes(self) -> int:
        """Return the bytes from the first to the last element."""
        return self.range.nbytes

    size = nbytes
    __len__ = nbytes

    def resize_(self, size: int) -> NoReturn:
        """Raise: it would expose memory that no op has written."""
        raise NotImplementedError(
            f"resize_ of a lazygt storage from {self.nbytes()} to {size} bytes: its memory is the "
            f"workers'; give the tensor another value with .data = ..."
        )


class _Addresses:
    """Bump allocator of address ranges; none is reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = _FIRST

    def allocate(self, nbytes: int) -> AddressRange:
        """Return the next range of ``nbytes`` bytes, aligned."""
        with self._lock:
            first = self._free
            self._free += (nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        return AddressRange(first, nbytes)


_ADDRESSES = _Addresses()


def new_range(nbytes: int) -> AddressRange:
    """Return an unused address range of ``nbytes`` bytes."""
    return _ADDRESSES.allocate(nbytes)


def untyped_storage_of(t: torch.Tensor, addresses: AddressRange) -> LazyStorage:
    """Return the storage of a lazy tensor."""
    storage: Any = torch.UntypedStorage(0, device="cpu")
    storage.__class__ = LazyStorage
    storage.range = addresses
    lazy: LazyStorage = storage
    return lazy
