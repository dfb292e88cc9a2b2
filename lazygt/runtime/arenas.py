"""Shared memory for large tensors: one copy in, mapped by every process of the host.

An `Arena` is a growing memfd with a first-fit allocator. One process owns it (allocates and frees);
others map it. Workers inherit the memfd, so nothing has a name in a file system, and the kernel
frees the memory after the last process that has it open.

Layout of the memfd::

    | header page | segment 0: size B | segment 1: size 2B | segment 2: size 4B | ...

The header contains B, so an offset alone determines the segment. A segment is mapped at its first
use and never moves, so a view stays valid while the arena grows. Pages are faulted in once, when
the high-water mark rises: a first touch costs ten times as much as a copy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from lazygt.errors import ProtocolError
from lazygt.host.files import create_file, memfd_bytes

ALIGNMENT = 256
"""Every slot starts at a multiple of this many bytes, as CUDA and SIMD kernels like it."""

_PAGE = mmap.PAGESIZE
_HEADER = struct.Struct("<8sQ")
_NOTE_FORMAT = struct.Struct("<QQ")
_NOTE_OFFSET = 64  # in the header's page
_MAGIC = b"lazygt\x00\x01"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14); not named by Python's mmap module
_POPULATE_STEP = 16 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Allocated range of an arena: offset and length, in bytes."""

    offset: int
    nbytes: int


@dataclass(slots=True)
class _Segment:
    """One mapping; for the owner, with its sorted free list of (begin, end) ranges."""

    start: int  # offset in the memfd
    nbytes: int
    memory: mmap.mmap
    free: list[tuple[int, int]] = field(default_factory=list)
    populated: int = 0  # bytes, from the beginning on, whose pages are faulted in
    #: True if the ``mapped`` callback has accepted the mapping
    watched: bool = False


