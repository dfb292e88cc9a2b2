"""Ways: how blocks get from who has them to the receivers, seen from the sender.

A way names the place that a holder writes to, and tells receivers what they need to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lazygt.transfer.orders import Memory, Place
from lazygt.transfer.origins import Written
from lazygt.transfer.peer import Peer


class Way(Protocol):
    """One transfer's.

    Attributes:
        offset: where the memory that receivers share begins; None: each request is packed by
            itself, for the receivers of one holding.
        live: what of the sender's is in use; see `Order`.
    """

    @property
    def offset(self) -> int | None: ...

    @property
    def live(self) -> tuple[int, ...]: ...

    def expect(self, largest: int) -> None:
        """No request of this transfer will be bigger than so many packed bytes."""

    def is_free(self, rank: int) -> bool:
        """Whether a rank may be given one more request now."""

    def open(self, rank: int, number: int, holding: int, extent: int) -> Place:
        """Get ready for a request of so many packed bytes; the place to write it to."""

    def told(self, peer: Peer, answer: Written) -> dict[str, Any]:
        """What a receiver needs to know besides of a request that has been written."""


class SharedWay:
    """Into memory that the receivers map: a block goes where it belongs at once.

    Args:
        live: inodes of all memory of the sender.
    """

    def __init__(self, memory: Memory, offset: int, live: Sequence[int]) -> None:
        self._memory, self.offset, self.live = memory, offset, tuple(live)

    def expect(self, largest: int) -> None:
        """Nothing is packed."""

    def is_free(self, rank: int) -> bool:
        """See `Way`."""
        return True

    def open(self, rank: int, number: int, holding: int, extent: int) -> Place:
        """See `Way`."""
        return self._memory

    def told(self, peer: Peer, answer: Written) -> dict[str, Any]:
        """Nothing: the blocks are there."""
        return {}
