"""Broadcast: by sockets between CPUs, by NCCL between GPUs.

There is a group for each source process and each different layout of receivers: rank 0 is the
source, the other ranks are the receivers of that layout, so a layout with one receiver means point
to point. A sender without blocks is in no group. Contiguous blocks are broadcast in place, from and
to their own memory.

A broadcast cannot be cancelled: after a failure or a change of members the next transfer makes new
groups. A source that waits in an old group polls the marker file of its set of groups, which the
sender removes when a transfer fails. Groups are left in the background, because leaving one may
wait for a frozen rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.host.files import create
from lazygt.transfer.control import ControlMessage, Deadline
from lazygt.transfer.copier import as_bytes
from lazygt.transfer.copy_request import CopyReply
from lazygt.transfer.layout import Request, packed
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.receiver import Receiver, ReceiverOptions
from lazygt.transfer.sender import Sender
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports import ReceiveBuffers, ReceiverEnd, SenderEnd, Wait
from lazygt.transfer.transports.broadcast_group import (
    HOST,
    BroadcastGroup,
    backend_for,
    conclude,
    finished,
    in_background,
    join,
    let_go,
)
from lazygt.transfer.version import Block, StagedVersion

STRATEGY = "broadcast"
REQUEST_BYTES = 32 << 20
"""Maximum bytes of a broadcast request, and of a packing buffer."""

_BLAME_SECONDS = 0.3  # for the control connection to name the rank behind a failed collective
_LOOK_SECONDS = 1e-3


class GroupAddress(NamedTuple):
    """A group of one source process (rank 0) and the receivers of one layout.

    Attributes:
        directory: the sender's directory; the ranks meet there.
        number: number of the set of groups; its `marker` exists as long as they are valid.
        name: name of this group.
        size: number of its ranks.
        backend: see `broadcast_group`.
        seconds: seconds until the transfer's deadline.
        extent: bytes of the request, if all of it is packed.
    """

    directory: str
    number: int
    name: str
    size: int
    backend: str
    seconds: float
    extent: int


def marker(directory: str, number: int) -> Path:
    """Return the path of a file that exists as long as a set of groups is valid."""
    return Path(directory) / f"groups-{number}"


def name_of(number: int, rank: int, layout: int) -> str:
    """Return the name of a source rank's group for a layout, in a set of groups."""
    return f"{number}-{rank}-{layout}"


# -- the source ----------------------------------------------------------------------------


