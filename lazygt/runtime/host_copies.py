"""Copies between a GPU and the host: from and to arenas that the GPU reads and writes itself."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazygt.runtime.kernels import clear_error, clone
from lazygt.runtime.launch.procfs import memory_left

if TYPE_CHECKING:
    from lazygt.runtime.shared_memory import Arena

#: One part of the memory that is left, at most, that a segment is registered with.
_SHARE = 4
#: Bytes of a value that are copied twice, at most: it takes twice its room for a while.
_MOST_STAGED = 256 << 20
#: Share of a GPU's unused memory, at most, that copies of values on their way to the host take.
_LEAVING_SHARE = 0.5


def unused_bytes(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Return the bytes of a GPU that nobody has, or that torch's allocator has and nobody uses."""
    free, _ = cuda.mem_get_info(device)
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


class HostCopies:
    """Copies to one GPU.

    They go on a stream of their own: one that stood in line behind the kernels would have the
    worker wait for all of these, and the GPU idle then. What has come is copied once more, in
    line: memory of one stream that another one has used can't be freed after a failed kernel
    (torch's allocator aborts the process).

    Args:
        cuda: ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        #: for what leaves
        self._leaving: Any = None
        #: what has come, until it is copied, and the event that says so
        self._staged: deque[tuple[Any, torch.Tensor]] = deque()
        #: whether CUDA registers this host's shared memory
        self._registers = True

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """A CPU tensor on the GPU; it has been read when this returns."""
        if host.nbytes > _MOST_STAGED:
            return host.to(self._device)
        if self._stream is None:
            self._stream = self._cuda.Stream(self._device)
        while self._staged and self._staged[0][0].query():
            self._staged.popleft()
        with self._cuda.stream(self._stream):
            staged = host.to(self._device, non_blocking=True)
        self._stream.synchronize()
        value = clone(staged)
        copied = self._cuda.Event()
        copied.record()
        self._staged.append((copied, staged))
        return value

    def set_aside(self, values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any] | None:
        """Copy values on the GPU, so that kernels launched later may overwrite them.

        Returns:
            The copies, and the event that tells that they are made; None: there is no room.
        """
        room = unused_bytes(self._device, self._cuda) * _LEAVING_SHARE
        if sum(value.nbytes for value in values) > room:
            return None
        try:
            copies = [clone(value) for value in values]
        except torch.OutOfMemoryError:  # what is unused lies in pieces
            return None
        event = self._cuda.Event()
        event.record()
        return copies, event

    @contextlib.contextmanager
    def beside(self, event: Any) -> Iterator[None]:
        """Have this thread's copies go on a stream of their own, after an event."""
        if self._leaving is None:
            self._leaving = self._cuda.Stream(self._device)
        self._leaving.wait_event(event)
        with self._cuda.stream(self._leaving):
            yield

    def finish(self) -> None:
        """Wait for the copies that this thread has begun.

        By an event: while another thread asks which ops wait (``CudaGraphs.nobody_waits``), torch
        refuses all other waits of the process.
        """
        event = self._cuda.Event()
        event.record()
        event.synchronize()

    def register(self, arena: Arena) -> None:
        """Have the GPU read and write an arena without a copy on the way (``cudaHostRegister``)."""
        arena.watch(self._mapped, self._unmapped)

    def _mapped(self, memory: mmap.mmap) -> bool:
        """Register a new mapping; whether it is. All of its pages take memory from then on."""
        if not self._registers or len(memory) > memory_left() // _SHARE:
            return False
        error = self._cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)
        if int(error) == 0:
            return True
        self._registers = False  # copies take longer, as from any memory
        clear_error(self._device)
        return False

    def _unmapped(self, memory: mmap.mmap) -> None:
        self._cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
