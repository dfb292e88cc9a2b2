"""Memory that another process can map: a GPU's through CUDA IPC, or the host's in its place."""

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
        """A flat uint8 buffer."""

    def export(self, buffer: Tensor) -> list[Any]:
        """A handle for one other process: numbers and bytes only."""

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of which another process has sent a handle."""

    def synchronize(self) -> None:
        """Return when all that was queued on the device is done."""


class CudaDevice:
    """A GPU.

    Args:
        index: by default torch's current one; sender and receivers must mean the same GPU.

    Raises:
        RuntimeError: there is none.
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
        """A flat uint8 buffer on the GPU."""
        with plain_segments():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def export(self, buffer: Tensor) -> list[Any]:
        """The CUDA IPC handle and what torch needs beside it to map the buffer."""
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
    """Have torch's allocator take no expandable segment inside.

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
    """The host's memory, mapped by a descriptor: for workers and receivers without a GPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        #: of each buffer that lives: its arena, and where it lies there
        self._places: dict[int, tuple[Arena, int]] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """A flat uint8 buffer."""
        arena = Arena.create(nbytes)
        return self._over(arena, arena.allocate(nbytes).offset, nbytes)

    def export(self, buffer: Tensor) -> list[Any]:
        """Process, descriptor, offset and bytes.

        Raises:
            ValueError: the buffer is none of this device.
        """
        if buffer.data_ptr() not in self._places:
            raise ValueError("a buffer of another device")
        arena, offset = self._places[buffer.data_ptr()]
        return [os.getpid(), arena.fd, offset, buffer.numel()]

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of another process of this user.

        Raises:
            OSError: that process, or its buffer, is not there any more.
        """
        pid, fd, offset, nbytes = handle
        arena = Arena.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        return self._over(arena, offset, nbytes)

    def synchronize(self) -> None:
        """Nothing is queued."""

    def _over(self, arena: Arena, offset: int, nbytes: int) -> Tensor:
        """The buffer; the arena is closed when it dies."""
        buffer = arena.view(offset, nbytes)
        self._places[buffer.data_ptr()] = arena, offset
        weakref.finalize(buffer, self._drop, buffer.data_ptr())
        return buffer

    def _drop(self, place: int) -> None:
        self._places.pop(place)[0].close()


def shared_device(device: torch.device) -> SharedDevice:
    """The device on which a process that computes on ``device`` lends buffers."""
    if device.type != "cuda":
        return HostDevice()
    return CudaDevice(device.index)
