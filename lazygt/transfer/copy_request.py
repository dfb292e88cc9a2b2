"""Copy requests as plain data, and the sources: the processes that own a model's blocks.

The destination of a block is a *place*: memory that the receivers map, a group for a broadcast, or
a buffer that is mapped by a handle. Each kind of place has its file in `transports`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh, Placements
from lazygt.transfer.layout import Bounds

SAME_AS_LAST, IS_THERE = 1, 2
"""Flags of a compared block: its bytes equal those of the last version, and those of the place."""


class CopyItem(NamedTuple):
    """Copy of one block.

    Attributes:
        key: key of the value that contains the block.
        source: bounds of the block in that value.
        offset: start of the receiver's parameter, or of the packed block, in the place, in bytes.
        dtype, shape: those of that parameter; another dtype than the value's makes it a cast.
        target: bounds of the block in that parameter.
        name: parameter, layout and bounds; identifies the block in later transfers.
    """

    key: int
    source: Bounds
    offset: int
    dtype: str
    shape: tuple[int, ...]
    target: Bounds
    name: tuple[int, int, Bounds] = (0, 0, ())


class CopyRequest(NamedTuple):
    """Request to one process to copy or compare blocks.

    Attributes:
        sender: address of the sender.
        live: inodes of the sender's slots, or numbers of its sets of groups or buffers; all others
            are released.
        kind: file of `transports` with the kind of place; "": nothing to copy.
        place: the address of that transport, its `ADDRESS`; its ``number`` is one of the live.
        verify: name of the checksum to compute of each block.
        compare: copy nothing, but compare each block's bytes with those of the last version and of
            the place; the two are numbers of transfers, 0 for none.
        transfer: number of the transfer; with ``compare``, the key of the cached digests.
    """

    sender: str
    live: tuple[int, ...]
    kind: str = ""
    place: Any = None
    verify: str = "none"
    items: tuple[CopyItem, ...] = ()
    compare: tuple[int, int] | None = None
    transfer: int = 0

    @property
    def packed(self) -> tuple[Any, ...]:
        """The request in wire format."""
        return tuple(self)

    @staticmethod
    def read(data: Any) -> CopyRequest:
        """Read the result of `packed`.

        Raises:
            ProtocolError: the data is no copy request.
        """
        try:
            request = msgspec.convert(data, CopyRequest)
            if not request.kind:
                return request
            place = msgspec.convert(request.place, transport_module(request.kind).ADDRESS)
        except (msgspec.ValidationError, ImportError, AttributeError) as error:
            raise ProtocolError(f"this is no copy request: {error}") from error
        return request._replace(place=place)


def transport_module(kind: str) -> Any:
    """Return the module of a kind of place, imported when a request first names it.

    Raises:
        ImportError: no transport has this name.
    """
    if not kind.isidentifier():
        raise ImportError(f"there is no transport {kind!r}")
    return importlib.import_module(f"lazygt.transfer.transports.{kind}")


class CopyReply(NamedTuple):
    """Results of a request, or its error.

    Attributes:
        checks: checksums of the blocks; for a comparison, their flags.
        handles: handles of the place; see `transports`.
    """

    rank: int
    number: int
    checks: Sequence[int]
    error: str = ""
    handles: Sequence[Any] = ()


class Destination(Protocol):
    """A sender's memory with one number, in a source process: blocks are copied to its places.

    Raises:
        ProtocolError, OSError: on construction, there is no such memory.

    Attributes:
        borrows: device on which `deliver` sends a value's own memory without a copy, if it is
            contiguous and needs no cast. None: everything is copied.
    """

    @property
    def borrows(self) -> torch.device | None: ...

    def view(self, place: Any, offset: int, nbytes: int) -> Tensor:
        """Return a flat uint8 tensor over a part of a place, to copy to.

        Args:
            place: the request's `ADDRESS`, as the sender's `open` returned it.
        """

    def deliver(self, place: Any, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Hand over the copied blocks; return handles, if the place has any.

        Args:
            runs: the bytes of each block.

        Raises:
            TransferError: the receivers did not read the blocks.
        """

    def close(self) -> None:
        """Drop the memory."""


#: Function that opens the destination of a device and a place.
OpenDestination = Callable[[torch.device, Any], Destination]

# -- sources -------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    """Location of a tensor's value.

    Attributes:
        key: key of the value in its source.
        held: object that keeps the value alive.
        blocks: block of each rank, if not given by placements.
    """

    key: int
    placements: Placements
    held: object
    blocks: tuple[Bounds | None, ...] | None = None


class WeightSource(Protocol):
    """Processes that own a model's blocks, and copy them on request.

    Attributes:
        turn: lock of the transfer that may read the replies.
    """

    turn: threading.Lock

    @property
    def mesh(self) -> Mesh: ...

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """Send a rank a copy request; does not wait."""

    def replies(self, seconds: float) -> list[CopyReply]:
        """Return the received replies; wait at most ``seconds`` for them.

        Raises:
            WorkerDied, WorkerFrozen: a rank is gone, or does not answer.
        """

    def let_go(self, sender: str) -> None:
        """Make the ranks drop all places of a sender; does not wait."""


class RemoteSource(WeightSource, Protocol):
    """A source that locates tensors."""

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        """Make the ranks compute the tensors, and return the location of each."""


class RemoteModel(NamedTuple):
    """Model with its values in other processes: their source, and the parameters by position."""

    source: RemoteSource
    tensors: Mapping[int, Tensor]


#: Device type -> function that finds the source of a tensor on such a device.
BY_DEVICE: dict[str, Callable[[Any], RemoteSource | None]] = {}


def source_of(tensors: Sequence[Tensor]) -> RemoteSource | None:
    """Return the common source of these tensors; None if there is none."""
    source: RemoteSource | None = None
    for tensor in tensors:
        find = BY_DEVICE.get(tensor.device.type)
        other = None if find is None else find(tensor)
        if other is None or (source is not None and other is not source):
            return None
        source = other
    return source
