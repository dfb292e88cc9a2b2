"""Collectives of large tensors between ranks on several hosts, over their connections.

Tensors go piece by piece. An all-reduce is a reduce-scatter and an all-gather of each piece: each
rank reduces its part in rank order, and sends the result to all, with the same bits as on one host.
While others' parts of a piece are in flight, those of the next one are sent; each rank sends as
many bytes as in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lazygt.runtime.collectives.backends import as_bytes, reduce_in_order
from lazygt.runtime.collectives.in_turn import InTurn, Parts
from lazygt.runtime.collectives.shared_backend import cut
from lazygt.runtime.collectives.sockets import Peer

PIECE_BYTES = 1 << 20
"""Of what goes to one rank at a time."""


class PeerBackend(InTurn):
    """This rank's end of an axis. For CPU tensors.

    Args:
        peers: the ranks of the axis in their order; None for this one.
    """

    def __init__(self, peers: Sequence[Peer | None]) -> None:
        super().__init__("lazygt-peers")
        self.peers = tuple(peers)
        self._me = self.peers.index(None)

    # -- the collectives ---------------------------------------------------------------------

    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        count = len(self.peers)
        step = PIECE_BYTES // buffer.itemsize * count
        pieces = [cut(piece, count) for piece in buffer.split(step)]

        def reduce(number: int) -> None:
            here = pieces[number][self._me]
            reduce_in_order(self._summands(here, here), op, here)
            self._send([here] * count)
            if number:
                self._receive(pieces[number - 1])

        _in_rounds(len(pieces), lambda number: self._send(pieces[number]), reduce)
        self._receive(pieces[-1])

    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None:
        step = PIECE_BYTES // buffer.itemsize
        rows = [row.split(step) for row in sent.view(len(self.peers), -1).unbind()]
        results = buffer.split(step)

        def reduce(number: int) -> None:
            into = results[number]
            reduce_in_order(self._summands(rows[self._me][number], into), op, into)

        _in_rounds(len(results), lambda number: self._send([row[number] for row in rows]), reduce)

    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        rows = buffer.view(len(self.peers), -1)
        self._all_to_all(list(rows.unbind()), [sent] * len(self.peers))

    def _all_to_all(self, parts: Parts, pieces: Parts) -> None:
        parts[self._me].copy_(pieces[self._me])
        largest = max(each.numel() for each in (*parts, *pieces))

        def there(whole: Parts, number: int) -> Parts:
            start = number * PIECE_BYTES
            return [each[start : start + PIECE_BYTES] for each in whole]

        _in_rounds(
            -(-largest // PIECE_BYTES),
            lambda number: self._send(there(pieces, number)),
            lambda number: self._receive(there(parts, number)),
        )

    # -- rounds ------------------------------------------------------------------------------

    def _send(self, parts: Parts) -> None:
        """Send each rank its part."""
        for peer, part in zip(self.peers, parts, strict=True):
            if peer is not None:
                peer.send(_data(part))

    def _receive(self, parts: Parts) -> None:
        """Receive a part from each rank."""
        for peer, part in zip(self.peers, parts, strict=True):
            if peer is not None:
                peer.receive(_data(part))

    def _summands(self, here: torch.Tensor, like: torch.Tensor) -> Parts:
        """Receive all ranks' parts for this one; return them in rank order."""
        parts = [here if peer is None else torch.empty_like(like) for peer in self.peers]
        self._receive(parts)
        return parts


def _in_rounds(count: int, send: Callable[[int], None], receive: Callable[[int], None]) -> None:
    """Pipeline rounds: send the next round's parts before receiving this round's."""
    for number in range(count + 1):
        if number < count:
            send(number)
        if number:
            receive(number - 1)


def _data(part: torch.Tensor) -> memoryview:
    return as_bytes(part).numpy().data
