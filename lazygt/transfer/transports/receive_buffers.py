"""A receiver's own memory for new versions, freed when the last tensor in it has died."""

from __future__ import annotations

import torch
from torch import Tensor

from lazygt.runtime.shared_memory import Arena, tensor_over


class ReceiveBuffers:
    """Allocator of flat uint8 buffers on one device; freed host memory is reused.

    Fresh host memory takes twice as long to fill as memory that was used before. On a GPU torch's
    own allocator reuses memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arena: Arena | None = None

    def buffer(self, nbytes: int) -> Tensor:
        """Return a buffer of ``nbytes`` of uint8.

        Raises:
            MemoryError, torch.OutOfMemoryError: not enough memory is left.
        """
        if self.device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._arena is None:
            self._arena = Arena.create(max(nbytes, 1))
        slot = self._arena.allocate(nbytes)
        return tensor_over(self._arena, slot.offset, nbytes, self._free)

    def close(self) -> None:
        """Release the freed memory; tensors that live on keep theirs. Idempotent."""
        if self._arena is not None:
            arena, self._arena = self._arena, None
            arena.close()

    def _free(self, offset: int) -> None:
        arena = self._arena
        if arena is not None:
            arena.free(offset)
