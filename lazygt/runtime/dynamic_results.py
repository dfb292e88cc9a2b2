"""Data-dependent results: described to the client, and kept under the worker's ids."""

from __future__ import annotations

from typing import Any

import torch

from lazygt.errors import kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.executors.eager import Outcome
from lazygt.runtime.messages import Done, Failure, Made, Plain, Reply, Several
from lazygt.runtime.store import Failed, Store

#: The first id that a worker gives: above all of the client's.
DYNAMIC_IDS = 1 << 48


class DynamicResults:
    """Data-dependent results of one worker.

    Attributes:
        next_id: id of the next result.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.next_id = DYNAMIC_IDS

    def describe(self, outcome: Outcome, done: Done, seq: int, last: int) -> None:
        """Describe the data-dependent ``last`` node's results to the client; tensors stay here."""
        if type(outcome.returned) is Failed:
            done.reply = Reply(failure=outcome.returned.failure.during(seq))
            return
        try:
            returned = tuple(map(self._told, outcome.returned))
            done.reply = Reply(returned, tuple(map(self._made, outcome.written)))
        except NotImplementedError as error:
            done.reply = Reply(failure=Failure(last, kind_of(error), str(error), seq))

    def _told(self, item: Any) -> Made | Several | Plain:
        if isinstance(item, torch.Tensor):
            return self._made(item)
        if isinstance(item, (list, tuple)):
            return Several(tuple(map(self._told, item)))
        return Plain(item)

    def _made(self, tensor: torch.Tensor) -> Made:
        """Keep a tensor under an id of the worker's choice."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"the result is a {tensor.layout} tensor; lazygt has dense strided ones only"
            )
        key = self.next_id
        self.next_id += 1
        value = _rooted(tensor)
        self._store.put(key, value)
        return Made(TensorMeta.of(value), key)


def _rooted(item: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it does not own its memory from the beginning."""
    alone = item.storage_offset() == 0 and item.untyped_storage().nbytes() >= item.nbytes
    return item if alone and item._base is None else item.clone()
