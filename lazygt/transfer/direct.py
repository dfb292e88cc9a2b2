"""Transfers whose parts are written by who has them, for any sender: see `parts` and `ways`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from lazygt.transfer.extractor import Extractor
from lazygt.transfer.here import Here
from lazygt.transfer.origins import Origin
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout, Parts
from lazygt.transfer.peers import Peers
from lazygt.transfer.ways import Way


class Direct:
    """What a sender keeps of its holders between transfers.

    Args:
        device: where this process itself sends from, when the values are here.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._here: Here | None = None
        self._parts: Parts | None = None
        self._origins: weakref.WeakSet[Origin] = weakref.WeakSet()

    def requests(
        self,
        out: Outgoing,
        extractor: Extractor,
        layout: Layout,
        way: Way,
        threshold: int,
    ) -> Iterator[None]:
        """Have the parts written, one step a request; raises as `Parts` does."""
        self._parts = Parts(out, self._peers, layout, way, threshold)
        if out.remote is not None:
            self._origins.add(out.remote.origin)
            yield from self._parts.from_origin(*out.remote)
            return
        if self._here is None:
            self._here = Here(self._device)
        yield from self._parts.from_chunks(extractor, self._here)

    @property
    def has_begun(self) -> bool:
        """Whether holders have been told of the transfer that runs."""
        return self._parts is not None

    def ended(self) -> bool:
        """Whether nobody writes for this transfer any more."""
        parts, self._parts = self._parts, None
        return parts is None or not parts.unanswered

    def let_go(self) -> None:
        """Have all holders drop the places of this sender; does not wait."""
        for origin in self._origins:
            origin.let_go(self._peers.address)
        if self._here is not None:
            self._here.let_go(self._peers.address)

    def close(self) -> None:
        """Let go, and end this process's own threads."""
        self.let_go()
        if self._here is not None:
            self._here.close()
            self._here = None
