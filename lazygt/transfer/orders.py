"""Orders: what a process that holds blocks is to do for a transfer, and its answer. Plain data.

A block goes to a *place*: memory that the receivers map, a buffer that is broadcast to them, or a
buffer that is lent to them by a handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lazygt.errors import ProtocolError
from lazygt.transfer.routes import Bounds


class Memory(NamedTuple):
    """Shared memory: descriptor ``fd`` of process ``pid``, if that still is this inode."""

    pid: int
    fd: int
    inode: int


class Meeting(NamedTuple):
    """A group of one holder (rank 0) and the receivers of one holding.

    Attributes:
        directory: of the sender; the ranks meet there.
        number: of the set of groups; `marker` lies there as long as they are good.
        name: of this group.
        size: ranks in it.
        backend: see `transfer.group`.
        seconds: until the transfer is over.
        extent: bytes that are broadcast.
    """

    directory: str
    number: int
    name: str
    size: int
    backend: str
    seconds: float
    extent: int


class Loan(NamedTuple):
    """A buffer of the holder's own device, which receivers map by handles.

    Attributes:
        number: of the set of buffers.
        buffers, extent: how many there are, and the bytes of each.
        which: the one to pack.
        exports: how many receivers need handles of all of them.
    """

    number: int
    buffers: int
    extent: int
    which: int
    exports: int


Place = Memory | Meeting | Loan
_PLACES: dict[str, type[Memory] | type[Meeting] | type[Loan]] = {
    "memory": Memory,
    "meeting": Meeting,
    "loan": Loan,
}


class Write(NamedTuple):
    """One block.

    Attributes:
        key: of the value that it is taken from.
        source: where it lies in that value.
        offset: where the receiver's parameter, or the packed block, begins in the place, in bytes.
        dtype, shape: of that parameter; another dtype than the value's makes it a cast.
        target: where the block belongs in it.
    """

    key: int
    source: Bounds
    offset: int
    dtype: str
    shape: tuple[int, ...]
    target: Bounds


class Order(NamedTuple):
    """What one process is to write.

    Attributes:
        sender: its address.
        live: inodes of the sender's slots, or numbers of its sets of groups or buffers; all that
            is known of others is let go.
        place: None: there is nothing to write.
        verify: the checksum that is wanted of each block.
    """

    sender: str
    live: tuple[int, ...]
    place: Place | None
    verify: str
    writes: tuple[Write, ...]

    @property
    def packed(self) -> tuple[Any, ...]:
        """As it travels."""
        kind = next((k for k, v in _PLACES.items() if isinstance(self.place, v)), None)
        return self.sender, self.live, kind, self.place, self.verify, self.writes

    @staticmethod
    def read(given: Any) -> Order:
        """Read what `packed` holds.

        Raises:
            ProtocolError: it was made by something else.
        """
        try:
            sender, live, kind, fields, verify, writes = msgspec.convert(given, _Packed)
            place = None if kind is None else msgspec.convert(fields, _PLACES[kind])
        except msgspec.ValidationError as error:
            raise ProtocolError(f"this is no order to write: {error}") from error
        return Order(sender, live, place, verify, writes)


#: An order as it travels.
_Packed = tuple[
    str, tuple[int, ...], Literal["memory", "meeting", "loan"] | None, Any, str, tuple[Write, ...]
]


class Answer(NamedTuple):
    """What was done.

    Attributes:
        checks: the checksums of the blocks.
        handles: for each receiver that a `Loan` named, the handles of all buffers.
    """

    checks: Sequence[int]
    handles: Sequence[Any] = ()
