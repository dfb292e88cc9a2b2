"""Shared memory: blocks are copied into a memfd that every receiver of the host maps.

Double buffering: there are two slots, each with the bytes of every layout of the receivers. Readers
use tensors in one while the other is filled, so a transfer is one copy for any number of receivers
with the same layout. A slot is faulted in once and reused, but overwritten only when no receiver
has a tensor there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.runtime.arenas import Arena, tensor_over
from lazygt.transfer.control import ControlMessage
from lazygt.transfer.layout import Bounds, Request, Route
from lazygt.transfer.manifest import ALIGNMENT
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.receiver import Receiver, ReceiverOptions
from lazygt.transfer.sender import Sender, threshold_bytes
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transports import ReceiverEnd, SenderEnd, Wait
from lazygt.transfer.version import Block, StagedVersion

STRATEGY = "shared-memory"


class SharedMemoryAddress(NamedTuple):
    """Shared memory: descriptor ``fd`` of process ``pid``, valid while it has this inode.

    Attributes:
        offset, extent: range of the memory for blocks, in bytes.
    """

    pid: int
    fd: int
    inode: int
    offset: int
    extent: int

    @property
    def number(self) -> int:
        """Number of the memory: a later slot may reuse a descriptor, but no inode."""
        return self.inode


def place_of(arena: Arena, offset: int, extent: int) -> SharedMemoryAddress:
    """Return the `SharedMemoryAddress` of a range of an arena, for other processes of this user."""
    return SharedMemoryAddress(os.getpid(), arena.fd, os.fstat(arena.fd).st_ino, offset, extent)


# -- the source ----------------------------------------------------------------------------


class SlotMemory:
    """`Destination` in a slot of a sender, mapped in this process."""

    borrows = None

    def __init__(self, device: torch.device, place: SharedMemoryAddress) -> None:
        self._arena = attach(place)
        self._flat = self._arena.view(place.offset, place.extent)

    def view(self, place: SharedMemoryAddress, offset: int, nbytes: int) -> Tensor:
        """See `Destination`."""
        if not 0 <= offset <= offset + nbytes <= place.extent:
            raise ProtocolError(f"a slot of {place.extent} bytes has no {nbytes} at {offset}")
        return self._flat[offset : offset + nbytes]

    def deliver(self, place: SharedMemoryAddress, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Return no handles: receivers map the same memory."""
        return ()

    def close(self) -> None:
        """See `Destination`."""
        del self._flat
        self._arena.close()


def attach(place: SharedMemoryAddress) -> Arena:
    """Map the memory of a place, after a check that the descriptor was not reused."""
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != place.inode:
        os.close(fd)
        raise ProtocolError("the sender has given this memory up; its transfer has failed")
    return Arena.attach(fd)


# -- the sender ----------------------------------------------------------------------------


class VersionSlot:
    """Memory of one version, in the sender.

    Attributes:
        place: the memory, for the processes that map it.
        transfer: number of the committed transfer in the slot; 0: none.
    """

    def __init__(self, extent: int) -> None:
        self.extent = extent
        nbytes = max(extent, ALIGNMENT)
        self.arena = Arena.create(nbytes)
        self.place = place_of(self.arena, self.arena.allocate(nbytes).offset, nbytes)
        self.flat = self.arena.view(self.place.offset, nbytes)
        self.transfer = 0

    def close(self) -> None:
        """Release the memory; the kernel frees it once the last receiver has released it."""
        del self.flat
        self.arena.close()


