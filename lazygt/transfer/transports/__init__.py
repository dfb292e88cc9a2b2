"""Transports of weights between processes: one file each, and the protocol of their ends.

    1. sender    `open`      reserve the request's place
    2. source    `view`      map the memory that blocks are copied to
    3. source    copies, casts and checksums the blocks, without the transport
    4. source    `deliver`   hand over the copies
    5. sender    `describe`  data for a receiver, beside the blocks and their checksums
    6. receiver  `fetch`     copy the blocks to the new version
    7. receiver  verifies the blocks, and answers
    8. sender    `is_free`   the place may be opened again

A transport is one file: the address of a request's memory (plain data, the file's `ADDRESS`), a
`Destination` of a device and an address (the file's `DESTINATION`), a sender's end, a receiver's
end, and two functions that make a `Sender` and a `Receiver` with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lazygt.runtime.arenas import Arena, tensor_over
from lazygt.transfer.control import ControlMessage
from lazygt.transfer.copy_request import CopyReply, Destination, transport_module
from lazygt.transfer.layout import Request, Route, full_bounds, packed, shape_of

if TYPE_CHECKING:
    from lazygt.transfer.layout import Bounds
    from lazygt.transfer.peers import ReceiverLink
    from lazygt.transfer.transaction import Transfer
    from lazygt.transfer.version import Block, StagedVersion

# -- receive buffers -------------------------------------------------------------------------------


class ReceiveBuffers:
    """Allocator of flat uint8 buffers on one device; freed host memory is reused.

    Newly mapped host memory takes twice as long to fill as reused memory. On a GPU torch's own
    allocator reuses memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arena: Arena | None = None

    def buffer(self, nbytes: int) -> Tensor:
        """Return a buffer of ``nbytes`` of uint8.

        Raises:
            MemoryError, torch.OutOfMemoryError: not enough memory is left.
        """
        if self.device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._arena is None:
            self._arena = Arena.create(max(nbytes, 1))
        slot = self._arena.allocate(nbytes)
        return tensor_over(self._arena, slot.offset, nbytes, self._free)

    def close(self) -> None:
        """Release the freed memory; tensors that live on keep theirs. Idempotent."""
        if self._arena is not None:
            arena, self._arena = self._arena, None
            arena.close()

    def _free(self, offset: int) -> None:
        arena = self._arena
        if arena is not None:
            arena.free(offset)


# -- the ends of sender and receiver ---------------------------------------------------------------

Wait = Callable[[float], None]


class SenderEnd:
    """Sender's end of a transport, in the process with the `Sender`; used by one thread.

    Attributes:
        strategy: name of the transport; receivers must request the same one.
        kind: name of its file.
        in_place: True if blocks are copied to their final place, in memory that all receivers
            share. False: each request is packed, for the receivers of one layout.
        unit: the space of a block in a request is rounded up to a multiple of so many bytes.
        device: target device of this process's copies, when the values are in this process.
        threshold: bytes of a request; 0: each chunk is one.
        number: number of the destinations in use; see `CopyRequest`.
    """

    strategy: ClassVar[str]
    kind: ClassVar[str]
    in_place: ClassVar[bool] = False
    unit: ClassVar[int] = 1
    device: torch.device = torch.device("cpu")
    threshold: int = 0
    number: int = 0

    def open_here(self, device: torch.device, place: Any) -> Destination:
        """Open a destination for values of this process."""
        destination: Destination = transport_module(self.kind).DESTINATION(device, place)
        return destination

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of the destinations in use."""
        return (self.number,)

    def begin(self, transfer: Transfer) -> None:
        """Get ready for a transfer."""

    def invitation(self, transfer: Transfer, receiver: ReceiverLink) -> ControlMessage:
        """Return the transport's fields of ``begin``."""
        return {}

    def expect(self, largest: int) -> None:
        """Prepare for requests of at most ``largest`` packed bytes in this transfer."""

    def is_free(self, rank: int) -> bool:
        """Return whether a rank can accept one more request now."""
        return True

    def open(self, transfer: Transfer, rank: int, number: int, request: Request) -> Any:
        """Reserve and return the place of a request."""
        raise NotImplementedError

    def describe(self, receiver: ReceiverLink, reply: CopyReply) -> ControlMessage:
        """Return the transport's description of a request for receivers."""
        return {}

    def lay_out(
        self, transfer: Transfer, pieces: Sequence[Route]
    ) -> list[tuple[int, tuple[int, ...], Bounds]]:
        """Return offset, shape and bounds for each block of a request; see `CopyItem`."""
        offsets, _ = packed(pieces)
        shapes = [shape_of(route.target) for route in pieces]
        return [
            (offset, shape, full_bounds(shape))
            for offset, shape in zip(offsets, shapes, strict=True)
        ]

    def held(self, last: int) -> int:
        """Return the number of the transfer that the place holds.

        Args:
            last: number of the transfer that the receivers hold.
        """
        return last

    def end(self, transfer: Transfer, *, idle: bool) -> None:
        """End a transfer; unless ``idle``, some rank may still be copying for it."""
        if not transfer.decided:
            self.forget()

    def forget(self) -> None:
        """Abandon all memory: another process may still use it, a receiver or a source."""

    def close(self) -> None:
        """Release all resources; called once."""
        self.forget()


class ReceiverEnd:
    """Receiver's end of a transport; used by one thread.

    Attributes:
        strategy: name of the transport, the same as the sender's.
        has_unchanged: True if skipped blocks are in the staging buffer already.
    """

    strategy: ClassVar[str]
    has_unchanged: ClassVar[bool] = False
    _address: str
    _wake: Callable[..., None]

    def attach(self, address: str, wake: Callable[..., None]) -> None:
        """Set the sender's address, and ``wake``, which ends a receiver's wait; called once."""
        self._address, self._wake = address, wake

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """Return a flat uint8 buffer of ``extent`` bytes for the new version.

        None if readers still hold its memory; called again after ``wake``.
        """
        raise NotImplementedError

    def coming(self, staged: StagedVersion, message: ControlMessage, wait: Wait) -> None:
        """Prepare for a request; may ``wait``, which raises when the transfer is aborted."""

    def fetch(
        self, staged: StagedVersion, message: ControlMessage, blocks: Sequence[Block], wait: Wait
    ) -> None:
        """Copy blocks to their parameters in the new version."""
        raise NotImplementedError

    def dropped(self) -> None:
        """Clean up after an aborted staged version."""

    def holds_memory(self) -> bool:
        """Return whether tensors of this process may lie in the sender's memory."""
        return False

    def close(self) -> None:
        """Release all resources; tensors that live on keep their memory. Called once."""
