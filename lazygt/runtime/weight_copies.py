"""Copies of a worker's values for a transfer of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lazygt.errors import ProtocolError
from lazygt.runtime.messages import Write, Wrote
from lazygt.runtime.store import Failed, Store


class Copier(Protocol):
    """Protocol of a copier of values into the buffers of a weight transfer."""

    def copy_packed(
        self, packed: Any, value_of: Callable[[int], torch.Tensor]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Carry out a request; return the checksums of the copied blocks, and handles to them."""

    def close(self) -> None:
        """Release its resources."""


class WeightCopies:
    """A worker's side of weight transfers.

    Args:
        make: see ``Worker``.
    """

    def __init__(
        self, store: Store, device: torch.device, make: Callable[[torch.device], Copier] | None
    ) -> None:
        self._store, self._device, self._make_copier = store, device, make
        self._copier: Copier | None = None

    def write(self, message: Write) -> Wrote:
        """Copy blocks of values into the buffers of a transfer; return checksums or the error."""
        number = message.number
        try:
            if self._copier is None:
                if self._make_copier is None:
                    raise ProtocolError("this worker was started without a copier")
                self._copier = self._make_copier(self._device)
            checks, handles = self._copier.copy_packed(message.request, self._value)
        except Exception as error:  # noqa: BLE001 - reported to the client
            return Wrote(number, error=f"{type(error).__name__}: {error}")
        return Wrote(number, checks, "", handles)

    def _value(self, key: int) -> torch.Tensor:
        """Return the value of an id; RuntimeError if it has failed."""
        value = self._store.get(key)
        if isinstance(value, Failed):
            raise RuntimeError(f"the value could not be computed: {value.failure.detail}")
        return value

    def close(self) -> None:
        """Release the copier's resources."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None
