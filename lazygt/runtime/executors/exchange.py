"""Exchange of values: uploads into a worker's store, and fetches out of it to the client."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazygt.errors import ProtocolError, kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.host.processes import memory_left
from lazygt.runtime import wire
from lazygt.runtime.executors.kernels import clear_error, clone
from lazygt.runtime.messages import Done, Failure, Fetched, Put
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.wire import Buffer

if TYPE_CHECKING:
    from lazygt.runtime.arenas import Arena

# -- copies between a GPU and the host, by way of arenas that the GPU accesses directly ------------

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

    def copy_on_device(
        self, values: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any] | None:
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
    def download_stream(self, event: Any) -> Iterator[None]:
        """Context in which this thread copies to the host on a stream for that, after an event."""
        if self._download_stream is None:
            self._download_stream = self._cuda.Stream(self._device)
        self._download_stream.wait_event(event)
        with self._cuda.stream(self._download_stream):
            yield

    def synchronize(self) -> None:
        """Wait for the copies that this thread has begun.

        The wait is for an event: while another thread looks for synchronizing ops
        (``CudaGraphs.forbid_synchronization``), torch refuses all other waits of the process.
        """
        event = self._cuda.Event()
        event.record()
        event.synchronize()

    def register(self, arena: Arena) -> None:
        """Register an arena's mappings with CUDA as they are made: the GPU accesses them directly.

        See ``cudaHostRegister``.
        """
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


# -- exchange of values: uploads into a worker's store, and fetches out of it to the client --------

#: Largest size of an answer without its values: metas and other fields.
_OVERHEAD_BYTES = 64 << 10


class Exchange:
    """Receiver of uploads and sender of fetches: small ones in buffers, large ones in arenas.

    Args:
        copies: copies to and from the GPU; None: values stay in host memory.
        upload, fetch, shm_threshold: see ``Worker``.
        max_message: bytes of the longest answer; a larger value needs shared memory.
    """

    def __init__(
        self,
        store: Store,
        copies: HostCopies | None,
        upload: Arena | None,
        fetch: Arena | None,
        shm_threshold: int,
        max_message: int = sys.maxsize,
    ) -> None:
        self._store, self._copies = store, copies
        self._max_inline_bytes = max_message - _OVERHEAD_BYTES
        self._upload, self._fetch, self._shm_threshold = upload, fetch, shm_threshold

    def receive(self, put: Put, buffers: Iterator[Buffer], done: Done) -> None:
        """Store an uploaded value.

        Args:
            buffers: the message's remaining buffers; a value that is not in the arena takes one.
            done: the answer; an arena slot that is free again is added to its releases.

        Raises:
            ProtocolError: the meta is no dense tensor's, or its bytes are missing.
        """
        meta = put.meta
        borrowed = put.offset  # the slot that stays in use as the value's memory, if any
        if meta.offset or meta.extent != meta.numel:
            raise ProtocolError(f"the memory of a tensor that is sent has gaps: {meta}")
        nbytes = meta.nbytes
        if put.offset is not None:
            if self._upload is None:
                raise ProtocolError("a tensor in shared memory, but there is none")
            flat = self._upload.view(put.offset, nbytes)
        else:
            data = next(buffers, None)
            if data is None or len(data) != nbytes:
                raise ProtocolError(f"a tensor of {nbytes} bytes came without its bytes")
            flat = wire.received(data)
        try:
            value = _with_meta(flat, meta)
        except RuntimeError as error:
            raise ProtocolError(f"there is no such tensor as {meta}: {error}") from error
        if self._copies is not None:
            value = self._copies.to_device(value)
            if put.offset is not None:  # copied, so its slot is free again
                done.releases.append(put.offset)
                borrowed = None
        self._store.put(put.id, value, borrowed)

    def fetched(self, fetches: Sequence[int], done: Done) -> list[Buffer]:
        """Add fetched values, or their failures, to ``done``; return the values' buffers.

        Args:
            fetches: ids of the values.
        """
        replies: list[Buffer] = []
        for key in fetches:
            try:
                done.fetched.append(self.send(self._store.get(key), replies))
            except Exception as error:  # noqa: BLE001 - reported to the client
                done.fetched.append(Failure(-1, kind_of(error), str(error), done.seq))
        return replies

    def free(self, offset: int) -> None:
        """Free the arena slot of a fetched value that the client has read."""
        try:
            if self._fetch is not None:
                self._fetch.free(offset)
        except ValueError as error:
            raise ProtocolError(f"what was not fetched can't be released: {error}") from error

    def send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        """Return a value's description; add its bytes to ``buffers``, or put them in the arena."""
        if isinstance(value, Failed):
            return value.failure
        meta = TensorMeta.of(value)
        if meta.numel == 1 and meta.plain and meta.dtype in wire.NUMBERS:
            buffers.append(wire.NUMBERS[meta.dtype].pack(value.item()))
            return Fetched(meta)
        if value._is_zerotensor():
            value = torch.zeros_like(value)
        plain = value.detach().resolve_conj().resolve_neg()
        meta = TensorMeta.of(plain)
        if meta.offset or meta.extent != meta.numel:
            plain = plain.clone(memory_format=torch.contiguous_format)
            meta = TensorMeta.of(plain)
        data = _bytes_of(plain, meta)
        if self._fetch is not None and data.numel() >= self._shm_threshold:
            slot = self._fetch.put(data)
            return Fetched(meta, slot.offset)
        if sum(map(len, buffers)) + data.numel() > self._max_inline_bytes:
            raise ValueError(
                f"a value of {data.numel():,} bytes does not fit into an answer from another host, "
                f"which has {max(self._max_inline_bytes, 0):,} bytes at most: fetch parts of it, "
                f"or raise lazygt.session(workers=Workers(max_message_bytes=...))"
            )
        buffers.append(data.cpu().numpy().data)
        return Fetched(meta)


def _bytes_of(plain: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order, as bytes; nothing is copied."""
    if meta.numel == 0:
        return torch.empty(0, dtype=torch.uint8)
    return plain.as_strided((meta.numel,), (1,)).view(torch.uint8)


def _with_meta(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the tensor of this meta over flat bytes."""
    if meta.numel == 0:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return flat.view(meta.dtype).as_strided(meta.shape, meta.stride)
