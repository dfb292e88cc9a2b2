"""Broadcast with torch.distributed: Gloo between CPUs, NCCL between GPUs. Each chunk at once.

Sender and receivers form a process group of their own beside torch's default one. A collective
cannot be taken back, so after a failure or a change of members the next transfer makes a new
group; the old one is let go in the background, because letting it go may wait for a frozen rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lazygt.transfer.batches import Piece, Request, joined
from lazygt.transfer.control import Connection, Deadline, Message
from lazygt.transfer.errors import TransferError
from lazygt.transfer.group import (
    Group,
    backend_for,
    conclude,
    finished,
    in_background,
    let_go,
)
from lazygt.transfer.incoming import Incoming
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.peers import Peer
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.spec import Manifest
from lazygt.transfer.staging import Staging

_FAILED_SECONDS = 0.3  # in which the control connection says who made a collective fail
_LOOK_SECONDS = 1e-3


class BroadcastTransferSender(Sender):
    """Sends each chunk at once to all receivers, by one collective a parameter.

    Args:
        device: where the bytes travel from: ``cpu`` (Gloo) or ``cuda:N`` (NCCL). Parameters
            elsewhere are brought there first.
        verify, skip_unchanged: see `Sender`.
    """

    strategy = "broadcast"

    def __init__(
        self,
        *,
        device: str | torch.device = "cpu",
        verify: str = "crc32",
        skip_unchanged: bool = False,
    ) -> None:
        super().__init__(verify=verify, skip_unchanged=skip_unchanged)
        self._device = torch.device(device)
        self._group: Future[Group] | None = None
        self._members: tuple[Peer, ...] = ()
        self._groups = 0

    @property
    def threshold(self) -> int:
        return 0

    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        if self._group is not None and self._members == tuple(peers):
            return
        let_go(self._group)
        self._groups += 1
        self._members = tuple(peers)
        directory, number = os.path.dirname(self.address), self._groups
        size, seconds = len(peers) + 1, out.deadline.remaining
        self._group = in_background(
            lambda: Group(self._device, directory, number, 0, size, seconds), self._peers.wake
        )

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        return {
            "group": self._groups,
            "backend": backend_for(self._device),
            "rank": self._members.index(peer) + 1,
            "size": len(self._members) + 1,
        }, ()

    def carry(self, out: Outgoing, request: Request) -> None:
        group = self._joined(out)
        runs = [self._run(out, piece) for piece in joined(request)]
        checks = [0] * len(request)
        if out.check is not None:
            checks = self._crew.check([self._run(out, piece) for piece in request], out.check)
        self.announce(out, request, checks)
        works = [group.broadcast(run, out.deadline, self._peers.wake) for run in runs]
        # one request behind: receivers check their bytes while the next ones travel
        self._peers.wait(
            lambda peer: peer.staged >= out.requests - 1, out.deadline, lambda: finished(works)
        )
        try:
            conclude(works, self._device)
        except RuntimeError as error:
            self._peers.wait(lambda _: True, Deadline(_FAILED_SECONDS), lambda: False)
            raise TransferError(
                f"a broadcast failed, though all receivers live: {error}"
            ) from error

    def ended(self, out: Outgoing, *, committed: bool) -> None:
        if not committed:
            self.release()

    def release(self) -> None:
        let_go(self._group)
        self._group = None

    def _joined(self, out: Outgoing) -> Group:
        future = self._group
        assert future is not None
        self._peers.wait(lambda _: True, out.deadline, future.done)
        return future.result()

    def _run(self, out: Outgoing, piece: Piece) -> Tensor:
        whole = out.travelling(piece.param)
        return whole[piece.begin : piece.begin + piece.nbytes].to(self._device)


class BroadcastTransferReceiver(Receiver):
    """Receives what a `BroadcastTransferSender` broadcasts; see `Receiver`.

    Args:
        device: where the parameters are to be: ``cpu`` (Gloo) or ``cuda:N`` (NCCL), of the same
            kind as the sender's.
    """

    strategy = BroadcastTransferSender.strategy

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._staging = Staging(self._device)
        self._group: Future[Group] | None = None
        self._number = 0
        super().__init__(address, name=name, expect=expect)

    def staging(self, begin: Message, link: Connection, extent: int) -> Tensor | None:
        if begin["backend"] != backend_for(self._device):
            raise TransferError(
                f"the sender broadcasts with {begin['backend']}, but this receiver's device is "
                f"{self._device}; give both the same kind of device"
            )
        if self._group is None or self._number != begin["group"]:
            self._join(begin, link)
        return self._staging.buffer(extent)

    def receive(
        self, incoming: Incoming, data: Message, pieces: Sequence[Piece], link: Connection
    ) -> None:
        assert self._group is not None
        group = self._group.result()
        runs = [incoming.run(piece) for piece in joined(pieces)]
        works = [group.broadcast(run, incoming.deadline, self._wake) for run in runs]
        while not finished(works):
            self.wait_or_abort(link, _LOOK_SECONDS)
        conclude(works, self._device)

    def dropped(self) -> None:
        let_go(self._group)
        self._group = None

    def close(self) -> None:
        super().close()
        self.dropped()
        self._staging.close()

    def _join(self, begin: Message, link: Connection) -> None:
        self.dropped()
        self._number = begin["group"]
        directory = os.path.dirname(self._address)
        number, rank, size = (begin[key] for key in ("group", "rank", "size"))
        seconds = float(begin["seconds"])
        self._group = in_background(
            lambda: Group(self._device, directory, number, rank, size, seconds), self._wake
        )
        while not self._group.done():
            self.wait_or_abort(link, seconds)
        self._group.result()