class SharedMemory(SenderEnd):
    """Sender's end: two slots.

    Attributes:
        slots: the existing slots.
        target: the slot that is being filled, from `begin` to `end`.
    """

    strategy, kind = STRATEGY, "shared_memory"
    in_place = True

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.slots: list[VersionSlot] = []
        self.target: VersionSlot | None = None
        self._current: VersionSlot | None = None

    @property
    def live(self) -> tuple[int, ...]:
        """Inodes of the slots."""
        return tuple(slot.place.number for slot in self.slots)

    def begin(self, transfer: Transfer) -> None:
        """See `SenderEnd`."""
        extent = transfer.layouts.extent
        if any(slot.extent != extent for slot in self.slots):
            self.forget()
        self.target = next((slot for slot in self.slots if slot is not self._current), None)
        if self.target is None:
            self.target = VersionSlot(extent)
            self.slots.append(self.target)

    def invitation(self, transfer: Transfer, receiver: ReceiverLink) -> ControlMessage:
        """See `SenderEnd`."""
        slot, layouts = self._slot, transfer.layouts
        offset = slot.place.offset + layouts.bases[layouts.of[receiver]]
        return {"slot": slot.place, "offset": offset, "slots": self.live}

    def open(
        self, transfer: Transfer, rank: int, number: int, request: Request
    ) -> SharedMemoryAddress:
        """See `SenderEnd`."""
        return self._slot.place

    def lay_out(
        self, transfer: Transfer, pieces: Sequence[Route]
    ) -> list[tuple[int, tuple[int, ...], Bounds]]:
        """See `SenderEnd`."""
        layouts = transfer.layouts
        destinations = []
        for piece in pieces:
            manifest, base = layouts.manifests[piece.layout], layouts.bases[piece.layout]
            shape = manifest.params[piece.param].shape
            destinations.append((base + manifest.places[piece.param], shape, piece.target))
        return destinations

    def held(self, last: int) -> int:
        """See `SenderEnd`."""
        return self._slot.transfer

    def end(self, transfer: Transfer, *, idle: bool) -> None:
        """See `SenderEnd`."""
        slot, self.target = self.target, None
        if slot is None:
            return
        slot.transfer = transfer.number if transfer.decided else 0
        if transfer.decided:
            self._current = slot
        if not idle:
            # a rank may still write into the slot, so the slot is abandoned
            self.slots.remove(slot)
            slot.close()

    def forget(self) -> None:
        """See `SenderEnd`."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self._current = None

    @property
    def _slot(self) -> VersionSlot:
        """The target of the running transfer."""
        assert self.target is not None
        return self.target


def SharedMemoryTransferSender(  # noqa: N802 - named like a class
    *, threshold_gb: float = 1 / 16, verify: str = "crc32", skip_unchanged: bool = False
) -> Sender:
    """Make a sender to receivers on the same host, without GPUs: one copy, mapped by all.

    Needs twice the model's bytes on the host (not per receiver), and no other memory.

    Args:
        threshold_gb: GiB of a request; receivers check one while the next is being copied.
        verify, skip_unchanged: see `Sender`.
    """
    end = SharedMemory(threshold_bytes(threshold_gb))
    return Sender(end, verify=verify, skip_unchanged=skip_unchanged)


# -- the receiver --------------------------------------------------------------------------


class MappedSlots(ReceiverEnd):
    """Receiver's end: the sender's slots, mapped."""

    strategy = STRATEGY
    has_unchanged = True

    def __init__(self) -> None:
        self._slots: dict[int, Arena] = {}
        self._in_use: set[int] = set()
        self._released: deque[int] = deque()

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        place = SharedMemoryAddress(*begin["slot"])
        number = place.number
        for expired in self._slots.keys() - set(begin["slots"]):
            self._slots.pop(expired).close()  # the last tensor in the slot ends its mapping
        if number not in self._slots:
            self._slots[number] = attach(place)
        self._collect_released()
        if number in self._in_use:
            return None
        self._in_use.add(number)
        release = partial(_release, self._released, number, self._wake)
        return tensor_over(self._slots[number], begin["offset"], extent, release)

    def fetch(
        self, staged: StagedVersion, message: ControlMessage, blocks: Sequence[Block], wait: Wait
    ) -> None:
        """Do nothing: the blocks are in place."""

    def holds_memory(self) -> bool:
        """See `ReceiverEnd`."""
        self._collect_released()
        return bool(self._in_use)

    def close(self) -> None:
        """See `ReceiverEnd`."""
        while self._slots:
            self._slots.popitem()[1].close()

    def _collect_released(self) -> None:
        """Mark the slots whose last tensor has died as free."""
        while self._released:
            self._in_use.discard(self._released.popleft())


def _release(released: deque[int], number: int, wake: Callable[..., None], offset: int) -> None:
    """Note that a slot's last tensor has died; runs in any thread, maybe in a finalizer."""
    released.append(number)
    wake()


def SharedMemoryTransferReceiver(  # noqa: N802 - named like a class
    address: str, **options: Unpack[ReceiverOptions]
) -> Receiver:
    """Make a receiver for a `SharedMemoryTransferSender` on the same host; see `Receiver`.

    Do not write to the parameters: their memory is shared with the other receivers.

    Args:
        options: name, expect, mesh, rank and placements; see `Receiver`.
    """
    return Receiver(address, MappedSlots(), **options)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, DESTINATION = SharedMemoryAddress, SlotMemory
