"""Values of the workers as the client sees them.

`RemoteValue` is the client's handle of a value; `Uploads` sends CPU tensors to the workers, and
`Fetches` reads values from answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lazygt import native
from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Region, Sharding, joined
from lazygt.graph.meta import TensorMeta
from lazygt.graph.source import CallSite
from lazygt.runtime import wire
from lazygt.runtime.arenas import Arena, tensor_over
from lazygt.runtime.link import Link
from lazygt.runtime.messages import Done, Failure, Fetched, Put
from lazygt.runtime.wire import Buffer, DeltaCodec

#: The C++ extension if it records (handles of values are C++ objects then); else None.
NATIVE: Any = native.recording()


class Freed:
    """Ids of values without a handle: they are freed with the next run."""

    def __init__(self) -> None:
        self._ids: deque[int] = deque()
        #: adds an id; a method of the deque, since finalizers call it, on any thread
        self.add = self._ids.append

    def __bool__(self) -> bool:
        return bool(self._ids)

    def take(self) -> Collection[int]:
        """Remove and return the current ids, sorted."""
        return sorted(drain(self._ids))


class RemoteValue:
    """Handle of a value of the workers; after the handle's death, the next run frees the id."""

    __slots__ = ("_freed", "call_site", "id", "rest", "sharding")

    def __init__(self, key: int, freed: Freed) -> None:
        self.id = key
        self._freed = freed
        #: placement of the value on the mesh; None: replicated
        self.sharding: Sharding | None = None
        #: handles of further blocks, if ranks own several blocks of the value
        self.rest: Sequence[RemoteValue] = ()
        #: the user's line that made the value, for messages
        self.call_site: CallSite | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all its blocks."""
        return (self.id, *[block.id for block in self.rest])

    def __del__(self) -> None:
        self._freed.add(self.id)


def new_values(first: int, count: int, freed: Freed) -> Iterable[RemoteValue]:
    """Return handles of a run's outputs, with consecutive ids."""
    return [RemoteValue(key, freed) for key in range(first, first + count)]


def new_codec() -> DeltaCodec:
    """Return the client's codec of a list of ids."""
    return DeltaCodec()


if NATIVE is not None:
    Freed, RemoteValue, new_values = NATIVE.Freed, NATIVE.RemoteValue, NATIVE.Values  # type: ignore[misc]
    new_codec = NATIVE.DeltaCodec


class Uploads:
    """Copies of CPU tensors: small ones beside the run's message, large ones in shared memory.

    Args:
        arena: the shared memory, if there is any.
        readers: number of workers that read it.
        threshold: bytes from which a tensor goes through shared memory.
        retains: values that were read stay until a snapshot covers them.
    """

    def __init__(
        self, arena: Arena | None, readers: int, threshold: int, retains: bool = False
    ) -> None:
        self._arena, self._readers, self._threshold = arena, readers, threshold
        #: (upload, its bytes; None if they lie in the arena)
        self._waiting: list[tuple[Put, Buffer | None]] = []
        self._retains = retains
        #: offset in the arena -> workers that have not read it yet
        self._unread: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}
        #: offset of a retained value -> the run in which the last worker read it
        self._retained: dict[int, int] = {}
        #: bytes of the retained values
        self.retained_bytes = 0

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self._waiting)

    def add(self, key: int, source: torch.Tensor, meta: TensorMeta) -> None:
        """Copy a tensor now, in ``meta``'s layout, for the id ``key``."""
        if self._arena is not None and meta.nbytes >= self._threshold:
            slot = self._arena.allocate(meta.nbytes)
            target = self._arena.view(slot.offset, meta.nbytes).view(meta.dtype)
            target.as_strided(meta.shape, meta.stride).copy_(source)
            self._unread[slot.offset] = set(range(self._readers))
            self._sizes[slot.offset] = slot.nbytes
            self._waiting.append((Put(key, meta, slot.offset), None))
        else:
            host = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            host.copy_(source)
            flat = host.as_strided((meta.numel,), (1,)) if meta.numel else host.reshape(0)
            self._waiting.append((Put(key, meta), flat.view(torch.uint8).numpy().tobytes()))

    def take(self) -> tuple[list[Put], list[Buffer]]:
        """Return the uploads to send now, and the bytes of those that are not in the arena."""
        uploads, self._waiting = self._waiting, []
        return [put for put, _ in uploads], [data for _, data in uploads if data is not None]

    def was_read(self, offset: int, rank: int, seq: int) -> None:
        """Note that a worker has read, with this run, the value in the arena at ``offset``.

        Once all workers have, the slot is freed, or retained until a snapshot covers it.

        Raises:
            ProtocolError: there is no such value, or the worker has read it before.
        """
        unread = self._unread.get(offset)
        if unread is None or rank not in unread:
            raise ProtocolError(f"nothing lies in shared memory at {offset}")
        unread.discard(rank)
        if unread:
            return
        del self._unread[offset]
        if self._retains:
            self._retained[offset] = seq
            self.retained_bytes += self._sizes[offset]
        else:
            self._free(offset)

    def read_again(self, offset: int, rank: int, seq: int) -> None:
        """Note a read by a worker that repeats a run; a second read is ignored."""
        if rank in self._unread.get(offset, ()):
            self.was_read(offset, rank, seq)

    def mark_unread_since(self, seq: int) -> None:
        """Note the rollback of runs from this one on: their uploads will be read again."""
        for offset in [offset for offset, read in self._retained.items() if read >= seq]:
            del self._retained[offset]
            self.retained_bytes -= self._sizes[offset]
            self._unread[offset] = set(range(self._readers))

    def free_up_to(self, seq: int) -> None:
        """Free the retained values read up to this run: a snapshot after it contains them."""
        for offset in [offset for offset, read in self._retained.items() if read <= seq]:
            del self._retained[offset]
            self.retained_bytes -= self._sizes[offset]
            self._free(offset)

    def stop_retaining(self) -> None:
        """Free retained values, and retain none from now on: there will be no snapshots."""
        self._retains = False
        self.free_up_to(max(self._retained.values(), default=0))

    def _free(self, offset: int) -> None:
        assert self._arena is not None
        del self._sizes[offset]
        self._arena.free(offset)


