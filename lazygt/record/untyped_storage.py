"""What ``untyped_storage()`` of a lazy tensor gives: an identity and a size, no memory.

Libraries ask a storage's address whether tensors share it, as safetensors and accelerate do of tied
weights. Each storage has an address that no process can read, as one of a GPU can't be read here.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, NoReturn

import torch

#: The device by the name it has before device.py renames it.
DEVICE_0 = torch.device("privateuseone", 0)
#: Beyond what an x86 or ARM processor can address, so that whoever reads there fails at once.
_FIRST = 1 << 60
#: What CUDA's allocator rounds to as well.
_ALIGNMENT = 512


class AddressRange(NamedTuple):
    """Where a storage's bytes would be."""

    first: int
    nbytes: int


class LazyStorage(torch.UntypedStorage):
    """What ``t.untyped_storage()`` gives: equal addresses mean the same storage."""

    range: AddressRange

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
        return self.range.first

    def data_ptr(self) -> int:
        """An address that nobody can read; 0 of an empty storage, as in torch."""
        return self.range.first if self.range.nbytes else 0

    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return self.range.nbytes

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

    def take(self, nbytes: int) -> AddressRange:
        with self._lock:
            first = self._free
            self._free += (nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        return AddressRange(first, nbytes)


_ADDRESSES = _Addresses()


def new_range(nbytes: int) -> AddressRange:
    """Addresses for so many bytes, which nothing else has or will have."""
    return _ADDRESSES.take(nbytes)


def untyped_storage_of(t: torch.Tensor, addresses: AddressRange) -> LazyStorage:
    """The storage of a lazy tensor."""
    storage: Any = torch.UntypedStorage(0, device="cpu")
    storage.__class__ = LazyStorage
    storage.range = addresses
    lazy: LazyStorage = storage
    return lazy
