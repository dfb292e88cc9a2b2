"""Broadcast, each chunk at once: by sockets between CPUs, by NCCL between GPUs.

Sender and receivers form a group of their own. A broadcast cannot be taken back, so after a failure
or a change of members the next transfer makes a new group; the old one is let go in the background,
because letting it go may wait for a frozen rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lazygt.transfer.batches import Piece, Request, joined
from lazygt.transfer.control import Connection, Deadline, Message
from lazygt.transfer.direct import Direct
from lazygt.transfer.errors import TransferError
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.group import (
    Group,
    backend_for,
    conclude,
    finished,
    in_background,
    join,
    let_go,
)
from lazygt.transfer.holding import Holding
from lazygt.transfer.incoming import Block, Incoming
from lazygt.transfer.joints import Arrivals, Joints, JointWay
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout, layout_of
from lazygt.transfer.peer import Peer
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.spec import Manifest
from lazygt.transfer.staging import Staging

REQUEST_BYTES = 8 << 20
"""What a worker packs and broadcasts at a time."""

_FAILED_SECONDS = 0.3  # in which the control connection says who made a collective fail
_LOOK_SECONDS = 1e-3


class BroadcastTransferSender(Sender):
    """Sends each chunk at once to all receivers, by one collective a parameter.

    Args:
        device: where the bytes travel from: ``cpu`` (sockets) or ``cuda:N`` (NCCL). Parameters
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
        self._direct = Direct(self._peers, self._device)
        self._joints = Joints(self._peers, self._device)
        self._layout: Layout | None = None
        self._way: JointWay | None = None

    @property
    def threshold(self) -> int:
        return 0

    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        self._layout = layout_of(out.manifest, peers)
        if out.remote is None and self._layout.plain:
            self._way = None
            self._gather(out, peers)
        else:
            self._way = self._joints.way(out, self._layout)

    def _gather(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        """Have this process and the receivers form a group."""
        if self._group is not None and self._members == tuple(peers):
            return
        let_go(self._group)
        self._groups += 1
        self._members = tuple(peers)
        directory, name = os.path.dirname(self.address), str(self._groups)
        size, seconds = len(peers) + 1, out.deadline.remaining
        self._group = in_background(
            lambda: join(self._device, directory, name, 0, size, seconds), self._peers.wake
        )

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        if self._way is not None:
            return self._joints.invitation(peer), ()
        return {
            "group": self._groups,
            "backend": backend_for(self._device),
            "rank": self._members.index(peer) + 1,
            "size": len(self._members) + 1,
        }, ()

    def requests(
        self, out: Outgoing, extractor: Extractor, peers: Sequence[Peer]
    ) -> Iterator[None]:
        if self._way is None:
            yield from super().requests(out, extractor, peers)
            return
        assert self._layout is not None
        yield from self._direct.requests(out, extractor, self._layout, self._way, REQUEST_BYTES)

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
        told = self._direct.has_begun
        self._direct.ended()
        if not committed:
            self._part()
        if told and not committed:
            self._direct.let_go()

    def release(self) -> None:
        self._part()
        self._direct.close()

    def _part(self) -> None:
        """Leave all groups; nobody waits in those of the workers any more."""
        let_go(self._group)
        self._group = None
        self._joints.part()

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
        device: where the parameters are to be: ``cpu`` (sockets) or ``cuda:N`` (NCCL), of the same
            kind as the sender's.
        mesh, rank, placements: what this receiver holds; see `Receiver`.
    """

    strategy = BroadcastTransferSender.strategy

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        device: str | torch.device = "cpu",
        mesh: Mapping[str, int] | str | None = None,
        rank: int = 0,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._staging = Staging(self._device)
        self._group: Future[Group] | None = None
        self._number = 0
        directory = os.path.dirname(address)
        self._arrivals = Arrivals(self._device, directory, lambda: self._wake())
        holding = Holding.asked(mesh, rank, placements)
        super().__init__(address, name=name, expect=expect, holding=holding)

    def staging(self, begin: Message, link: Connection, extent: int) -> Tensor | None:
        if begin["backend"] != backend_for(self._device):
            raise TransferError(
                f"the sender broadcasts with {begin['backend']}, but this receiver's device is "
                f"{self._device}; give both the same kind of device"
            )
        if "joint" in begin:
            self._arrivals.invited(begin)
        elif self._group is None or self._number != begin["group"]:
            self._join(begin, link)
        return self._staging.buffer(extent)

    def receive(
        self, incoming: Incoming, data: Message, pieces: Sequence[Piece], link: Connection
    ) -> None:
        assert self._group is not None
        group = self._group.result()
        runs = [incoming.run(piece) for piece in joined(pieces)]
        works = [group.broadcast(run, incoming.deadline, self._wake) for run in runs]
        self._conclude(works, link)

    def coming(self, incoming: Incoming, message: Message, link: Connection) -> None:
        group = self._arrivals.joining(message["from"], incoming.deadline.remaining)
        while not group.done():
            self.wait_or_abort(link, incoming.deadline.remaining)
        self._arrivals.expect(incoming, message)

    def bring(
        self, incoming: Incoming, message: Message, blocks: Sequence[Block], link: Connection
    ) -> None:
        arrival = self._arrivals.take(message["number"])
        self._conclude([arrival.work], link)
        incoming.unpack(arrival.buffer, blocks, message["offsets"])
        self._arrivals.done(arrival)

    def dropped(self) -> None:
        self._arrivals.leave()
        self._leave()

    def _conclude(self, works: Sequence[Any], link: Connection) -> None:
        # sockets wake this thread; nothing says when a GPU has received
        look = _LOOK_SECONDS if self._device.type == "cuda" else 1.0
        while not finished(works):
            self.wait_or_abort(link, look)
        try:
            conclude(works, self._device)
        except RuntimeError:
            # it failed because another one did, whom the sender is about to name
            patience = Deadline(_FAILED_SECONDS)
            while not patience.expired:
                self.wait_or_abort(link, patience.remaining)
            raise

    def _leave(self) -> None:
        let_go(self._group)
        self._group = None

    def close(self) -> None:
        super().close()
        self.dropped()
        self._staging.close()

    def _join(self, begin: Message, link: Connection) -> None:
        self._leave()
        self._number = begin["group"]
        directory, name = os.path.dirname(self._address), str(begin["group"])
        rank, size = begin["rank"], begin["size"]
        seconds = float(begin["seconds"])
        self._group = in_background(
            lambda: join(self._device, directory, name, rank, size, seconds), self._wake
        )
        while not self._group.done():
            self.wait_or_abort(link, seconds)
        self._group.result()