#: A rank's answer to a run, with the buffers that came with it.
Answer = tuple[Done, list[memoryview]]
#: The regions of a value that each rank has sent, one for each block.
Regions = Mapping[int, Sequence[Region]]


class Fetches:
    """Reader of fetched values from answers.

    Small values come with the answers; large ones lie in the worker's arena until their tensor is
    dropped.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        #: for each rank, offsets in its arena to release
        self._released_offsets: list[deque[int]] = [deque() for _ in range(link.world_size)]

    def check(self, rank: int, done: Done, buffers: Sequence[memoryview], count: int) -> None:
        """Raise ProtocolError unless an answer has ``count`` values, each with its bytes."""
        if len(done.fetched) != count:
            raise ProtocolError(f"{len(done.fetched)} values came instead of {count}")
        rest = iter(buffers)
        for item in done.fetched:
            if isinstance(item, Failure):
                continue
            meta = item.meta
            if not meta.plain and (meta.offset or meta.extent != meta.numel):
                raise ProtocolError(f"the memory of a value has gaps: {meta}")
            if item.offset is not None:
                self._check_range(rank, item.offset, meta.nbytes)
            elif len(next(rest, b"")) != meta.nbytes:
                raise ProtocolError(f"a value of {meta.nbytes} bytes came without its bytes")
        if next(rest, None) is not None:
            raise ProtocolError("bytes came that belong to no value")

    def _check_range(self, rank: int, offset: int, nbytes: int) -> None:
        arena = self._link.fetch_arena(rank)
        if arena is None:
            raise ProtocolError("a value lies in shared memory, of which there is none")
        arena.view(offset, nbytes)

    def value(
        self, answers: Mapping[int, Answer], meta: TensorMeta, regions: Regions | None
    ) -> torch.Tensor:
        """Return a fetched value without failed blocks; see ``Client.fetched``."""
        if regions is None:
            return self._block(0, answers[0], 0)
        blocks = [
            (region, self._block(rank, answers[rank], index))
            for rank, sent in regions.items()
            for index, region in enumerate(sent)
        ]
        return joined(meta, blocks)

    def number(self, answer: Answer) -> Any:
        """Return the only fetched value as a Python number; None if its dtype has none."""
        (item,), buffers = answer[0].fetched, answer[1]
        if not isinstance(item, Fetched) or item.meta.numel != 1 or item.offset is not None:
            return None
        number = wire.NUMBERS.get(item.meta.dtype)
        return None if number is None else number.unpack(buffers[0])[0]

    def _block(self, rank: int, answer: Answer, index: int) -> torch.Tensor:
        """Return value number ``index`` of a rank's answer: over the rank's arena, or a copy."""
        fetched, buffers = answer[0].fetched, answer[1]
        item = fetched[index]
        assert isinstance(item, Fetched)
        meta = item.meta
        if item.offset is not None:
            arena = self._link.fetch_arena(rank)
            assert arena is not None
            flat = tensor_over(arena, item.offset, meta.nbytes, self._released_offsets[rank].append)
        elif meta.nbytes:
            preceding = [one for one in fetched[:index] if isinstance(one, Fetched)]
            flat = wire.received(buffers[sum(one.offset is None for one in preceding)])
        else:
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        typed = flat.view(meta.dtype)
        if meta.plain:
            return typed.view(meta.shape)
        return typed.as_strided(meta.shape, meta.stride)

    def drop(self, rank: int, done: Done) -> None:
        """Release the arena slots of fetched values that will not be read."""
        self._released_offsets[rank].extend(
            f.offset for f in done.fetched if isinstance(f, Fetched) and f.offset is not None
        )

    @property
    def waiting(self) -> bool:
        """True if there are offsets to release in some rank's arena."""
        return any(self._released_offsets)

    def renew(self, rank: int) -> None:
        """Forget the releases in the arena of a rank that was replaced."""
        self._released_offsets[rank] = deque()

    def releases(self, rank: int) -> tuple[int, ...]:
        """Remove and return the offsets to release in a rank's arena."""
        return tuple(drain(self._released_offsets[rank]))


def wanted(
    answers: Mapping[int, Answer], regions: Regions | None
) -> list[tuple[int, Fetched | Failure]]:
    """Return the blocks that make up a fetched value, each with its sender's rank.

    Args:
        answers, regions: as for ``Client.fetched``.
    """
    counts = {0: 1} if regions is None else {rank: len(sent) for rank, sent in regions.items()}
    return [
        (rank, item) for rank, count in counts.items() for item in answers[rank][0].fetched[:count]
    ]


def drain(queue: deque[int]) -> list[int]:
    """Empty a queue that other threads may be adding to; return its items."""
    items = []
    while queue:
        items.append(queue.popleft())
    return items
