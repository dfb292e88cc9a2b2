"""Collectives of large CPU tensors, in the shared memory of one host.

Each rank has two slots of memory that the others map. In a *round*, every rank writes its data for
the others into one of its slots, notifies them by a socket, and reads their data. The next round
uses the other slot (double buffering). A slot is overwritten only after all ranks have read it:
they notify of round k + 1 after reading round k, and this rank receives that before round k + 2.

Tensors are processed piece by piece. An all-reduce is a reduce-scatter and an all-gather of each
piece: each rank reduces its share, and the results are gathered in the next round. Values are
reduced in rank order, so all ranks get the same bits, equal to those of a small tensor.

A thread executes the collectives in the order of their launch.
"""

from __future__ import annotations

import queue
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from lazygt.net.sockets import PeerSocket
from lazygt.runtime.arenas import ALIGNMENT, Arena
from lazygt.runtime.collectives.backends import Work, as_bytes, reduce_in_order

# -- base class of backends that execute collectives on a thread, in launch order ------------------

_CLOSE_SECONDS = 5.0  # a running collective ends at once if the connections are closed


Parts = list[torch.Tensor]


class InTurn(ABC):
    """`Backend` with collectives on a thread of its own; after a failure, none run.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def close(self) -> None:
        """Release everything after the current collective; close connections before.

        Waits for the end, since a process that ends meanwhile would stop the thread within torch's
        C++, which aborts.
        """
        self._failure = self._failure or ConnectionError("this rank has left")
        self._tasks.put(None)
        if self._thread is None:
            self._close()
        else:
            self._thread.join(_CLOSE_SECONDS)

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._all_reduce(buffer, op))

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._all_gather(as_bytes(buffer), as_bytes(sent)))

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        """See `Backend`."""
        return self._enqueue(lambda: self._reduce_scatter(buffer, sent, op))

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        """See `Backend`."""
        received = list(as_bytes(buffer).split([count * buffer.itemsize for count in into]))
        chunks = list(as_bytes(sent).split([count * sent.itemsize for count in out]))
        return self._enqueue(lambda: self._all_to_all(received, chunks))

    @abstractmethod
    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        """Do ``all_reduce`` on the thread."""

    @abstractmethod
    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        """Do ``all_gather`` on the thread, with both tensors as bytes."""

    @abstractmethod
    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None: ...

    @abstractmethod
    def _all_to_all(self, received: Parts, chunks: Parts) -> None:
        """Do ``all_to_all`` on the thread: bytes to each rank, and buffers for those of each."""

    def _enqueue(self, run: Callable[[], None]) -> Work:
        """Queue a collective for the thread; after a failure, return it failed."""
        task = _Task(run)
        if self._failure is not None:
            task.end(self._failure)
            return task
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_tasks, name=self._name, daemon=True)
            self._thread.start()
        return task

    def _run_tasks(self) -> None:
        """Execute queued collectives until ``close``; after a failure, fail the rest."""
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    task.run()
            except BaseException as error:  # noqa: BLE001 - raised by the task's `wait`
                self._failure = error
            task.end(self._failure)
            del task
        self._close()

    def _close(self) -> None:  # noqa: B027 - one has nothing
        """Release all resources: no collective runs any more."""


class _Task:
    """Collective for the thread to execute."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None) -> None:
        """Release the waiting thread."""
        self._failure = failure
        self._ended.set()

    def wait(self) -> None:
        """See `Work`. Every wait of the thread has a timeout."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure


# -- shared memory of one host --------------------------------------------------------------------

SLOT_BYTES = 4 << 20
"""Bytes of a slot: small enough that written data is still in a CPU cache when it is read."""

_ROUND_NOTICE = struct.Struct("<QQQ")  # round number, rounds still needed, offset of the slot


class SharedMemoryBackend(InTurn):
    """Shared-memory collectives of one axis, for CPU tensors of ranks on one host.

    Args:
        peers: the ranks of the axis in their order; None for this rank.

    Raises:
        OSError: another rank has left, or did not come in time.
    """

    def __init__(self, peers: Sequence[PeerSocket | None]) -> None:
        super().__init__("lazygt-shared")
        self.peers = tuple(peers)
        self._rank_index = self.peers.index(None)
        self._share_bytes = SLOT_BYTES // len(self.peers) // ALIGNMENT * ALIGNMENT
        self._arenas = [Arena.create(2 * SLOT_BYTES)]
        self._arenas += _exchange_arenas(self.peers, self._arenas[0].fd)
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._offset = 0
        self._round_number = 0

    def _close(self) -> None:
        self._slots.clear()
        for arena in self._arenas:
            arena.close()

    # -- rounds ------------------------------------------------------------------------------

    def _slot(self, rank: int, offset: int) -> torch.Tensor:
        """Return a slot, as bytes."""
        if (rank, offset) not in self._slots:
            arena = self._arenas[
                0 if rank == self._rank_index else 1 + rank - (rank > self._rank_index)
            ]
            self._slots[rank, offset] = arena.view(offset, SLOT_BYTES)
        return self._slots[rank, offset]

    def _next_slot(self) -> torch.Tensor:
        """Return the slot to write in the next round."""
        if not self._offset:
            self._offset = self._arenas[0].allocate(2 * SLOT_BYTES).offset
        return self._slot(self._rank_index, self._offset + self._round_number % 2 * SLOT_BYTES)

    def _finish_round(self, more: int = 0) -> tuple[dict[int, torch.Tensor], int]:
        """Notify of this rank's written slot; return the other ranks' written slots, by rank.

        Args:
            more: number of further rounds that this rank needs.

        Returns:
            The slots, and the maximum of ``more`` over the ranks.
        """
        offset = self._offset + self._round_number % 2 * SLOT_BYTES
        for peer in self.peers:
            if peer is not None:
                peer.send(memoryview(_ROUND_NOTICE.pack(self._round_number, more, offset)))
        written = {}
        notice = bytearray(_ROUND_NOTICE.size)
        for rank, peer in enumerate(self.peers):
            if peer is not None:
                peer.receive(memoryview(notice))
                number, remote_more, offset = _ROUND_NOTICE.unpack(notice)
                if number != self._round_number:
                    raise ConnectionError(
                        f"rank {rank} is in round {number}, not {self._round_number}"
                    )
                more = max(more, remote_more)
                written[rank] = self._slot(rank, offset)
        self._round_number += 1
        return written, more

    # -- the collectives ---------------------------------------------------------------------

    def _all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        count = len(self.peers)
        for piece in buffer.split(self._share_bytes // buffer.itemsize * count):
            shares = split_evenly(piece, count)
            own_share = shares[self._rank_index]
            summands = self._exchange_shares(shares, own_share)
            reduced = self._next_slot()[: own_share.nbytes].view(own_share.dtype)
            reduce_in_order(summands, op, reduced)
            written, _ = self._finish_round()
            own_share.copy_(reduced)
            for rank, slot in written.items():
                as_bytes(shares[rank]).copy_(slot[: shares[rank].nbytes])

    def _reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> None:
        step = self._share_bytes // buffer.itemsize
        blocks = [block.split(step) for block in sent.view(len(self.peers), -1).unbind()]
        for result, *shares in zip(buffer.split(step), *blocks, strict=True):
            reduce_in_order(self._exchange_shares(shares, result), op, result)

    def _exchange_shares(self, shares: Parts, like: torch.Tensor) -> Parts:
        """Send each rank its share; return all ranks' shares for this rank, in rank order."""
        slot = self._next_slot()
        for rank, share in enumerate(shares):
            if rank != self._rank_index:
                self._share_region(slot, rank, share.nbytes).copy_(as_bytes(share))
        written, _ = self._finish_round()
        summands = [shares[self._rank_index]] * len(shares)
        for rank, remote_slot in written.items():
            summands[rank] = self._share_region(remote_slot, self._rank_index, like.nbytes).view(
                like.dtype
            )
        return summands

    def _share_region(self, slot: torch.Tensor, rank: int, nbytes: int) -> torch.Tensor:
        """Return the region of a slot for one rank."""
        return slot[rank * self._share_bytes : rank * self._share_bytes + nbytes]

    def _all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> None:
        blocks = buffer.view(len(self.peers), -1)
        blocks[self._rank_index].copy_(sent)
        for start in range(0, sent.numel(), SLOT_BYTES):
            piece = sent[start : start + SLOT_BYTES]
            self._next_slot()[: piece.numel()].copy_(piece)
            written, _ = self._finish_round()
            for rank, slot in written.items():
                blocks[rank, start : start + piece.numel()].copy_(slot[: piece.numel()])

    def _all_to_all(self, received: Parts, sent: Parts) -> None:
        received[self._rank_index].copy_(sent[self._rank_index])
        largest = max(block.numel() for block in sent)
        more, start = 1, 0
        while more:  # until the largest block of any rank is sent
            slot, stop = self._next_slot(), start + self._share_bytes
            for rank, block in enumerate(sent):
                if rank != self._rank_index:
                    chunk = block[start:stop]
                    self._share_region(slot, rank, chunk.numel()).copy_(chunk)
            written, more = self._finish_round(max(-(-(largest - stop) // self._share_bytes), 0))
            for rank, remote_slot in written.items():
                chunk = received[rank][start:stop]
                chunk.copy_(self._share_region(remote_slot, self._rank_index, chunk.numel()))
            start = stop


def _exchange_arenas(peers: Sequence[PeerSocket | None], fd: int) -> Iterator[Arena]:
    """Send this rank's arena to the others; yield theirs, in rank order."""
    remote_peers = [peer for peer in peers if peer is not None]
    for peer in remote_peers:
        peer.send_descriptor(fd)
    for peer in remote_peers:
        yield Arena.attach(peer.receive_descriptor())


def split_evenly(piece: torch.Tensor, count: int) -> Parts:
    """Split a piece into ``count`` shares, the last ones perhaps empty."""
    size = -(-piece.numel() // count)
    return [piece[rank * size : (rank + 1) * size] for rank in range(count)]
