"""CUDA IPC: blocks are packed into buffers that receivers on the same GPU map.

A batch of blocks is one request, and handles are exported once for each receiver and buffer, not
for each block or transfer. Double buffering: each source process has two buffers, and receivers
copy out of one while the other is being packed; a buffer is packed again only when every receiver
has copied its content. A receiver gets the handles with its first request
from that process.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.runtime.arenas import Arena
from lazygt.transfer.control import ControlMessage
from lazygt.transfer.copy_request import CopyReply
from lazygt.transfer.layout import Request, packed
from lazygt.transfer.manifest import ALIGNMENT
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.receiver import Receiver, ReceiverOptions
from lazygt.transfer.sender import Sender, threshold_bytes
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports import ReceiveBuffers, ReceiverEnd, SenderEnd, Wait
from lazygt.transfer.transports.shared_memory import SharedMemoryAddress, attach, place_of
from lazygt.transfer.version import Block, StagedVersion

# -- devices with memory that other processes can map ----------------------------------------------

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
        gpu_index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", gpu_index)

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
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return tensor.set_(storage, 0, (storage.nbytes(),), (1,))

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()


@contextlib.contextmanager
def plain_segments() -> Iterator[None]:
    """Allocation without expandable segments inside the block.

    Another process would map expandable segments by ``pidfd_getfd``, which yama's
    ``ptrace_scope=1`` refuses between siblings. A comment of the allocator recommends this switch
    (``get_free_block`` of c10/cuda/CUDACachingAllocator.cpp), which sets all settings at once.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    plain = _EXPANDABLE.sub(r"\1False", settings)
    if plain == settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(plain)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


class HostDevice:
    """Host memory, mapped by a descriptor: for workers and receivers without a GPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        #: address of each live buffer -> its arena, and its offset there
        self._arenas_by_address: dict[int, tuple[Arena, int]] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a flat uint8 buffer."""
        arena = Arena.create(nbytes)
        return self._buffer_in(arena, arena.allocate(nbytes).offset, nbytes)

    def export(self, buffer: Tensor) -> list[Any]:
        """Return the buffer's `SharedMemoryAddress`.

        Raises:
            ValueError: the buffer is not of this device.
        """
        if buffer.data_ptr() not in self._arenas_by_address:
            raise ValueError("a buffer of another device")
        arena, offset = self._arenas_by_address[buffer.data_ptr()]
        return list(place_of(arena, offset, buffer.numel()))

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of another process of this user.

        Raises:
            OSError, ProtocolError: that process, or its buffer, does not exist any more.
        """
        place = SharedMemoryAddress(*handle)
        return self._buffer_in(attach(place), place.offset, place.extent)

    def synchronize(self) -> None:
        """Do nothing: host memory has no queue."""

    def _buffer_in(self, arena: Arena, offset: int, nbytes: int) -> Tensor:
        """Return a buffer in an arena that is closed when the buffer is freed."""
        buffer = arena.view(offset, nbytes)
        self._arenas_by_address[buffer.data_ptr()] = arena, offset
        weakref.finalize(buffer, self._close_arena, buffer.data_ptr())
        return buffer

    def _close_arena(self, address: int) -> None:
        self._arenas_by_address.pop(address)[0].close()


def shared_device(device: torch.device) -> SharedDevice:
    """Return the shareable device for buffers of a process on ``device``."""
    if device.type != "cuda":
        return HostDevice()
    return CudaDevice(device.index)


# -- the transport ---------------------------------------------------------------------------------

STRATEGY = "cuda-ipc"
THRESHOLD_VARIABLE = "weight_transfer_threshold_cuda_ipc_GB"
BUFFERS = 2
_DEFAULT_THRESHOLD_GB = 1.0


def threshold_setting(threshold_gb: float | None) -> int:
    """Return the threshold in bytes: the argument, else the environment's, else 1 GiB.

    Raises:
        ValueError: see `threshold_bytes`.
    """
    if threshold_gb is not None:
        return threshold_bytes(threshold_gb)
    setting = os.environ.get(THRESHOLD_VARIABLE, _DEFAULT_THRESHOLD_GB)
    return threshold_bytes(setting, THRESHOLD_VARIABLE)


class CudaIpcAddress(NamedTuple):
    """Buffer on the source's device, mapped by receivers through a handle.

    Attributes:
        number: number of the set of buffers.
        buffers, extent: number of buffers in the set, and the bytes of each.
        which: index of the buffer to pack.
        exports: number of receivers that need handles of all buffers of the set.
    """

    number: int
    buffers: int
    extent: int
    which: int
    exports: int


# -- the source ----------------------------------------------------------------------------


class PackingBuffers:
    """`Destination` in buffers of this process, which receivers map.

    Args:
        device: device of the values and the buffers.
        shared: the same device for sharing; None: made from ``device``.
    """

    borrows = None

    def __init__(
        self, device: torch.device, place: CudaIpcAddress, shared: SharedDevice | None = None
    ) -> None:
        self._device = shared_device(device) if shared is None else shared
        self._buffers = [self._device.allocate(place.extent) for _ in range(place.buffers)]

    def view(self, place: CudaIpcAddress, offset: int, nbytes: int) -> Tensor:
        """See `Destination`."""
        if not 0 <= place.which < len(self._buffers):
            raise ProtocolError(f"there is no buffer {place.which}")
        return self._buffers[place.which][offset : offset + nbytes]

    def deliver(self, place: CudaIpcAddress, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Return the handles of all buffers, exported for each new receiver."""
        self._device.synchronize()  # receivers copy at the announcement
        device = self._device
        return [[device.export(buffer) for buffer in self._buffers] for _ in range(place.exports)]

    def close(self) -> None:
        """See `Destination`."""
        self._buffers.clear()


