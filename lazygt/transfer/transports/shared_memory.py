"""Shared memory: blocks are copied into a memfd that every receiver of the host maps.

Double buffering: there are two slots, each with the bytes of every layout of the receivers. Readers
use tensors in one while the other is filled, so a transfer is one copy for any number of receivers
with the same layout. A slot is faulted in once and reused, but overwritten only when no receiver
has a tensor there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.runtime.arenas import Arena, tensor_over
from lazygt.transfer.control import ControlMessage
from lazygt.transfer.layout import Bounds, ReceiverLayout, Request
from lazygt.transfer.manifest import ALIGNMENT, Manifest
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender, threshold_bytes
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transports.transport import ReceiverEnd, SenderEnd, View, Wait
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


def place_of(arena: Arena, offset: int, extent: int) -> SharedMemoryAddress:
    """Return the `SharedMemoryAddress` of a range of an arena, for other processes of this user."""
    return SharedMemoryAddress(os.getpid(), arena.fd, os.fstat(arena.fd).st_ino, offset, extent)


# -- the source ----------------------------------------------------------------------------


class SharedMemorySource:
    """Source's end: senders' slots, mapped in this process, by inode.

    Descriptor numbers are no keys: a later slot may reuse one.
    """

    def __init__(self, device: torch.device) -> None:
        self._arenas: dict[str, dict[int, tuple[Arena, Tensor]]] = {}

    def borrows(self, place: SharedMemoryAddress) -> torch.device | None:
        """Return None: all blocks are copied."""
        return None

    def buffer(self, sender: str, place: SharedMemoryAddress) -> View:
        """See `transport.SourceEnd`."""
        slots = self._arenas.setdefault(sender, {})
        if place.inode not in slots:
            arena = _attach(place)
            slots[place.inode] = arena, arena.view(place.offset, place.extent)
        _, flat = slots[place.inode]

        def view_at(offset: int, nbytes: int) -> Tensor:
            if not 0 <= offset <= offset + nbytes <= place.extent:
                raise ProtocolError(f"a slot of {place.extent} bytes has no {nbytes} at {offset}")
            return flat[offset : offset + nbytes]

        return view_at

    def deliver(
        self, sender: str, place: SharedMemoryAddress, runs: Sequence[Tensor]
    ) -> Sequence[Any]:
        """Return no handles: receivers map the same memory."""
        return ()

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """See `transport.SourceEnd`."""
        slots = self._arenas.get(sender, {})
        for expired in slots.keys() - set(live):
            arena, flat = slots.pop(expired)
            del flat
            arena.close()
        if not slots:
            self._arenas.pop(sender, None)

    def close(self) -> None:
        """See `transport.SourceEnd`."""
        for sender in list(self._arenas):
            self.let_go(sender, ())


def _attach(place: SharedMemoryAddress) -> Arena:
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
        place: the memory, for the source processes that copy into it.
        known_to: receivers that have the slot's descriptor.
        transfer: number of the committed transfer in the slot; 0: none.
    """

    def __init__(self, number: int, extent: int) -> None:
        self.number, self.extent = number, extent
        nbytes = max(extent, ALIGNMENT)
        self.arena = Arena.create(nbytes)
        self.offset = self.arena.allocate(nbytes).offset
        self.flat = self.arena.view(self.offset, nbytes)
        self.place = place_of(self.arena, self.offset, nbytes)
        self.known_to: set[ReceiverLink] = set()
        self.transfer = 0

    def close(self) -> None:
        """Release the memory; the kernel frees it once the last receiver has released it."""
        del self.flat
        self.arena.close()


class SharedMemory(SenderEnd):
    """Sender's end: two slots.

    Attributes:
        slots: the existing slots.
        target: the slot that is being filled.
    """

    strategy, kind = STRATEGY, "shared_memory"
    in_place = True

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.slots: list[VersionSlot] = []
        self.target: VersionSlot | None = None
        self._current: VersionSlot | None = None
        self._slot_count = 0
        self._transfer: Transfer | None = None

    def source_end(self) -> SharedMemorySource:
        """See `SenderEnd`."""
        return SharedMemorySource(self.device)

    @property
    def live(self) -> tuple[int, ...]:
        """Inodes of the slots."""
        return tuple(slot.place.inode for slot in self.slots)

    def begin(self, transfer: Transfer) -> None:
        """See `SenderEnd`."""
        extent = transfer.layouts.extent
        if any(slot.extent != extent for slot in self.slots):
            self.forget()
        self.target = next((slot for slot in self.slots if slot is not self._current), None)
        if self.target is None:
            self._slot_count += 1
            self.target = VersionSlot(self._slot_count, extent)
            self.slots.append(self.target)
        for slot in self.slots:
            slot.known_to &= set(transfer.receivers)
        self._transfer = transfer

    def invitation(self, receiver: ReceiverLink) -> tuple[ControlMessage, Sequence[int]]:
        """See `SenderEnd`."""
        slot, transfer = self._open_transfer()
        fds = () if receiver in slot.known_to else (slot.arena.fd,)
        slot.known_to.add(receiver)
        layouts = transfer.layouts
        offset = slot.offset + layouts.bases[layouts.of[receiver]]
        live = [existing.number for existing in self.slots]
        return {"slot": slot.number, "offset": offset, "slots": live, "new": bool(fds)}, fds

    def open(self, rank: int, number: int, request: Request) -> SharedMemoryAddress:
        """See `SenderEnd`."""
        return self._open_transfer()[0].place

    def lay_out(self, request: Request) -> list[tuple[int, tuple[int, ...], Bounds]]:
        """See `SenderEnd`."""
        layouts = self._open_transfer()[1].layouts
        destinations = []
        for route in request:
            manifest = layouts.manifests[route.layout]
            base = layouts.bases[route.layout]
            shape = manifest.params[route.param].shape
            destinations.append((base + manifest.places[route.param], shape, route.target))
        return destinations

    def held(self, last: int) -> int:
        """See `SenderEnd`."""
        return self._open_transfer()[0].transfer

    def end(self, *, committed: bool, idle: bool) -> None:
        """See `SenderEnd`."""
        slot, transfer = self.target, self._transfer
        self.target = self._transfer = None
        if slot is None or transfer is None:
            return
        slot.transfer = transfer.number if committed else 0
        if committed:
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

    def close(self) -> None:
        """See `SenderEnd`."""
        self.forget()

    def _open_transfer(self) -> tuple[VersionSlot, Transfer]:
        """Return the target slot and the running transfer."""
        assert self.target is not None
        assert self._transfer is not None
        return self.target, self._transfer


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

    def invited(self, begin: ControlMessage, take_fd: Callable[[], int]) -> None:
        """See `ReceiverEnd`."""
        if begin["new"]:
            self._slots[begin["slot"]] = Arena.attach(take_fd())
        for expired in self._slots.keys() - set(begin["slots"]):
            self._slots.pop(expired).close()  # the last tensor in the slot ends its mapping

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        number = begin["slot"]
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
    address: str,
    *,
    name: str | None = None,
    expect: Manifest | None = None,
    mesh: Mapping[str, int] | str | None = None,
    rank: int = 0,
    placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
) -> Receiver:
    """Make a receiver for a `SharedMemoryTransferSender` on the same host; see `Receiver`.

    Do not write to the parameters: their memory is shared with the other receivers.

    Args:
        mesh, rank, placements: layout of this receiver's blocks; see `Receiver`.
    """
    layout = ReceiverLayout.from_arguments(mesh, rank, placements)
    return Receiver(address, MappedSlots(), name=name, expect=expect, layout=layout)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, SOURCE = SharedMemoryAddress, SharedMemorySource
