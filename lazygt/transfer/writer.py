"""The end of a transfer in a process that holds blocks: it puts them where an order says.

How a packed or a mapped place is reached is an *outlet*'s affair; one file each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.runtime.shared_memory import Arena
from lazygt.transfer.bytework import Copy, Crew, checksum_named
from lazygt.transfer.lending import Lending
from lazygt.transfer.meetings import Meetings
from lazygt.transfer.orders import Answer, Loan, Meeting, Memory, Order, Write
from lazygt.transfer.routes import slices
from lazygt.transfer.spec import DTYPES

View = Callable[[int, int], Tensor]


class Outlet(Protocol):
    """One kind of place, seen from the process that writes."""

    def room(self, sender: str, place: Any) -> View:
        """What gives (offset, bytes) of a place as flat uint8.

        Raises:
            ProtocolError, OSError: the place is not there.
        """

    def deliver(self, sender: str, place: Any) -> Sequence[Any]:
        """Hand over what was written; handles, where the place has such.

        Raises:
            TransferError: the receivers did not take it.
        """

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """Drop what belongs to other numbers of this sender."""

    def close(self) -> None:
        """Drop all."""


class Writer:
    """Writes blocks for senders; used by one thread.

    Args:
        threads: that copy at the same time.
        device: where the values are; loans are made there.
    """

    def __init__(self, threads: int, device: torch.device | None = None) -> None:
        here = device or torch.device("cpu")
        self._crew = Crew(threads)
        self._outlets: dict[type, Outlet] = {
            Memory: Slots(),
            Meeting: Meetings(here),
            Loan: Lending(here),
        }

    def write(self, order: Order, value_of: Callable[[int], Tensor]) -> Answer:
        """Do what is ordered.

        Raises:
            ProtocolError: the order fits neither the place nor the values.
            OSError: the place is not there any more.
            TransferError: the receivers did not take what was written.
        """
        for outlet in self._outlets.values():
            outlet.let_go(order.sender, order.live)
        if order.place is None:
            return Answer(())
        outlet = self._outlets[type(order.place)]
        view = outlet.room(order.sender, order.place)
        copies = [_copy(view, write, value_of(write.key)) for write in order.writes]
        checks = self._crew.copy(copies, checksum_named(order.verify)).result()
        return Answer(checks, outlet.deliver(order.sender, order.place))

    def close(self) -> None:
        """End the threads and drop all places."""
        self._crew.close()
        for outlet in self._outlets.values():
            outlet.close()


class Slots:
    """Memory of senders, mapped here; the inode tells it from a later one of that descriptor."""

    def __init__(self) -> None:
        self._arenas: dict[str, dict[int, Arena]] = {}

    def room(self, sender: str, place: Memory) -> View:
        """See `Outlet`."""
        known = self._arenas.setdefault(sender, {})
        if place.inode not in known:
            known[place.inode] = _attach(place)
        return known[place.inode].view

    def deliver(self, sender: str, place: Memory) -> Sequence[Any]:
        """Nothing: receivers map the same memory."""
        return ()

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """See `Outlet`."""
        known = self._arenas.get(sender, {})
        for gone in known.keys() - set(live):
            known.pop(gone).close()
        if not known:
            self._arenas.pop(sender, None)

    def close(self) -> None:
        """See `Outlet`."""
        for sender in list(self._arenas):
            self.let_go(sender, ())


def memory_of(arena: Arena) -> Memory:
    """How another process of this user finds an arena of this process."""
    return Memory(os.getpid(), arena.fd, os.fstat(arena.fd).st_ino)


def _attach(memory: Memory) -> Arena:
    fd = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != memory.inode:
        os.close(fd)
        raise ProtocolError("the sender has given this memory up; its transfer has failed")
    return Arena.attach(fd)


def _copy(view: View, write: Write, value: Tensor) -> Copy:
    """What is to be copied, seen as two tensors of one shape."""
    dtype = DTYPES[write.dtype]
    flat = view(write.offset, math.prod(write.shape) * dtype.itemsize)
    source = _block(value.detach(), write.source)
    target = _block(flat.view(dtype).view(write.shape), write.target)
    if source.shape != target.shape:
        raise ProtocolError(
            f"a block of shape {list(source.shape)} does not fit one of {list(target.shape)}"
        )
    return Copy(source, target)


def _block(tensor: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    if len(bounds) != tensor.dim() or any(
        not 0 <= start < stop <= size
        for (start, stop), size in zip(bounds, tensor.shape, strict=True)
    ):
        raise ProtocolError(f"a tensor of shape {list(tensor.shape)} has no block {bounds}")
    return tensor[slices(tuple(bounds))] if bounds else tensor


def threads() -> int:
    """This process's share of the cores."""
    return max(torch.get_num_threads(), 1)
