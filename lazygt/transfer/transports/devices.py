"""Memory that another process can map: a GPU's by CUDA IPC, or the host's instead."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lazygt.runtime.shared_memory import Arena

_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)


class SharedDevice(Protocol):
    """Memory that another process can map."""

    device: torch.device

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 buffer."""

    def export(self, buffer: Tensor) -> list[Any]:
        """Return a handle of a buffer for one other process: numbers and bytes only."""

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map another process's buffer by its handle."""

    def synchronize(self) -> None:
        """Wait until the work queued on the device is done."""


class CudaDevice:
    """A GPU.

    Args:
        index: index of the GPU, by default torch's current one; sender and receivers must use the
            same GPU.

    Raises:
        RuntimeError: there is no GPU.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "CUDA IPC needs a GPU, and torch sees none; use SharedMemoryTransferSender"
            )
        torch.cuda.init()
        chosen = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", chosen)

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 buffer on the GPU."""
        with plain_segments():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def export(self, buffer: Tensor) -> list[Any]:
        """Return the CUDA IPC handle and torch's other arguments to map the buffer."""
        storage: Any = buffer.untyped_storage()
        return list(storage._share_cuda_())

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of a process on the same GPU."""
        storages: Any = torch.UntypedStorage
        storage = storages._new_shared_cuda(*handle)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, 0, (storage.nbytes(),), (1,))

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()


@contextlib.contextmanager
def plain_segments() -> Iterator[None]:
    """Allocation without expandable segments inside the block.

    Another process would map such memory by ``pidfd_getfd``, which yama's ``ptrace_scope=1``
    refuses between siblings. The allocator's own comment names this way (``get_free_block`` of
    c10/cuda/CUDACachingAllocator.cpp); it takes all settings at once.
    """
    given = torch._C._accelerator_getAllocatorSettings()
    plain = _EXPANDABLE.sub(r"\1False", given)
    if plain == given:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(plain)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(given)


class HostDevice:
    """Host memory, mapped by a descriptor: for workers and receivers without a GPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        #: address of each live buffer -> its arena, and its offset there
        self._places: dict[int, tuple[Arena, int]] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 buffer."""
        arena = Arena.create(nbytes)
        return self._over(arena, arena.allocate(nbytes).offset, nbytes)

    def export(self, buffer: Tensor) -> list[Any]:
        """Return process id, descriptor, offset and bytes.

        Raises:
            ValueError: the buffer is not of this device.
        """
        if buffer.data_ptr() not in self._places:
            raise ValueError("a buffer of another device")
        arena, offset = self._places[buffer.data_ptr()]
        return [os.getpid(), arena.fd, offset, buffer.numel()]

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of another process of this user.

        Raises:
            OSError: that process, or its buffer, does not exist any more.
        """
        pid, fd, offset, nbytes = handle
        arena = Arena.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        return self._over(arena, offset, nbytes)

    def synchronize(self) -> None:
        """Do nothing: host memory has no queue."""

    def _over(self, arena: Arena, offset: int, nbytes: int) -> Tensor:
        """Return a buffer in an arena, which is closed when the buffer dies."""
        buffer = arena.view(offset, nbytes)
        self._places[buffer.data_ptr()] = arena, offset
        weakref.finalize(buffer, self._drop, buffer.data_ptr())
        return buffer

    def _drop(self, place: int) -> None:
        self._places.pop(place)[0].close()


def shared_device(device: torch.device) -> SharedDevice:
    """Return the device of the buffers that a process on ``device`` lends."""
    if device.type != "cuda":
        return HostDevice()
    return CudaDevice(device.index)
