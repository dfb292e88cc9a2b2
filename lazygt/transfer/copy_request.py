"""Copy requests as plain data: holders of a model's blocks, and the copies to make.

A block goes to a *place*: memory that the receivers map, a group that it is broadcast in, a buffer
that is lent by a handle. Each kind of place has its file in `transports`.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh, Placements
from lazygt.transfer.layout import Bounds

SAME_AS_LAST, IS_THERE = 1, 2
"""Flags of a block that was compared: its bytes are those of the last version, and of the place."""


class CopyItem(NamedTuple):
    """One block.

    Attributes:
        key: of the value that it is taken from.
        source: where it lies in that value.
        offset: where the receiver's parameter, or the packed block, begins in the place, in bytes.
        dtype, shape: of that parameter; another dtype than the value's makes it a cast.
        target: where the block belongs in it.
        name: parameter, layout and bounds, by which the block is known again in later transfers.
    """

    key: int
    source: Bounds
    offset: int
    dtype: str
    shape: tuple[int, ...]
    target: Bounds
    name: tuple[int, int, Bounds] = (0, 0, ())


class CopyRequest(NamedTuple):
    """Copies that one process is to make.

    Attributes:
        sender: its address.
        live: inodes of the sender's slots, or numbers of its sets of groups or buffers; all others
            are released.
        kind: the file of `transports` that knows the place; "": there is nothing to copy.
        place: see there.
        verify: the checksum that is wanted of each block.
        compare: copy nothing, but find out which blocks have the bytes that they had in the last
            version and in the place; these are numbers of transfers, 0 for none.
        transfer: number of the transfer; with ``compare`` digests are kept under it.
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
        """As it travels."""
        return tuple(self)

    @staticmethod
    def read(given: Any) -> CopyRequest:
        """Read the result of `packed`.

        Raises:
            ProtocolError: it was made by something else.
        """
        try:
            request = CopyRequest(*msgspec.convert(given, _Packed))
            if not request.kind:
                return request
            place = msgspec.convert(request.place, transport_module(request.kind).Place)
        except (msgspec.ValidationError, ImportError, AttributeError) as error:
            raise ProtocolError(f"this is no copy request: {error}") from error
        return request._replace(place=place)


#: A request as it travels.
_Packed = tuple[
    str,
    tuple[int, ...],
    str,
    Any,
    str,
    tuple[CopyItem, ...],
    tuple[int, int] | None,
    int,
]


def transport_module(kind: str) -> Any:
    """The file of a kind of place, loaded when a request first names it.

    Raises:
        ImportError: there is none.
    """
    if not kind.isidentifier():
        raise ImportError(f"there is no transport {kind!r}")
    return importlib.import_module(f"lazygt.transfer.transports.{kind}")


class CopyReply(NamedTuple):
    """Results of a request, or its error.

    Attributes:
        checks: the checksums of the blocks; of blocks that were compared, flags.
        handles: of the place; see `transports`.
    """

    rank: int
    number: int
    checks: Sequence[int]
    error: str = ""
    handles: Sequence[Any] = ()


# -- sources -------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    """Location of a tensor's value.

    Attributes:
        key: its name with its holders.
        held: an object that keeps the value alive.
        blocks: the block of each rank, where no placements say that.
    """

    key: int
    placements: Placements
    held: object
    blocks: tuple[Bounds | None, ...] | None = None


class WeightSource(Protocol):
    """The processes that have a model's blocks; how they are reached is the source's affair.

    Attributes:
        turn: held by the transfer that takes the replies.
    """

    turn: threading.Lock

    @property
    def mesh(self) -> Mesh: ...

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """Have a rank copy; does not wait."""

    def replies(self, seconds: float) -> list[CopyReply]:
        """Return the replies that have come; wait at most so long for them.

        Raises:
            WorkerDied, WorkerFrozen: a rank is gone, or does not answer.
        """

    def let_go(self, sender: str) -> None:
        """Have the ranks drop all places of a sender; does not wait."""


class RemoteSource(WeightSource, Protocol):
    """Processes that tell where a tensor is."""

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        """Have the tensors computed; where each one is now."""


class RemoteModel(NamedTuple):
    """Model that other processes hold: the holders, and its parameters by position."""

    source: RemoteSource
    tensors: Mapping[int, Tensor]


#: Type of device -> what finds the source of a tensor on such a device.
BY_DEVICE: dict[str, Callable[[Any], RemoteSource | None]] = {}


def source_of(tensors: Sequence[Tensor]) -> RemoteSource | None:
    """The source of all of these tensors; None when there is none, or not one for all."""
    source: RemoteSource | None = None
    for tensor in tensors:
        find = BY_DEVICE.get(tensor.device.type)
        other = None if find is None else find(tensor)
        if other is None or (source is not None and other is not source):
            return None
        source = other
    return source
