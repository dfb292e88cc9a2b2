"""Fetches: values that workers have sent, as CPU tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from lazygt.errors import ProtocolError
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.runtime import wire
from lazygt.runtime.blocks import Region, joined
from lazygt.runtime.link import Link
from lazygt.runtime.messages import Done, Failure, Fetched
from lazygt.runtime.shm import tensor_over

#: A rank's answer to a run, with the buffers that came with it.
Answer = tuple[Done, list[memoryview]]
#: What each rank has sent of a value, one region a block.
Regions = Mapping[int, Sequence[Region]]


class Fetches:
    """Takes fetched values out of answers: small ones come with them, large ones lie in the
    worker's arena until their tensor is dropped."""

    def __init__(self, link: Link) -> None:
        self._link = link
        #: for each rank the room in its arena that nobody reads any more
        self._read: list[deque[int]] = [deque() for _ in range(link.world_size)]

    def check(self, rank: int, done: Done, buffers: Sequence[memoryview], count: int) -> None:
        """Raise ProtocolError unless so many values came, each with its bytes."""
        if len(done.fetched) != count:
            raise ProtocolError(f"{len(done.fetched)} values came instead of {count}")
        rest = iter(buffers)
        for item in done.fetched:
            if isinstance(item, Failure):
                continue
            meta = item.meta
            if meta.offset or meta.extent != meta.numel:
                raise ProtocolError(f"the memory of a value has gaps: {meta}")
            if item.offset is not None:
                self._check_room(rank, item.offset, meta.nbytes)
            elif len(next(rest, b"")) != meta.nbytes:
                raise ProtocolError(f"a value of {meta.nbytes} bytes came without its bytes")
        if next(rest, None) is not None:
            raise ProtocolError("bytes came that belong to no value")

    def _check_room(self, rank: int, offset: int, nbytes: int) -> None:
        arena = self._link.fetch_arena(rank)
        if arena is None:
            raise ProtocolError("a value lies in shared memory, of which there is none")
        arena.view(offset, nbytes)

    def value(
        self, answers: Mapping[int, Answer], meta: TensorMeta, regions: Regions | None
    ) -> torch.Tensor:
        """A fetched value of which no block failed; see ``Client.fetched``."""
        if regions is None:
            return self._block(0, answers[0], 0)
        blocks = [
            (region, self._block(rank, answers[rank], which))
            for rank, sent in regions.items()
            for which, region in enumerate(sent)
        ]
        return joined(meta, blocks)

    def _block(self, rank: int, answer: Answer, which: int) -> torch.Tensor:
        fetched, buffers = answer[0].fetched, answer[1]
        item = fetched[which]
        assert isinstance(item, Fetched)
        meta = item.meta
        if item.offset is not None:
            arena = self._link.fetch_arena(rank)
            assert arena is not None
            flat = tensor_over(arena, item.offset, meta.nbytes, self._read[rank].append)
        elif meta.nbytes:
            earlier = [one for one in fetched[:which] if isinstance(one, Fetched)]
            flat = wire.received(buffers[sum(one.offset is None for one in earlier)])
        else:
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        typed = flat.view(meta.dtype)
        if meta.stride == contiguous_stride(meta.shape):
            return typed.view(meta.shape)
        return typed.as_strided(meta.shape, meta.stride)

    def drop(self, rank: int, done: Done) -> None:
        """Give back the room of what was fetched and is not wanted any more."""
        self._read[rank].extend(
            f.offset for f in done.fetched if isinstance(f, Fetched) and f.offset is not None
        )

    def releases(self, rank: int) -> tuple[int, ...]:
        """The room in a rank's arena that nobody reads any more; each is told once."""
        return tuple(drained(self._read[rank]))


def wanted(
    answers: Mapping[int, Answer], regions: Regions | None
) -> list[tuple[int, Fetched | Failure]]:
    """The blocks that make up a fetched value, each with the rank that has sent it."""
    counts = {0: 1} if regions is None else {rank: len(sent) for rank, sent in regions.items()}
    return [
        (rank, item) for rank, count in counts.items() for item in answers[rank][0].fetched[:count]
    ]


def drained(queue: deque[int]) -> list[int]:
    """All items of a queue to which others may be adding, which is left empty."""
    items = []
    while queue:
        items.append(queue.popleft())
    return items