class GroupMemory:
    """`Destination` in the memory of receivers: a set of groups joined as rank 0.

    Args:
        device: device of the values; NCCL sends from there, sockets from the host.
    """

    def __init__(self, device: torch.device, place: GroupAddress) -> None:
        self.borrows = _device_for(place.backend, device)
        self._groups: dict[str, Future[BroadcastGroup]] = {}
        self._buffer: Tensor | None = None
        self._changed = threading.Event()

    def view(self, place: GroupAddress, offset: int, nbytes: int) -> Tensor:
        """Return a part of the packing buffer."""
        if self._buffer is None or self._buffer.numel() < place.extent:
            self._buffer = torch.empty(place.extent, dtype=torch.uint8, device=self.borrows)
        return self._buffer[offset : offset + nbytes]

    def deliver(self, place: GroupAddress, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Broadcast the blocks, and wait until this process has sent them.

        Raises:
            TransferError: the transfer was aborted, or its receivers were too late.
        """
        deadline = Deadline(place.seconds)
        try:
            _check(place, deadline)
            group = self._join(place, deadline)
            works = [group.broadcast(run, deadline, self._changed.set) for run in runs]
            self._wait(lambda: finished(works), place, deadline)
            conclude(works, self.borrows)
        except (RuntimeError, TransferError) as error:
            # the group's threads may still read the buffer, so it is never packed again
            self._buffer = None
            let_go(self._groups.pop(place.name, None))
            is_late = deadline.expired and not isinstance(error, TransferError)
            raise TransferError(
                f"a broadcast failed: {_timeout_message(deadline) if is_late else error}"
            ) from error
        return ()

    def close(self) -> None:
        """See `Destination`."""
        while self._groups:
            let_go(self._groups.popitem()[1])

    def _join(self, place: GroupAddress, deadline: Deadline) -> BroadcastGroup:
        """Return the group of a place, joined as rank 0 on first use."""
        device = self.borrows
        if place.name not in self._groups:
            self._groups[place.name] = in_background(
                lambda: join(
                    device, place.directory, place.name, 0, place.size, deadline.remaining
                ),
                self._changed.set,
            )
        future = self._groups[place.name]
        self._wait(future.done, place, deadline)
        return future.result()

    def _wait(self, done: Callable[[], bool], place: GroupAddress, deadline: Deadline) -> None:
        """Wait until ``done``; raise TransferError when the transfer has failed."""
        while not done():
            _check(place, deadline)
            self._changed.wait(_LOOK_SECONDS)
            self._changed.clear()


def _device_for(backend: str, device: torch.device) -> torch.device:
    """Return the device from which a process on ``device`` sends with a backend."""
    if backend == HOST:
        return torch.device("cpu")
    if device.type != "cuda":
        raise ProtocolError(
            f"the sender broadcasts with {backend}, but this worker computes on the "
            f"{device}; give BroadcastTransferSender device='cpu'"
        )
    return torch.device("cuda", device.index or torch.cuda.current_device())


def _check(place: GroupAddress, deadline: Deadline) -> None:
    """Raise TransferError if the transfer was aborted, or its deadline has passed."""
    if not marker(place.directory, place.number).exists():
        raise TransferError("the sender has given the transfer up")
    if deadline.expired:
        raise TransferError(_timeout_message(deadline))


def _timeout_message(deadline: Deadline) -> str:
    """Return the message of a timeout, the same from any thread."""
    return f"receivers did not take it within {deadline.seconds:g} s"


# -- the sender ----------------------------------------------------------------------------


class BroadcastGroups(SenderEnd):
    """Sender's end: the set of groups, reused while its members are the same.

    Args:
        device: device of the receivers; it decides between sockets and NCCL.
    """

    strategy, kind = STRATEGY, "process_group"

    def __init__(self, device: torch.device) -> None:
        self.device, self._backend = device, backend_for(device)
        self._layout_of: Mapping[ReceiverLink, int] = {}
        self._directory = ""

    @property
    def threshold(self) -> int:  # type: ignore[override]
        """Bytes of a request."""
        return REQUEST_BYTES

    def begin(self, transfer: Transfer) -> None:
        """See `SenderEnd`: new groups if the members have changed."""
        if self._layout_of != transfer.layouts.of:
            self.forget()
            self.number += 1
            self._directory = transfer.directory
            os.close(create(marker(self._directory, self.number)))
            self._layout_of = dict(transfer.layouts.of)

    def invitation(self, transfer: Transfer, receiver: ReceiverLink) -> ControlMessage:
        """Return the data for a receiver to join its groups."""
        layout = self._layout_of[receiver]
        members = [
            other for other, other_layout in self._layout_of.items() if other_layout == layout
        ]
        return {
            "groups": self.number,
            "names": [name_of(self.number, rank, layout) for rank in range(transfer.ranks)],
            "backend": self._backend,
            "rank": members.index(receiver) + 1,
            "size": len(members) + 1,
        }

    def open(self, transfer: Transfer, rank: int, number: int, request: Request) -> GroupAddress:
        """Announce a request to its receivers, and return its group."""
        layout = request[0].layout
        receivers = transfer.holders(layout)
        blocks = [[piece.param, piece.target] for piece in request]
        for receiver in receivers:
            transfer.send(receiver, "coming", {"from": rank, "number": number, "blocks": blocks})
        _, extent = packed(request)
        return GroupAddress(
            self._directory,
            self.number,
            name_of(self.number, rank, layout),
            len(receivers) + 1,
            self._backend,
            transfer.deadline.remaining,
            extent,
        )

    def describe(self, receiver: ReceiverLink, reply: CopyReply) -> ControlMessage:
        """See `SenderEnd`."""
        return {"number": reply.number}

    def forget(self) -> None:
        """See `SenderEnd`: sources stop waiting in the groups, the next transfer makes new ones."""
        if self._layout_of:
            marker(self._directory, self.number).unlink(missing_ok=True)
        self._layout_of = {}


def BroadcastTransferSender(  # noqa: N802 - named like a class
    *,
    device: str | torch.device = "cpu",
    verify: str = "crc32",
    skip_unchanged: bool = False,
) -> Sender:
    """Make a sender to receivers with memory of their own: one broadcast for each block.

    Args:
        device: device to send from: ``cpu`` (sockets) or ``cuda:N`` (NCCL). Parameters elsewhere
            are copied there first.
        verify, skip_unchanged: see `Sender`.
    """
    end = BroadcastGroups(torch.device(device))
    return Sender(end, verify=verify, skip_unchanged=skip_unchanged)


# -- the receiver --------------------------------------------------------------------------


class ReceivedRound(NamedTuple):
    """A request in flight: its target blocks, their receive buffers, and the broadcasts."""

    targets: Sequence[Tensor]
    runs: Sequence[Tensor]
    works: Sequence[Any]


class Arrivals(ReceiverEnd):
    """Receiver's end: groups, and the requests in flight in them.

    Several ranks may send at once; announced requests are received in the background.

    Args:
        device: device of the received bytes.
    """

    strategy = STRATEGY

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = ReceiveBuffers(device)
        self._number = 0
        self._invitation: ControlMessage = {}
        self._groups: dict[int, Future[BroadcastGroup]] = {}
        self._in_flight: dict[int, ReceivedRound] = {}

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        if begin["backend"] != backend_for(self._device):
            raise TransferError(
                f"the sender broadcasts with {begin['backend']}, but this receiver's device is "
                f"{self._device}; give both the same kind of device"
            )
        if self._number != begin["groups"]:
            self.dropped()
            self._number, self._invitation = begin["groups"], begin
        return self._memory.buffer(extent)

    def coming(self, staged: StagedVersion, message: ControlMessage, wait: Wait) -> None:
        """Begin to receive a request; the first one from a rank joins its group."""
        group = self._join_group(message["from"], staged.deadline)
        while not group.done():
            wait(staged.deadline.remaining)
        targets = [staged.block(Block(*block)) for block in message["blocks"]]
        runs = [self._receive_buffer(target) for target in targets]
        works = [group.result().broadcast(run, staged.deadline, self._wake) for run in runs]
        self._in_flight[message["number"]] = ReceivedRound(targets, runs, works)

    def fetch(
        self, staged: StagedVersion, message: ControlMessage, blocks: Sequence[Block], wait: Wait
    ) -> None:
        """See `ReceiverEnd`."""
        arrival = self._in_flight.pop(message["number"])
        self._conclude(arrival.works, wait)
        for target, run in zip(arrival.targets, arrival.runs, strict=True):
            if not target.is_contiguous():
                target.copy_(run.view(target.dtype).view(target.shape))

    def dropped(self) -> None:
        """Leave all groups, without waiting; requests in flight are lost."""
        for group in self._groups.values():
            let_go(group)
        # the old groups may still write into buffers in flight, which are not reused
        self._number, self._groups, self._in_flight = 0, {}, {}

    def close(self) -> None:
        """See `ReceiverEnd`."""
        self.dropped()
        self._memory.close()

    def _join_group(self, rank: int, deadline: Deadline) -> Future[BroadcastGroup]:
        """Join a source rank's group in the background, once."""
        if rank not in self._groups:
            names, own_rank, size = (self._invitation[key] for key in ("names", "rank", "size"))
            directory, seconds = os.path.dirname(self._address), deadline.remaining
            self._groups[rank] = in_background(
                lambda: join(self._device, directory, names[rank], own_rank, size, seconds),
                self._wake,
            )
        return self._groups[rank]

    def _receive_buffer(self, target: Tensor) -> Tensor:
        """Return the target's own bytes if contiguous, else a temporary buffer."""
        if target.is_contiguous():
            return as_bytes(target)
        return torch.empty(target.nbytes, dtype=torch.uint8, device=self._device)

    def _conclude(self, works: Sequence[Any], wait: Wait) -> None:
        """Wait for the broadcasts of a request, and make their results usable."""
        # sockets wake this thread; a GPU does not, so it is polled
        interval = _LOOK_SECONDS if self._device.type == "cuda" else 1.0
        while not finished(works):
            wait(interval)
        try:
            conclude(works, self._device)
        except RuntimeError:
            # another rank's failure is the cause, and the sender is about to name it
            deadline = Deadline(_BLAME_SECONDS)
            while not deadline.expired:
                wait(deadline.remaining)
            raise


def BroadcastTransferReceiver(  # noqa: N802 - named like a class
    address: str, *, device: str | torch.device = "cpu", **options: Unpack[ReceiverOptions]
) -> Receiver:
    """Make a receiver for a `BroadcastTransferSender`; see `Receiver`.

    Args:
        device: device of the parameters: ``cpu`` (sockets) or ``cuda:N`` (NCCL), of the same kind
            as the sender's.
        options: name, expect, mesh, rank and placements; see `Receiver`.
    """
    return Receiver(address, Arrivals(torch.device(device)), **options)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, DESTINATION = GroupAddress, GroupMemory
