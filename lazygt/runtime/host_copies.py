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

#: Divisor of the host's free memory: the largest segment that is registered with CUDA.
_REGISTERED_SHARE = 4
#: Bytes of the largest staged upload. A staged value takes twice its memory for a while.
_MAX_STAGED_BYTES = 256 << 20
#: Largest share of a GPU's unused memory for copies of values that are fetched later.
_DOWNLOAD_SHARE = 0.5


def unused_bytes(device: torch.device, cuda: Any = torch.cuda) -> int:
    """Return the unused bytes of a GPU: free bytes plus those that torch's allocator caches."""
    free, _ = cuda.mem_get_info(device)
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


class HostCopies:
    """Copies to and from one GPU, on side streams.

    On the kernels' stream, a copy would make the worker wait for all queued kernels, and the GPU
    would idle then. An uploaded value is copied a second time, on the kernels' stream: memory that
    was allocated on one stream and used on another can't be freed after a failed kernel (torch's
    allocator aborts the process).

    Args:
        cuda: ``torch.cuda``, or a stand-in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._upload_stream: Any = None
        #: stream of copies to the host, created at the first one
        self._download_stream: Any = None
        #: (event of the second copy, staged value): staged values, kept until the event is done
        self._staged: deque[tuple[Any, torch.Tensor]] = deque()
        #: False once CUDA has refused to register this host's shared memory
        self._can_register = True

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the GPU; the CPU memory may be overwritten after the return."""
        if host.nbytes > _MAX_STAGED_BYTES:
            return host.to(self._device)
        if self._upload_stream is None:
            self._upload_stream = self._cuda.Stream(self._device)
        while self._staged and self._staged[0][0].query():
            self._staged.popleft()
        with self._cuda.stream(self._upload_stream):
            staged = host.to(self._device, non_blocking=True)
        self._upload_stream.synchronize()
        value = clone(staged)
        copied = self._cuda.Event()
        copied.record()
        self._staged.append((copied, staged))
        return value

    def set_aside(self, values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any] | None:
        """Copy values on the GPU, so that kernels launched later may overwrite the originals.

        Returns:
            The copies and an event recorded after them; None if the GPU lacks the memory.
        """
        capacity = unused_bytes(self._device, self._cuda) * _DOWNLOAD_SHARE
        if sum(value.nbytes for value in values) > capacity:
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
        if self._download_stream is None:
            self._download_stream = self._cuda.Stream(self._device)
        self._download_stream.wait_event(event)
        with self._cuda.stream(self._download_stream):
            yield

    def finish(self) -> None:
        """Wait for the copies that this thread has begun.

        The wait is for an event: while another thread looks for synchronizing ops
        (``CudaGraphs.nobody_waits``), torch refuses all other waits of the process.
        """
        event = self._cuda.Event()
        event.record()
        event.synchronize()

    def register(self, arena: Arena) -> None:
        """Register an arena with CUDA (``cudaHostRegister``): the GPU accesses it directly."""
        arena.watch(self._register, self._unregister)

    def _register(self, memory: mmap.mmap) -> bool:
        """Register a new mapping with CUDA, which makes all its pages resident; return success."""
        if not self._can_register or len(memory) > memory_left() // _REGISTERED_SHARE:
            return False
        error = self._cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)
        if int(error) == 0:
            return True
        self._can_register = False  # copies from unregistered memory are slower
        clear_error(self._device)
        return False

    def _unregister(self, memory: mmap.mmap) -> None:
        self._cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