class Arena:
    """A growing region of shared memory. Create it with `create`, `own` or `attach`.

    The owner's methods may be called from several threads; `free` may also be called from a
    finalizer, even one that runs while the same thread is inside another method.
    """

    def __init__(self, fd: int, first_bytes: int, *, owner: bool) -> None:
        self.fd = fd
        self._first_segment_bytes = first_bytes
        self._owner = owner
        self._segments: dict[int, _Segment] = {}
        self._slots: dict[int, int] = {}
        self._bytes_in_use = 0
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self._on_map: Callable[[mmap.mmap], bool] = lambda memory: False
        self._on_unmap: Callable[[mmap.mmap], None] = lambda memory: None
        self._closer = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, initial_bytes: int = 64 << 20) -> Arena:
        """Create an arena that this process owns. Memory is used only when it is allocated."""
        return cls.own(create_memory(initial_bytes))

    @classmethod
    def own(cls, fd: int) -> Arena:
        """Open a memfd from `create_memory` as the owner, which allocates."""
        return cls(fd, _read_header(fd), owner=True)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process owns. The arena closes ``fd`` when it is closed."""
        return cls(fd, _read_header(fd), owner=False)

    # -- owner -------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Slot:
        """Allocate a slot of at least ``nbytes`` contiguous bytes.

        Raises:
            MemoryError: the machine has no memory left for it.
        """
        self._check_owner()
        size = max(_round_up(nbytes, ALIGNMENT), ALIGNMENT)
        with self._lock:
            self._drain_freed()
            offset = self._allocate_range(size)
            self._slots[offset] = size
            self._bytes_in_use += size
        return Slot(offset, nbytes)

    def note(self, first: int, second: int) -> None:
        """Write two numbers for `read_note`; they outlive this process."""
        os.pwrite(self.fd, _NOTE_FORMAT.pack(first, second), _NOTE_OFFSET)

    def claim(self, offset: int, nbytes: int) -> None:
        """Allocate a range at a fixed offset, whose data an earlier owner has written.

        Raises:
            ProtocolError: the range does not lie inside one segment.
            ValueError: the range is not free.
        """
        self._check_owner()
        size = max(_round_up(nbytes, ALIGNMENT), ALIGNMENT)
        with self._lock:
            index = self._index_of(offset, size)
            segment = self._segments.get(index)
            if segment is None:
                segment = self._map(index)
                segment.free.append((0, segment.nbytes))
            _remove_free_range(segment.free, offset - segment.start, size)
            segment.populated = max(segment.populated, offset - segment.start + size)
            self._slots[offset] = size
            self._bytes_in_use += size

    def put(self, source: torch.Tensor, *, non_blocking: bool = False) -> Slot:
        """Copy a tensor of any strides into a new slot, contiguously, by several threads.

        Args:
            non_blocking: return before a GPU has made the copy, as ``Tensor.copy_`` may.
        """
        slot = self.allocate(source.numel() * source.element_size())
        if slot.nbytes:
            target = self.view(slot.offset, slot.nbytes).view(source.dtype)
            target.view(source.shape).copy_(source, non_blocking=non_blocking)
        return slot

    def free(self, offset: int) -> None:
        """Free a slot. An unknown offset raises ValueError here or at the next call."""
        self._check_owner()
        self._freed.append(offset)
        # This may run in a finalizer, inside `allocate` of this very thread: never wait for the
        # lock. The thread that holds it, or the next caller, drains the queue.
        if self._lock.acquire(blocking=False):
            try:
                self._drain_freed()
            finally:
                self._lock.release()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all slots allocated and not yet freed, rounded up to `ALIGNMENT`."""
        with self._lock:
            self._drain_freed()
            return self._bytes_in_use

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that this process has faulted in, free or in use."""
        with self._lock:
            return sum(segment.populated for segment in self._segments.values())

    @property
    def held(self) -> int:
        """Bytes of memory of the memfd, written by any process."""
        return memfd_bytes(self.fd)

    def extents(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of all written data, in pieces of at most ``most`` bytes.

        No piece crosses the border between two segments.
        """
        for segment in list(self._segments.values()):
            begin, end = segment.start, segment.start + segment.nbytes
            while (begin := _next_data(self.fd, begin, end)) < end:
                hole = min(os.lseek(self.fd, begin, os.SEEK_HOLE), end)
                for offset in range(begin, hole, most):
                    yield offset, min(most, hole - offset)
                begin = hole

    # -- all processes -----------------------------------------------------------------------

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes at ``offset`` as a uint8 tensor of shape ``(nbytes,)``, without a copy.

        Raises:
            ProtocolError: the range does not lie inside one segment of the arena.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._buffer(offset, nbytes), dtype=torch.uint8)

    def watch(
        self, mapped: Callable[[mmap.mmap], bool], unmapped: Callable[[mmap.mmap], None]
    ) -> None:
        """Set callbacks for each new mapping, and for its end.

        Args:
            mapped: called with a new mapping; returns whether it accepts it.
            unmapped: called with an accepted mapping, before its end.
        """
        self._on_map, self._on_unmap = mapped, unmapped

    def close(self) -> None:
        """Close the memfd and drop the mappings; views that live on keep theirs. Idempotent."""
        self._closer()
        with self._lock:
            for segment in self._segments.values():
                if segment.watched:
                    self._on_unmap(segment.memory)
                _unmap(segment.memory)
            self._segments.clear()

    # -- implementation ----------------------------------------------------------------------

    def _check_owner(self) -> None:
        if not self._owner:
            raise ValueError("this process only maps the arena; its owner allocates and frees")

    def _buffer(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return a buffer over a range, after mapping its segment."""
        index = self._index_of(offset, nbytes)
        segment = self._segments.get(index)
        if segment is None:
            with self._lock:
                segment = self._segments.get(index) or self._map(index)
        return (ctypes.c_ubyte * nbytes).from_buffer(segment.memory, offset - segment.start)

    def _index_of(self, offset: int, nbytes: int) -> int:
        """Return the segment that holds the range: segment k begins at header + B * (2**k - 1)."""
        if offset >= _PAGE and nbytes > 0:
            index = ((offset - _PAGE) // self._first_segment_bytes + 1).bit_length() - 1
            if offset + nbytes <= self._start(index + 1):
                return index
        raise ProtocolError(f"no segment of the arena holds {nbytes} bytes at offset {offset}")

    def _start(self, index: int) -> int:
        """Return the offset of a segment in the memfd."""
        return _PAGE + self._first_segment_bytes * ((1 << index) - 1)

    def _map(self, index: int) -> _Segment:
        """Map a segment; the owner grows the memfd for that."""
        if not self._closer.alive:
            raise ValueError("the arena is closed")
        start, nbytes = self._start(index), self._first_segment_bytes << index
        if os.fstat(self.fd).st_size < start + nbytes:
            if not self._owner:
                raise ProtocolError(f"offset {start} lies beyond the end of the arena")
            os.ftruncate(self.fd, start + nbytes)
        segment = _Segment(start, nbytes, mmap.mmap(self.fd, nbytes, offset=start))
        segment.watched = self._on_map(segment.memory)
        self._segments[index] = segment
        return segment

    def _allocate_range(self, size: int) -> int:
        """Allocate a range from the first free one that fits (first fit); return its offset."""
        for segment in self._segments_for(size):
            for index, (begin, end) in enumerate(segment.free):
                if end - begin >= size:
                    self._populate(segment, begin + size)
                    if end - begin == size:
                        del segment.free[index]
                    else:
                        segment.free[index] = (begin + size, end)
                    return segment.start + begin
        raise AssertionError(
            "unreachable: _segments_for ends with an empty segment that is big enough"
        )

    def _segments_for(self, size: int) -> Iterator[_Segment]:
        """Yield mapped segments in order, then a new one: the smallest unmapped one that fits."""
        yield from list(self._segments.values())
        index = 0
        while index in self._segments or self._first_segment_bytes << index < size:
            index += 1
        try:
            segment = self._map(index)
        except OSError as error:
            raise MemoryError(
                f"the arena cannot grow by {self._first_segment_bytes << index} bytes"
            ) from error
        segment.free.append((0, segment.nbytes))
        yield segment

    def _populate(self, segment: _Segment, upto: int) -> None:
        """Fault in the pages of a segment up to an offset."""
        if upto <= segment.populated:
            return
        # In steps, so that many small slots do not each pay for a system call.
        target = min(_round_up(upto, _POPULATE_STEP), segment.nbytes)
        begin = segment.populated
        try:
            try:
                segment.memory.madvise(_POPULATE_WRITE, begin, target - begin)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A kernel before 5.14: reserve the pages, so that a full machine is an error
                # here and not a SIGBUS in the middle of a copy.
                os.posix_fallocate(self.fd, segment.start + begin, target - begin)
        except OSError as error:
            raise MemoryError(f"no memory for {target - begin} bytes of the arena") from error
        segment.populated = target

    def _drain_freed(self) -> None:
        """Return all queued slots to the free lists."""
        while self._freed:
            offset = self._freed.popleft()
            size = self._slots.pop(offset, None)
            if size is None:
                raise ValueError(f"offset {offset} is not an allocated slot of the arena")
            self._bytes_in_use -= size
            segment = self._segments[self._index_of(offset, size)]
            _insert_free_range(segment.free, offset - segment.start, size)


def create_memory(initial_bytes: int = 64 << 20) -> int:
    """Create a memfd with an arena's header, for another process to `Arena.own`.

    Returns:
        Its file descriptor.
    """
    first = max(_round_up(initial_bytes, _PAGE), _PAGE)
    fd = create_file("lazygt-arena", _PAGE)
    os.pwrite(fd, _HEADER.pack(_MAGIC, first), 0)
    return fd


def read_note(fd: int) -> tuple[int, int]:
    """Return the two numbers that the owner of an arena noted last."""
    first, second = _NOTE_FORMAT.unpack(os.pread(fd, _NOTE_FORMAT.size, _NOTE_OFFSET))
    return first, second


def tensor_over(
    arena: Arena, offset: int, nbytes: int, on_release: Callable[[int], object]
) -> torch.Tensor:
    """Return a uint8 tensor over a slot, with a callback once its memory may be reused.

    ``on_release(offset)`` is called exactly once, when the last tensor or NumPy view of the
    memory has died, from the thread that dropped it and possibly inside garbage collection: it
    must not wait for a lock. ``deque.append`` and `Arena.free` are fit for it.

    Raises:
        ProtocolError: the range does not lie inside one segment of the arena.
    """
    if nbytes == 0:
        on_release(offset)
        return torch.empty(0, dtype=torch.uint8)
    buffer = arena._buffer(offset, nbytes)
    # torch keeps the buffer object alive exactly as long as the storage.
    weakref.finalize(buffer, on_release, offset).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _next_data(fd: int, begin: int, end: int) -> int:
    """Return the offset of a file's next data in [begin, end); ``end`` if there is none."""
    try:
        return min(os.lseek(fd, begin, os.SEEK_DATA), end)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end


def _read_header(fd: int) -> int:
    magic, first = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC:
        raise ProtocolError(f"file descriptor {fd} is not an arena of this version")
    return int(first)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _insert_free_range(free: list[tuple[int, int]], begin: int, size: int) -> None:
    """Insert a range into a sorted free list and join it with its neighbours."""
    end = begin + size
    index = bisect_left(free, (begin, end))
    if index < len(free) and free[index][0] == end:
        end = free.pop(index)[1]
    if index and free[index - 1][1] == begin:
        index -= 1
        begin = free.pop(index)[0]
    free.insert(index, (begin, end))


def _remove_free_range(free: list[tuple[int, int]], begin: int, size: int) -> None:
    """Remove a range from a sorted free list."""
    end = begin + size
    index = bisect_left(free, (begin + 1,)) - 1
    if index < 0 or free[index][1] < end:
        raise ValueError(f"{size} bytes at {begin} of the segment are not free")
    first, last = free.pop(index)
    rest = [(first, begin), (end, last)]
    free[index:index] = [(a, b) for a, b in rest if a < b]


def _unmap(memory: mmap.mmap) -> None:
    """End a mapping, or leave that to the last tensor that uses it."""
    try:
        memory.close()
    except BufferError:
        # A tensor still uses the mapping, which ends with that tensor.
        return
