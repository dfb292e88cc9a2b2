"""Collectives of large tensors between ranks on several hosts, over their connections.

Tensors are sent piece by piece. An all-reduce is a reduce-scatter and an all-gather of each
piece: each rank reduces its share in rank order and sends the result to all, with the same bits
as on one host. Pieces are pipelined: the next one is sent while the last one is in flight. Each
rank sends as many bytes as in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lazygt.net.sockets import Peer
from lazygt.runtime.collectives.backends import memory_of, reduce_in_order
from lazygt.runtime.collectives.shared_backend import InTurn, Parts, split_evenly

PIECE_BYTES = 1 << 20
"""Bytes of the data that is sent to one rank at a time."""


class PeerBackend(InTurn):
    """Collectives of one axis over connections, for CPU tensors of ranks on several hosts.

    Args:
        peers: the ranks of the axis in their order; None for this one.
    """

    def __init__(self, peers: Sequence[Peer | None]) -> None:
        super().__init__("lazygt-peers")
        self.peers = tuple(peers)
        self._rank_index = self.peers.index(None)

    # -- the collectives ---------------------------------------------------------------------

    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        count = len(self.peers)
        step = PIECE_BYTES // buffer.itemsize * count
        pieces = [split_evenly(piece, count) for piece in buffer.split(step)]

        def reduce(number: int) -> None:
            own_share = pieces[number][self._rank_index]
            reduce_in_order(self._receive_shares(own_share, own_share), op, own_share)
            self._send([own_share] * count)
            if number:
                self._receive(pieces[number - 1])

        _pipelined(len(pieces), lambda number: self._send(pieces[number]), reduce)
        self._receive(pieces[-1])

    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None:
        step = PIECE_BYTES // buffer.itemsize
        blocks = [block.split(step) for block in sent.view(len(self.peers), -1).unbind()]
        results = buffer.split(step)

        def reduce(number: int) -> None:
            result = results[number]
            reduce_in_order(
                self._receive_shares(blocks[self._rank_index][number], result), op, result
            )

        _pipelined(
            len(results), lambda number: self._send([block[number] for block in blocks]), reduce
        )

    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        blocks = buffer.view(len(self.peers), -1)
        self._all_to_all(list(blocks.unbind()), [sent] * len(self.peers))

    def _all_to_all(self, received: Parts, sent: Parts) -> None:
        received[self._rank_index].copy_(sent[self._rank_index])
        largest = max(block.numel() for block in (*received, *sent))

        def chunks(blocks: Parts, number: int) -> Parts:
            start = number * PIECE_BYTES
            return [block[start : start + PIECE_BYTES] for block in blocks]

        _pipelined(
            -(-largest // PIECE_BYTES),
            lambda number: self._send(chunks(sent, number)),
            lambda number: self._receive(chunks(received, number)),
        )

    # -- rounds ------------------------------------------------------------------------------

    def _send(self, shares: Parts) -> None:
        """Send each rank its share."""
        for peer, share in zip(self.peers, shares, strict=True):
            if peer is not None:
                peer.send(memory_of(share))

    def _receive(self, shares: Parts) -> None:
        """Receive a share from each rank."""
        for peer, share in zip(self.peers, shares, strict=True):
            if peer is not None:
                peer.receive(memory_of(share))

    def _receive_shares(self, own_share: torch.Tensor, like: torch.Tensor) -> Parts:
        """Receive all ranks' shares for this rank; return them in rank order."""
        shares = [own_share if peer is None else torch.empty_like(like) for peer in self.peers]
        self._receive(shares)
        return shares


def _pipelined(count: int, send: Callable[[int], None], receive: Callable[[int], None]) -> None:
    """Pipeline rounds: send the next round's data before receiving this round's."""
    for number in range(count + 1):
        if number < count:
            send(number)
        if number:
            receive(number - 1)
