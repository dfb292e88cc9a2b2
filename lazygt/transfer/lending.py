"""Lending: buffers that a process with blocks packs, and that receivers map by their handles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.devices import SharedDevice, shared_device
from lazygt.transfer.orders import Loan


class Lending:
    """This process's buffers for each sender, by the number of their set.

    Args:
        device: where the values are, and the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._where = device
        self._device: SharedDevice | None = None
        self._buffers: dict[str, dict[int, list[Tensor]]] = {}

    def room(self, sender: str, place: Loan) -> Callable[[int, int], Tensor]:
        """See `Outlet`."""
        if self._device is None:
            self._device = shared_device(self._where)
        known = self._buffers.setdefault(sender, {})
        if place.number not in known:
            device = self._device
            known[place.number] = [device.allocate(place.extent) for _ in range(place.buffers)]
        buffers = known[place.number]
        if not 0 <= place.which < len(buffers):
            raise ProtocolError(f"there is no buffer {place.which}")
        buffer = buffers[place.which]
        return lambda offset, nbytes: buffer[offset : offset + nbytes]

    def deliver(self, sender: str, place: Loan) -> Sequence[Any]:
        """The handles, for each new receiver those of all buffers."""
        assert self._device is not None
        self._device.synchronize()  # receivers copy as soon as they hear of it
        buffers = self._buffers[sender][place.number]
        return [[self._device.export(each) for each in buffers] for _ in range(place.exports)]

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """See `Outlet`."""
        known = self._buffers.get(sender, {})
        for gone in known.keys() - set(live):
            del known[gone]
        if not known:
            self._buffers.pop(sender, None)

    def close(self) -> None:
        """See `Outlet`."""
        self._buffers.clear()
