"""Uploads: CPU tensors on their way to the workers, which travel with the next run."""

from __future__ import annotations

import torch

from lazygt.errors import ProtocolError
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.messages import Put
from lazygt.runtime.shm import Arena
from lazygt.runtime.wire import Buffer


class Uploads:
    """Copies of CPU tensors: small ones beside the run's message, large ones in shared memory.

    Args:
        arena: the shared memory, if there is any.
        readers: the workers that read what lies there.
        threshold: bytes from which a tensor goes there.
    """

    def __init__(self, arena: Arena | None, readers: int, threshold: int) -> None:
        self._arena, self._readers, self._threshold = arena, readers, threshold
        #: each with its bytes, unless they lie in the arena
        self._waiting: list[tuple[Put, Buffer | None]] = []
        #: offset in the arena -> workers that have not read it yet
        self._unread: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._waiting)

    def add(self, key: int, source: torch.Tensor, meta: TensorMeta) -> None:
        """Copy a tensor now. The workers will call it ``key``; its layout will be ``meta``'s."""
        if self._arena is not None and meta.nbytes >= self._threshold:
            slot = self._arena.allocate(meta.nbytes)
            room = self._arena.view(slot.offset, meta.nbytes).view(meta.dtype)
            room.as_strided(meta.shape, meta.stride).copy_(source)
            self._unread[slot.offset] = self._readers
            self._waiting.append((Put(key, meta, slot.offset), None))
        else:
            host = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            host.copy_(source)
            flat = host.as_strided((meta.numel,), (1,)) if meta.numel else host.reshape(0)
            self._waiting.append((Put(key, meta), flat.view(torch.uint8).numpy().tobytes()))

    def take(self) -> tuple[list[Put], list[Buffer]]:
        """What is to be sent now, with the bytes of what is not in the arena."""
        taken, self._waiting = self._waiting, []
        return [put for put, _ in taken], [data for _, data in taken if data is not None]

    def was_read(self, offset: int) -> None:
        """A worker has read what lies in the arena at ``offset``.

        Raises:
            ProtocolError: nothing does, or all have read it.
        """
        if offset not in self._unread:
            raise ProtocolError(f"nothing lies in shared memory at {offset}")
        self._unread[offset] -= 1
        if not self._unread[offset]:
            del self._unread[offset]
            assert self._arena is not None
            self._arena.free(offset)
