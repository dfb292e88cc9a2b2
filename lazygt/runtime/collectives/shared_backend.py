"""Collectives of large tensors in the host's memory, which the ranks of one axis share.

Each rank has two slots of memory that the others map. In a *round* every rank writes its data for
the others into one of its slots, notifies them by a socket, and reads the data that they have
written. The next round is in the other slot (double buffering). So a slot is written again only
when all have read it: they notify of round k + 1 after they have read round k, and this rank has
received that before it begins round k + 2.

Tensors go through the slots piece by piece. In an all-reduce each rank reduces its part of a piece,
and the results are gathered in the next round. Ranks' values are reduced in rank order, one after
another, from any slot: the same bits as of a small tensor, on every rank.

A thread executes the collectives, in their order of beginning.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from lazygt.runtime.arenas import ALIGNMENT, Arena
from lazygt.runtime.collectives.backends import as_bytes, reduce_in_order
from lazygt.runtime.collectives.in_turn import InTurn, Parts
from lazygt.runtime.collectives.sockets import Peer, PeerSocket

SLOT_BYTES = 4 << 20
"""Of each of a rank's two slots: so little that what was written is in a cache when it is read."""

_TOLD = struct.Struct("<QQQ")  # number of the round, of rounds still needed, offset of the slot


class SharedMemoryBackend(InTurn):
    """This rank's end of an axis. For CPU tensors.

    Args:
        peers: the ranks of the axis in their order; None for this one.

    Raises:
        OSError: another rank has left, or did not come in time.
    """

    def __init__(self, peers: Sequence[PeerSocket | None]) -> None:
        super().__init__("lazygt-shared")
        self.peers = tuple(peers)
        self._me = self.peers.index(None)
        self._piece = SLOT_BYTES // len(self.peers) // ALIGNMENT * ALIGNMENT
        self._arenas = [Arena.create(2 * SLOT_BYTES)]
        self._arenas += _exchanged(self.peers, self._arenas[0].fd)
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._offset = 0
        self._round = 0

    def _close(self) -> None:
        self._slots.clear()
        for arena in self._arenas:
            arena.close()

    # -- rounds ------------------------------------------------------------------------------

    def _slot(self, rank: int, offset: int) -> torch.Tensor:
        """Return a slot, as bytes."""
        if (rank, offset) not in self._slots:
            arena = self._arenas[0 if rank == self._me else 1 + rank - (rank > self._me)]
            self._slots[rank, offset] = arena.view(offset, SLOT_BYTES)
        return self._slots[rank, offset]

    def _mine(self) -> torch.Tensor:
        """Return the slot to write in the next round."""
        if not self._offset:
            self._offset = self._arenas[0].allocate(2 * SLOT_BYTES).offset
        return self._slot(self._me, self._offset + self._round % 2 * SLOT_BYTES)

    def _others(self, more: int = 0) -> tuple[dict[int, torch.Tensor], int]:
        """Report this rank's slot as written; return the other ranks' written slots, by rank.

        Args:
            more: number of rounds of this collective still needed here.

        Returns:
            The slots, and the number of rounds needed on any rank.
        """
        where = self._offset + self._round % 2 * SLOT_BYTES
        for peer in self.peers:
            if peer is not None:
                peer.send(memoryview(_TOLD.pack(self._round, more, where)))
        written = {}
        room = bytearray(_TOLD.size)
        for rank, peer in enumerate(self.peers):
            if peer is not None:
                peer.receive(memoryview(room))
                number, theirs, where = _TOLD.unpack(room)
                if number != self._round:
                    raise ConnectionError(f"rank {rank} is in round {number}, not {self._round}")
                more = max(more, theirs)
                written[rank] = self._slot(rank, where)
        self._round += 1
        return written, more

    # -- the collectives ---------------------------------------------------------------------

    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        count = len(self.peers)
        for piece in buffer.split(self._piece // buffer.itemsize * count):
            parts = cut(piece, count)
            mine = parts[self._me]
            summands = self._swap(parts, mine)
            made = self._mine()[: mine.nbytes].view(mine.dtype)
            reduce_in_order(summands, op, made)
            written, _ = self._others()
            mine.copy_(made)
            for rank, slot in written.items():
                as_bytes(parts[rank]).copy_(slot[: parts[rank].nbytes])

    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None:
        step = self._piece // buffer.itemsize
        rows = [row.split(step) for row in sent.view(len(self.peers), -1).unbind()]
        for made, *parts in zip(buffer.split(step), *rows, strict=True):
            reduce_in_order(self._swap(parts, made), op, made)

    def _swap(self, parts: Parts, like: torch.Tensor) -> Parts:
        """Give each rank its part; return all ranks' parts for this one, in rank order."""
        slot = self._mine()
        for rank, part in enumerate(parts):
            if rank != self._me:
                self._room(slot, rank, part.nbytes).copy_(as_bytes(part))
        written, _ = self._others()
        summands = [parts[self._me]] * len(parts)
        for rank, theirs in written.items():
            summands[rank] = self._room(theirs, self._me, like.nbytes).view(like.dtype)
        return summands

    def _room(self, slot: torch.Tensor, rank: int, nbytes: int) -> torch.Tensor:
        """Return the region of a slot for one rank."""
        return slot[rank * self._piece : rank * self._piece + nbytes]

    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        rows = buffer.view(len(self.peers), -1)
        rows[self._me].copy_(sent)
        for start in range(0, sent.numel(), SLOT_BYTES):
            piece = sent[start : start + SLOT_BYTES]
            self._mine()[: piece.numel()].copy_(piece)
            written, _ = self._others()
            for rank, slot in written.items():
                rows[rank, start : start + piece.numel()].copy_(slot[: piece.numel()])

    def _all_to_all(self, parts: Parts, pieces: Parts) -> None:
        parts[self._me].copy_(pieces[self._me])
        largest = max(piece.numel() for piece in pieces)
        more, start = 1, 0
        while more:  # as often as the largest piece of any rank needs
            slot, stop = self._mine(), start + self._piece
            for rank, piece in enumerate(pieces):
                if rank != self._me:
                    there = piece[start:stop]
                    self._room(slot, rank, there.numel()).copy_(there)
            written, more = self._others(max(-(-(largest - stop) // self._piece), 0))
            for rank, theirs in written.items():
                there = parts[rank][start:stop]
                there.copy_(self._room(theirs, self._me, there.numel()))
            start = stop


def _exchanged(peers: Sequence[PeerSocket | None], fd: int) -> Iterator[Arena]:
    """Send this rank's memory to the others; yield theirs, in their order."""
    there = [peer for peer in peers if peer is not None]
    for peer in there:
        peer.send_descriptor(fd)
    for peer in there:
        yield Arena.attach(peer.receive_descriptor())


def cut(piece: torch.Tensor, count: int) -> Parts:
    """Split a piece into ``count`` parts, the last ones perhaps empty."""
    size = -(-piece.numel() // count)
    return [piece[rank * size : (rank + 1) * size] for rank in range(count)]


# -- collectives of large tensors between ranks on several hosts, over their connections -----------
# Tensors go piece by piece. An all-reduce is a reduce-scatter and an all-gather of each piece:
# each rank reduces its part in rank order, and sends the result to all, with the same bits as on
# one host. While others' parts of a piece are in flight, those of the next one are sent; each
# rank sends as many bytes as in a ring all-reduce.

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