# -- the sender ----------------------------------------------------------------------------


class BufferLeases(SenderEnd):
    """Sender's end: leases of the source ranks' buffers to receivers.

    Attributes:
        extent: bytes of each buffer.
        known: receivers with handles, by rank of the source.
    """

    strategy, kind = STRATEGY, "cuda_ipc"
    unit = ALIGNMENT

    def __init__(self, threshold: int, shared: SharedDevice) -> None:
        self.threshold, self._shared, self.device = threshold, shared, shared.device
        self.extent = 0
        self.known: dict[int, set[ReceiverLink]] = {}
        self._packed_count: Counter[int] = Counter()
        #: (rank, buffer) -> its readers, each with the count of requests staged after reading it
        self._readers: dict[tuple[int, int], dict[ReceiverLink, int]] = {}
        #: number of a request -> the buffer, and the receivers that get handles with it
        self._leases: dict[int, tuple[int, list[ReceiverLink]]] = {}

    def open_here(self, device: torch.device, place: CudaIpcAddress) -> PackingBuffers:
        """See `SenderEnd`."""
        return PackingBuffers(device, place, self._shared)

    def begin(self, transfer: Transfer) -> None:
        """See `SenderEnd`."""
        self._packed_count.clear()
        self._readers.clear()
        self._leases.clear()

    def expect(self, largest: int) -> None:
        """Begin a new set of buffers if the present ones have less than ``largest`` bytes."""
        if largest > self.extent:
            self.number, self.extent, self.known = self.number + 1, largest, {}

    def is_free(self, rank: int) -> bool:
        """Return whether all receivers have copied the content of the next buffer."""
        readers = self._readers.get((rank, self._packed_count[rank] % BUFFERS), {})
        return all(receiver.staged >= count for receiver, count in readers.items())

    def open(self, transfer: Transfer, rank: int, number: int, request: Request) -> CudaIpcAddress:
        """See `SenderEnd`."""
        if packed(request)[1] > self.extent:
            repeated = next(piece for piece, count in Counter(request).items() if count > 1)
            name = transfer.manifest.params[repeated.param].name
            raise TransferError(f"the extractor yielded {name} twice; mend the extractor")
        which = self._packed_count[rank] % BUFFERS
        self._packed_count[rank] += 1
        self._readers[rank, which] = {}
        with_handles = self.known.setdefault(rank, set())
        receivers = transfer.holders(request[0].layout)
        new = [receiver for receiver in receivers if receiver not in with_handles]
        with_handles.update(new)
        self._leases[number] = which, new
        return CudaIpcAddress(self.number, BUFFERS, self.extent, which, len(new))

    def describe(self, receiver: ReceiverLink, reply: CopyReply) -> ControlMessage:
        """See `SenderEnd`."""
        which, new = self._leases[reply.number]
        self._readers[reply.rank, which][receiver] = receiver.sent
        handles = reply.handles[new.index(receiver)] if receiver in new else ()
        return {"from": reply.rank, "which": which, "handles": handles}

    def forget(self) -> None:
        """See `SenderEnd`: the next transfer uses a new set of buffers."""
        self.extent = 0

    def close(self) -> None:
        """See `SenderEnd`."""
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def CudaIpcTransferSender(  # noqa: N802 - named like a class
    *,
    threshold_gb: float | None = None,
    device: SharedDevice | None = None,
    verify: str = "xor64",
    skip_unchanged: bool = False,
) -> Sender:
    """Make a sender to receivers on the same GPU: packed buffers, one request a batch.

    Needs two buffers of the threshold's size (or the model's, if that is smaller) on the GPU.

    Args:
        threshold_gb: GiB gathered before a request is sent; by default the environment's
            ``weight_transfer_threshold_cuda_ipc_GB``, else 1. 0: each chunk is a request.
        device: device of the buffers; by default torch's current GPU.
        verify: xor64 is computed on the GPU; crc32 brings every byte to the host.
        skip_unchanged: see `Sender`.
    """
    threshold = threshold_setting(threshold_gb)
    end = BufferLeases(threshold, device if device is not None else CudaDevice())
    return Sender(end, verify=verify, skip_unchanged=skip_unchanged)


