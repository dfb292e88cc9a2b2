"""Data-dependent results: described to the client, and stored under the worker's ids."""

from __future__ import annotations

from typing import Any

import torch

from lazygt.errors import kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.executors.eager import Outcome
from lazygt.runtime.messages import Done, Failure, Made, Plain, Reply, Several
from lazygt.runtime.store import Failed, Store

#: First id that a worker assigns: above all ids of the client.
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
        """Write the description of the data-dependent ``last`` node's results to ``done.reply``.

        The tensors themselves stay in the worker's store.
        """
        if type(outcome.returned) is Failed:
            done.reply = Reply(failure=outcome.returned.failure.during(seq))
            return
        try:
            returned = tuple(map(self._described_item, outcome.returned))
            done.reply = Reply(returned, tuple(map(self._stored_tensor, outcome.written)))
        except NotImplementedError as error:
            done.reply = Reply(failure=Failure(last, kind_of(error), str(error), seq))

    def _described_item(self, item: Any) -> Made | Several | Plain:
        """Return the message for a returned tensor, list or plain Python value."""
        if isinstance(item, torch.Tensor):
            return self._stored_tensor(item)
        if isinstance(item, (list, tuple)):
            return Several(tuple(map(self._described_item, item)))
        return Plain(item)

    def _stored_tensor(self, tensor: torch.Tensor) -> Made:
        """Store a tensor under the next id; return its description."""
        if tensor.layout != torch.strided:
            raise NotImplementedError(
                f"the result is a {tensor.layout} tensor; lazygt has dense strided ones only"
            )
        key = self.next_id
        self.next_id += 1
        value = _with_own_storage(tensor)
        self._store.put(key, value)
        return Made(TensorMeta.of(value), key)


def _with_own_storage(item: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is a view or does not start its storage."""
    owns_storage = item.storage_offset() == 0 and item.untyped_storage().nbytes() >= item.nbytes
    return item if owns_storage and item._base is None else item.clone()
