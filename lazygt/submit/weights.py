"""Session as the source of a weight transfer: its workers copy their own blocks on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from lazygt.errors import LazyGTError
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import Replicate
from lazygt.runtime.client.client import Client
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.values import RemoteValue
from lazygt.transfer.copy_request import CopyReply, CopyRequest, TensorLocation


class SessionSource:
    """Workers of one session, as the source of a transfer.

    Args:
        lock: of the session; held while its client is used.
        settle: flushes the ops that tensors depend on, and returns their values on the workers.

    Attributes:
        mesh: the workers.
        turn: held by the one transfer at a time that copies from the workers.
    """

    def __init__(
        self,
        mesh: Mesh,
        client: Client,
        lock: AbstractContextManager[object],
        settle: Callable[[Sequence[Tensor]], list[RemoteValue]],
    ) -> None:
        self.mesh = mesh
        self.turn = threading.Lock()
        self._client, self._lock, self._settle = client, lock, settle

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        """Return the location of each tensor; see `RemoteSource`."""
        replicated = (Replicate(),) * len(self.mesh.names)
        return [
            TensorLocation(
                value.id, replicated if value.sharding is None else value.sharding.placements, value
            )
            for value in self._settle(tensors)
        ]

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """Send a copy request to a worker; see `WeightSource`."""
        with self._lock, DEFER_INTERRUPT:
            self._client.write(rank, number, request.packed)

    def replies(self, seconds: float) -> list[CopyReply]:
        """Wait for replies for ``seconds`` at most, and return them; see `WeightSource`."""
        with self._lock, DEFER_INTERRUPT:
            return [CopyReply(*fields) for fields in self._client.written(seconds)]

    def let_go(self, sender: str) -> None:
        """Release the workers' memory mappings of a sender; see `RemoteSource`."""
        empty_request = CopyRequest(sender, ())
        with self._lock, DEFER_INTERRUPT:
            for rank in range(self.mesh.world_size):
                try:
                    self._client.write(rank, 0, empty_request.packed)
                except LazyGTError:
                    continue  # the session or the worker has ended, and its mappings with it