# -- the receiver --------------------------------------------------------------------------


class LeasedBuffers(ReceiverEnd):
    """Receiver's end: leased buffers, copied to the receiver's own memory."""

    strategy = STRATEGY

    def __init__(self, device: SharedDevice) -> None:
        self._device = device
        self._memory = ReceiveBuffers(device.device)
        self._buffers: dict[int, list[Tensor]] = {}

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        return self._memory.buffer(extent)

    def fetch(
        self, staged: StagedVersion, message: ControlMessage, blocks: Sequence[Block], wait: Wait
    ) -> None:
        """See `ReceiverEnd`."""
        rank, which, handles = message["from"], message["which"], message["handles"]
        if handles:
            self._buffers.pop(rank, None)
            self._buffers[rank] = [self._device.open(handle) for handle in handles]
        if not 0 <= which < len(self._buffers.get(rank, ())):
            raise ProtocolError(f"a request in unknown buffer {which} of worker {rank}")
        staged.unpack(self._buffers[rank][which], blocks, message["offsets"])
        self._device.synchronize()  # the buffer is packed again after the answer

    def close(self) -> None:
        """See `ReceiverEnd`."""
        self._buffers.clear()
        self._memory.close()


def CudaIpcTransferReceiver(  # noqa: N802 - named like a class
    address: str, *, device: SharedDevice | None = None, **options: Unpack[ReceiverOptions]
) -> Receiver:
    """Make a receiver for a `CudaIpcTransferSender` on the same GPU; see `Receiver`.

    Args:
        device: see `CudaDevice`.
        options: name, expect, mesh, rank and placements; see `Receiver`.
    """
    return Receiver(address, LeasedBuffers(device or CudaDevice()), **options)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, DESTINATION = CudaIpcAddress, PackingBuffers
