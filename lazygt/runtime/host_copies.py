"""Copies between a GPU and the host, by way of arenas that the GPU accesses directly."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazygt.host.processes import memory_left
from lazygt.runtime.kernels import clear_error, clone

if TYPE_CHECKING:
    from lazygt.runtime.arenas import Arena

#: The largest segment to register: one part in so many of the host's free memory.
_SHARE = 4
#: Bytes of the largest value that is staged: it takes twice its room for a while.
_MOST_STAGED = 256 << 20
#: Largest share of a GPU's unused memory for copies of values on their way to the host.
_LEAVING_SHARE = 0.5


def unused_bytes(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Return the unused bytes of a GPU: free ones, and those cached by torch's allocator."""
    free, _ = cuda.mem_get_info(device)
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


class HostCopies:
    """Copies to and from one GPU.

    They go on their own stream: on the stream of the kernels a copy would have the worker wait for
    all of these, and the GPU would idle then. A value that has arrived is copied once more, on the
    kernels' stream: memory of one stream that another one has used can't be freed after a failed
    kernel (torch's allocator aborts the process).

    Args:
        cuda: ``torch.cuda``, or a stand-in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream: Any = None
        #: stream of copies to the host
        self._leaving: Any = None
        #: (event, staged value): values that have arrived, until the event says they are copied
        self._staged: deque[tuple[Any, torch.Tensor]] = deque()
        #: False once CUDA has refused to register this host's shared memory
        self._registers = True

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the GPU; it has been read when this returns."""
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
            The copies, and an event recorded after them; None: there is no room.
        """
        room = unused_bytes(self._device, self._cuda) * _LEAVING_SHARE
        if sum(value.nbytes for value in values) > room:
            return None
        try:
            copies = [clone(value) for value in values]
        except torch.OutOfMemoryError:  # the unused memory is fragmented
            return None
        event = self._cuda.Event()
        event.record()
        return copies, event

    @contextlib.contextmanager
    def beside(self, event: Any) -> Iterator[None]:
        """Run this thread's copies on their own stream, after an event."""
        if self._leaving is None:
            self._leaving = self._cuda.Stream(self._device)
        self._leaving.wait_event(event)
        with self._cuda.stream(self._leaving):
            yield

    def finish(self) -> None:
        """Wait for the copies that this thread has begun.

        It waits for an event: while another thread looks for waiting ops
        (``CudaGraphs.nobody_waits``), torch refuses all other waits of the process.
        """
        event = self._cuda.Event()
        event.record()
        event.synchronize()

    def register(self, arena: Arena) -> None:
        """Register an arena with CUDA (``cudaHostRegister``): the GPU accesses it directly."""
        arena.watch(self._mapped, self._unmapped)

    def _mapped(self, memory: mmap.mmap) -> bool:
        """Register a new mapping; return whether it is. Its pages all take memory from then on."""
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
