"""The three ends of a transport, and the life of one request.

    1. sender    `open`      reserve the place that it goes to
    2. source    `buffer`    the memory that blocks are copied to
    3. source    copies, casts and sums them; it needs no transport for that
    4. source    `deliver`   hand over what was copied
    5. sender    `describe`  what a receiver must know of it, beside the blocks and their checksums
    6. receiver  `fetch`     bring the blocks to where they belong
    7. receiver  verifies them, and says so
    8. sender    `is_free`   the place may be opened again

A transport is one file: a `Place` (plain data), a `SourceEnd` with the device as its argument, a
sender's end, a receiver's end, and two functions that make a `Sender` and a `Receiver` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from lazygt.transfer.connection import Message
from lazygt.transfer.copy_request import CopyReply
from lazygt.transfer.layout import Request, packed, shape_of, whole

if TYPE_CHECKING:
    from lazygt.transfer.layout import Bounds
    from lazygt.transfer.peers import ReceiverLink, Receivers
    from lazygt.transfer.transaction import Transfer
    from lazygt.transfer.version import Block, StagedVersion

View = Callable[[int, int], Tensor]
Wait = Callable[[float], None]


class SourceEnd(Protocol):
    """In a process that has blocks."""

    def borrows(self, place: Any) -> torch.device | None:
        """`deliver` takes a value's own memory where it can travel as it is.

        That is on this device, contiguous, without a cast. None: everything is copied.
        """

    def buffer(self, sender: str, place: Any) -> View:
        """Return the function from (offset, bytes) of a place to flat uint8.

        Raises:
            ProtocolError, OSError: the place is not there.
        """

    def deliver(self, sender: str, place: Any, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Hand over what was copied; handles, where the place has such.

        Args:
            runs: the bytes of each block.

        Raises:
            TransferError: the receivers did not take it.
        """

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """Drop what belongs to other numbers of this sender."""

    def close(self) -> None:
        """Drop all."""


class SenderEnd:
    """In the process that decides; used by one thread.

    Attributes:
        strategy: the name by which receivers ask for it.
        kind: the file that it stands in.
        in_place: blocks go to where they belong in memory that all receivers share. Else a request
            is packed by itself, for the receivers of one layout.
        unit: what a block takes in a request is a multiple of so many bytes.
        device: where this process copies to, when it has the values itself.
        threshold: bytes of a request; 0: each chunk is one.
    """

    strategy: ClassVar[str]
    kind: ClassVar[str]
    in_place: ClassVar[bool] = False
    unit: ClassVar[int] = 1
    device: torch.device = torch.device("cpu")
    threshold: int = 0
    _receivers: Receivers

    def attach(self, receivers: Receivers) -> None:
        """The receivers that there are; called once."""
        self._receivers = receivers

    def source_end(self) -> SourceEnd:
        """The source's end for values of this process."""
        raise NotImplementedError

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers in use of this sender; see `CopyRequest`."""
        raise NotImplementedError

    def begin(self, transfer: Transfer) -> None:
        """Get ready for a transfer."""
        raise NotImplementedError

    def invitation(self, receiver: ReceiverLink) -> tuple[Message, Sequence[int]]:
        """Return the transport's part of ``begin``, and file descriptors to go with it."""
        raise NotImplementedError

    def expect(self, largest: int) -> None:
        """No request of this transfer will be bigger than so many packed bytes."""

    def is_free(self, rank: int) -> bool:
        """Return whether a rank may be given one more request now."""
        return True

    def open(self, rank: int, number: int, request: Request) -> Any:
        """The place for a request."""
        raise NotImplementedError

    def describe(self, receiver: ReceiverLink, reply: CopyReply) -> Message:
        """Return the transport's description of a request for receivers."""
        return {}

    def lay_out(self, request: Request) -> list[tuple[int, tuple[int, ...], Bounds]]:
        """Offset, shape and bounds for each block of a request; see `CopyItem`."""
        offsets, _ = packed(request)
        shapes = [shape_of(route.target) for route in request]
        return [
            (offset, shape, whole(shape)) for offset, shape in zip(offsets, shapes, strict=True)
        ]

    def held(self, last: int) -> int:
        """Number of the transfer whose bytes are in the place; ``last``: that receivers have."""
        return last

    def end(self, *, committed: bool, idle: bool) -> None:
        """A transfer is over; unless ``idle``, some rank may still be copying for it."""

    def forget(self) -> None:
        """A receiver that was dropped may be alive: touch no memory that it can see."""

    def close(self) -> None:
        """Give back what there is; called once."""


class ReceiverEnd:
    """In a process that receives; used by one thread.

    Attributes:
        strategy: that of the sender's end.
        has_unchanged: blocks that did not travel are where they belong all the same.
    """

    strategy: ClassVar[str]
    has_unchanged: ClassVar[bool] = False
    _address: str
    _wake: Callable[..., None]

    def attach(self, address: str, wake: Callable[..., None]) -> None:
        """The sender's address, and what ends this receiver's wait; called once."""
        self._address, self._wake = address, wake

    def invited(self, begin: Message, take_fd: Callable[[], int]) -> None:
        """Take what came with ``begin``, whatever becomes of the transfer."""

    def stage(self, begin: Message, extent: int) -> Tensor | None:
        """A flat uint8 buffer of ``extent`` bytes for the new version.

        None when its memory is still held by readers; it is asked again after ``wake``.
        """
        raise NotImplementedError

    def coming(self, staged: StagedVersion, message: Message, wait: Wait) -> None:
        """A request is on its way; may ``wait`` some seconds, which ends when it is given up."""

    def fetch(
        self, staged: StagedVersion, message: Message, blocks: Sequence[Block], wait: Wait
    ) -> None:
        """Bring blocks to where they belong."""
        raise NotImplementedError

    def dropped(self) -> None:
        """The version on its way in was given up, or the sender has gone."""

    def holds_memory(self) -> bool:
        """True if tensors of this process may lie in the sender's memory."""
        return False

    def close(self) -> None:
        """Give back what there is; tensors that live on keep theirs. Called once."""
