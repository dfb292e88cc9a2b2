"""The end of a transfer in a process that holds blocks: it writes them where they belong.

The memory is a slot of a `SharedMemoryTransferSender`, which is told by its process, descriptor and
inode: the inode tells it from a later one under the same descriptor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.runtime.shm import Arena
from lazygt.transfer.bytework import Copy, Crew, checksum_named
from lazygt.transfer.routes import Bounds, slices
from lazygt.transfer.spec import DTYPES


class Memory(NamedTuple):
    """Where a slot is: descriptor ``fd`` of process ``pid``, if that still is this inode."""

    pid: int
    fd: int
    inode: int


class Write(NamedTuple):
    """One block.

    Attributes:
        key: of the value that it is taken from.
        source: where it lies in that value.
        offset: where the receiver's parameter begins in the memory, in bytes.
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
        live: inodes of the sender's slots; the memory of all others is let go.
        memory: None: there is nothing to write.
        verify: the checksum that is wanted of each block.
    """

    sender: str
    live: tuple[int, ...]
    memory: Memory | None
    verify: str
    writes: tuple[Write, ...]

    @staticmethod
    def read(given: Any) -> Order:
        """An order as it comes from the wire.

        Raises:
            ProtocolError: it is none.
        """
        try:
            sender, live, memory, verify, writes = given
            place = None if memory is None else Memory(*memory)
            return Order(sender, tuple(live), place, verify, tuple(Write(*one) for one in writes))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"this is no order to write: {error}") from error


def memory_of(arena: Arena) -> Memory:
    """How another process of this user finds an arena of this process."""
    return Memory(os.getpid(), arena.fd, os.fstat(arena.fd).st_ino)


class Writer:
    """Writes blocks into senders' memory; used by one thread.

    Args:
        threads: that copy at the same time.
    """

    def __init__(self, threads: int) -> None:
        self._crew = Crew(threads)
        self._arenas: dict[str, dict[int, Arena]] = {}

    def write(self, order: Order, value_of: Callable[[int], Tensor]) -> list[int]:
        """Do what is ordered; the checksums of what was written.

        Raises:
            ProtocolError: the order fits neither the memory nor the values.
            OSError: the memory is not there any more.
        """
        self._let_go(order.sender, order.live)
        if order.memory is None:
            return []
        arena = self._arena(order.sender, order.memory)
        copies = [_copy(arena, write, value_of(write.key)) for write in order.writes]
        return self._crew.copy(copies, checksum_named(order.verify)).result()

    def close(self) -> None:
        """End the threads and drop all mappings."""
        self._crew.close()
        for sender in list(self._arenas):
            self._let_go(sender, ())

    def _arena(self, sender: str, memory: Memory) -> Arena:
        known = self._arenas.setdefault(sender, {})
        if memory.inode not in known:
            known[memory.inode] = _attach(memory)
        return known[memory.inode]

    def _let_go(self, sender: str, live: Collection[int]) -> None:
        known = self._arenas.get(sender, {})
        for gone in known.keys() - set(live):
            known.pop(gone).close()
        if not known:
            self._arenas.pop(sender, None)


def _attach(memory: Memory) -> Arena:
    fd = os.open(f"/proc/{memory.pid}/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != memory.inode:
        os.close(fd)
        raise ProtocolError("the sender has given this memory up; its transfer has failed")
    return Arena.attach(fd)


def _copy(arena: Arena, write: Write, value: Tensor) -> Copy:
    """What is to be copied, seen as two tensors of one shape."""
    dtype = DTYPES[write.dtype]
    flat = arena.view(write.offset, math.prod(write.shape) * dtype.itemsize)
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
