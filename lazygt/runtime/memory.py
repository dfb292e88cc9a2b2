"""Memory of a worker: of its values, of its allocator and of its process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from lazygt.host.processes import resident
from lazygt.runtime.messages import Memory
from lazygt.runtime.store import Store, Value


def measured_memory(store: Store, groups: Sequence[Iterable[int]], device: torch.device) -> Memory:
    """Measure the memory of this process, which computes values on ``device``.

    Args:
        groups: ids of values; each group's bytes are reported as one number.
    """
    pid, seen = os.getpid(), set[int]()
    current = resident(pid)
    values = dict(store.values)
    living = [_living_bytes([values.pop(key, None) for key in group], seen) for group in groups]
    living.append(_living_bytes(values.values(), seen))
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        allocated, peak = _malloc_bytes() or sum(living), max(current, resident(pid, "VmHWM"))
    return Memory(tuple(living), allocated, peak, current)


def _living_bytes(values: Iterable[Value | None], seen: set[int]) -> int:
    """Return the bytes of the values' storages; a storage in ``seen`` does not count.

    Args:
        seen: storage addresses counted so far; updated.
    """
    total = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            total += value.nbytes
            continue
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            total += storage.nbytes()
            seen.add(address)
    return total


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple([
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ])  # fmt: skip


@cache
def _mallinfo() -> ctypes._NamedFuncPointer | None:
    """Return glibc's ``mallinfo2`` (from 2.33 on); None with another libc."""
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


def _malloc_bytes() -> int:
    """Return the bytes that malloc has handed out; 0 if it does not report them."""
    function = _mallinfo()
    if function is None:
        return 0
    info = function()
    return int(info.uordblks + info.hblkhd)
