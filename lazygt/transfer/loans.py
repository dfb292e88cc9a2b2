"""Buffers that holders of blocks lend to receivers: which one is packed, and who may read it.

Each holder has some buffers and packs them in turn; it packs one again when every receiver has
copied what was in it. A receiver gets a holder's handles with its first request from there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.control import Message
from lazygt.transfer.devices import SharedDevice
from lazygt.transfer.orders import Loan, Place
from lazygt.transfer.origins import Origin, Written
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout
from lazygt.transfer.peer import Peer
from lazygt.transfer.peers import Peers


class Loans:
    """What a sender knows of holders' buffers, and who has their handles.

    Args:
        buffers: of each holder.
    """

    def __init__(self, peers: Peers, buffers: int) -> None:
        self._peers, self.buffers = peers, buffers
        self.number = self.extent = 0
        self._origin: Callable[[], Origin | None] | None = None
        #: receivers that have the handles, by rank
        self.known: dict[int, set[Peer]] = {}

    def way(self, out: Outgoing, layout: Layout) -> LoanWay:
        """The way for a transfer."""
        origin = None if out.remote is None else out.remote.origin
        if self._origin is None or self._origin() is not origin:
            self.forget()
            self._origin = _nobody if origin is None else weakref.ref(origin)
        return LoanWay(self, self._peers, layout)

    def reserve(self, extent: int) -> None:
        """Have buffers of at least so many bytes: the old ones, or a new set."""
        if extent > self.extent:
            self.number, self.extent, self.known = self.number + 1, extent, {}

    def forget(self) -> None:
        """Have a new set made for the next transfer."""
        self.extent = 0


class LoanWay:
    """The way of one transfer through buffers that are lent; see `Way`."""

    offset = None

    def __init__(self, loans: Loans, peers: Peers, layout: Layout) -> None:
        self._loans, self._peers, self._layout = loans, peers, layout
        self._packed: Counter[int] = Counter()
        #: (rank, buffer) -> who reads it, and how many requests each has taken in once it has
        self._readers: dict[tuple[int, int], dict[Peer, int]] = {}
        #: number of an order -> the buffer, and who gets handles with it
        self._orders: dict[int, tuple[int, list[Peer]]] = {}

    @property
    def live(self) -> tuple[int, ...]:
        return (self._loans.number,)

    def expect(self, largest: int) -> None:
        """See `Way`."""
        self._loans.reserve(largest)

    def is_free(self, rank: int) -> bool:
        """See `Way`: whether everyone has copied what is in the buffer whose turn it is."""
        readers = self._readers.get((rank, self._packed[rank] % self._loans.buffers), {})
        return all(peer.staged >= count for peer, count in readers.items())

    def open(self, rank: int, number: int, holding: int, extent: int) -> Place:
        """See `Way`."""
        loans = self._loans
        which = self._packed[rank] % loans.buffers
        self._packed[rank] += 1
        self._readers[rank, which] = {}
        known = loans.known.setdefault(rank, set())
        there = self._layout.holders(holding, self._peers.active)
        new = [peer for peer in there if peer not in known]
        known.update(new)
        self._orders[number] = which, new
        return Loan(loans.number, loans.buffers, loans.extent, which, len(new))

    def told(self, peer: Peer, answer: Written) -> dict[str, Any]:
        """See `Way`."""
        which, new = self._orders[answer.number]
        self._readers[answer.rank, which][peer] = peer.told
        handles = answer.handles[new.index(peer)] if peer in new else ()
        return {"from": answer.rank, "which": which, "handles": handles}


class Lent:
    """A receiver's view of the buffers that holders lend it."""

    def __init__(self, device: SharedDevice) -> None:
        self._device = device
        self._buffers: dict[int, list[Tensor]] = {}

    def buffer(self, message: Message) -> Tensor:
        """Where a request lies.

        Raises:
            ProtocolError: in no buffer that is known here.
        """
        rank, which, handles = message["from"], message["which"], message["handles"]
        if handles:
            self._buffers.pop(rank, None)
            self._buffers[rank] = [self._device.open(handle) for handle in handles]
        if not 0 <= which < len(self._buffers.get(rank, ())):
            raise ProtocolError(f"a request in unknown buffer {which} of worker {rank}")
        return self._buffers[rank][which]

    def close(self) -> None:
        """Unmap all."""
        self._buffers.clear()


def _nobody() -> None:
    """The origin of what this process has itself."""
