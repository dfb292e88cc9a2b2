"""Groups between those who have a model's blocks and its receivers: the sender's and their ends.

There is a group for each holder and each different holding: the holder is rank 0, the receivers of
that holding are the others. The sender itself is in none of them. What a receiver is told *comes*
is received in the background; several holders may send to it at once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazygt.transfer.control import Message
from lazygt.transfer.group import Group, backend_for, in_background, join, let_go
from lazygt.transfer.incoming import Incoming
from lazygt.transfer.meetings import marker
from lazygt.transfer.orders import Meeting, Place
from lazygt.transfer.origins import Origin, Written
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout
from lazygt.transfer.peer import Peer
from lazygt.transfer.peers import Peers


class Joints:
    """The groups of one sender, kept as long as the members are the same.

    Args:
        device: of the receivers; it decides between sockets and NCCL.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._backend = peers, backend_for(device)
        self._directory = os.path.dirname(peers.address)
        self._number = 0
        self._origin: Callable[[], Origin | None] = lambda: None
        self._holdings: Mapping[Peer, int] = {}
        self._workers = 0

    @property
    def is_open(self) -> bool:
        """Whether there are groups."""
        return bool(self._workers)

    def way(self, out: Outgoing, layout: Layout) -> JointWay:
        """The way for a transfer, in new groups if the members have changed."""
        origin = None if out.remote is None else out.remote.origin
        if not self.is_open or self._origin() is not origin or self._holdings != layout.of:
            self.part()
            self._number += 1
            marker(self._directory, self._number).touch()
            self._workers = 1 if origin is None else origin.mesh.world_size
            self._origin = _nobody if origin is None else weakref.ref(origin)
            self._holdings = dict(layout.of)
        return JointWay(out, self._peers, layout, self._directory, self._number, self._backend)

    def invitation(self, peer: Peer) -> Message:
        """What a receiver must know to join its groups."""
        holding = self._holdings[peer]
        there = [each for each, held in self._holdings.items() if held == holding]
        return {
            "joint": self._number,
            "names": [name_of(self._number, rank, holding) for rank in range(self._workers)],
            "backend": self._backend,
            "rank": there.index(peer) + 1,
            "size": len(there) + 1,
        }

    def part(self) -> None:
        """End the groups: nobody waits in them any more."""
        if self.is_open:
            marker(self._directory, self._number).unlink(missing_ok=True)
        self._workers, self._holdings = 0, {}


class JointWay:
    """The way of one transfer through the groups of a `Joints`; see `Way`."""

    offset = None

    def __init__(
        self,
        out: Outgoing,
        peers: Peers,
        layout: Layout,
        directory: str,
        number: int,
        backend: str,
    ) -> None:
        self._out, self._peers, self._layout = out, peers, layout
        self._directory, self._number, self._backend = directory, number, backend
        self.live = (number,)

    def expect(self, largest: int) -> None:
        """See `Way`: whoever packs or receives a request makes room for it then."""

    def is_free(self, rank: int) -> bool:
        """See `Way`; receivers take what comes in turn, so nothing is ahead of them for long."""
        return True

    def open(self, rank: int, number: int, holding: int, extent: int) -> Place:
        """See `Way`."""
        there = self._layout.holders(holding, self._peers.active)
        coming = {"kind": "coming", "transfer": self._out.number}
        for peer in there:
            message = {**coming, "from": rank, "number": number, "extent": extent}
            self._peers.tell(peer, message, self._out.deadline, ())
        return Meeting(
            self._directory,
            self._number,
            name_of(self._number, rank, holding),
            len(there) + 1,
            self._backend,
            self._out.deadline.remaining,
            extent,
        )

    def told(self, peer: Peer, answer: Written) -> dict[str, Any]:
        """See `Way`."""
        return {"number": answer.number}


class Arrival(NamedTuple):
    """A request on its way: where it goes, and the broadcast."""

    buffer: Tensor
    work: Any


class Arrivals:
    """A receiver's ends of the groups, and the requests that are on their way in them.

    Args:
        device: where the bytes arrive.
        wake: called when one may have.
    """

    def __init__(self, device: torch.device, directory: str, wake: Callable[[], object]) -> None:
        self._device, self._directory, self._wake = device, directory, wake
        self._number = 0
        self._invitation: Message = {}
        self._groups: dict[int, Future[Group]] = {}
        self._coming: dict[int, Arrival] = {}
        self._spare: list[Tensor] = []

    def invited(self, begin: Message) -> None:
        """Leave the groups that there are, unless they are those of this invitation."""
        if self._number != begin["joint"]:
            self.leave()
            self._number, self._invitation = begin["joint"], begin

    def joining(self, rank: int, seconds: float) -> Future[Group]:
        """The group with a holder; joined with its first request, since it may have none."""
        if rank not in self._groups:
            name, mine, size = (self._invitation[key] for key in ("names", "rank", "size"))
            self._groups[rank] = in_background(
                lambda: join(self._device, self._directory, name[rank], mine, size, seconds),
                self._wake,
            )
        return self._groups[rank]

    def expect(self, incoming: Incoming, message: Message) -> None:
        """Begin to receive a request from a holder whose group is joined."""
        group = self._groups[message["from"]].result()
        buffer = self._room(message["extent"])
        work = group.broadcast(buffer[: message["extent"]], incoming.deadline, self._wake)
        self._coming[message["number"]] = Arrival(buffer, work)

    def take(self, number: int) -> Arrival:
        """A request that was expected."""
        return self._coming.pop(number)

    def done(self, arrival: Arrival) -> None:
        """Its buffer may be used again."""
        self._spare.append(arrival.buffer)

    def leave(self) -> None:
        """Leave all groups, without waiting; what is on its way is lost."""
        for group in self._groups.values():
            let_go(group)
        # the old groups may still write into buffers that are on their way: those are not used
        self._number, self._groups, self._coming = 0, {}, {}

    def _room(self, extent: int) -> Tensor:
        while self._spare:
            buffer = self._spare.pop()
            if buffer.numel() >= extent:
                return buffer
        return torch.empty(extent, dtype=torch.uint8, device=self._device)


def name_of(number: int, rank: int, holding: int) -> str:
    """The group of a holder and a holding in a set of groups."""
    return f"{number}-{rank}-{holding}"


def _nobody() -> None:
    """The origin of what this process has itself."""
