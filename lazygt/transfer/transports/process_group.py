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
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.host.files import create
from lazygt.transfer.checksums import as_bytes
from lazygt.transfer.control import ControlMessage, Deadline
from lazygt.transfer.copy_request import CopyReply, WeightSource
from lazygt.transfer.layout import ReceiverLayout, Request, packed
from lazygt.transfer.manifest import Manifest
from lazygt.transfer.peers import ReceiverLink
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
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
from lazygt.transfer.transports.transport import ReceiveBuffers, ReceiverEnd, SenderEnd, View, Wait
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


class GroupSource:
    """Source's end: groups joined as rank 0, and a packing buffer for each sender.

    Args:
        device: device of the values; NCCL sends from there, sockets from the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dict[tuple[int, str], Future[BroadcastGroup]]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._changed = threading.Event()

    def borrows(self, place: GroupAddress) -> torch.device | None:
        """See `transport.SourceEnd`."""
        return self._device_for(place.backend)

    def buffer(self, sender: str, place: GroupAddress) -> View:
        """See `transport.SourceEnd`."""
        device = self._device_for(place.backend)

        def view_at(offset: int, nbytes: int) -> Tensor:
            buffer = self._buffers.get(sender)
            if buffer is None or buffer.numel() < place.extent or buffer.device != device:
                buffer = torch.empty(place.extent, dtype=torch.uint8, device=device)
                self._buffers[sender] = buffer
            return buffer[offset : offset + nbytes]

        return view_at

    def deliver(self, sender: str, place: GroupAddress, runs: Sequence[Tensor]) -> Sequence[Any]:
        """Broadcast the blocks, and wait until this process has sent them.

        Raises:
            TransferError: the transfer was aborted, or its receivers were too late.
        """
        deadline = Deadline(place.seconds)
        try:
            _check(place, deadline)
            group = self._join(sender, place, deadline)
            works = [group.broadcast(run, deadline, self._changed.set) for run in runs]
            self._wait(lambda: finished(works), place, deadline)
            conclude(works, self._device_for(place.backend))
        except (RuntimeError, TransferError) as error:
            # the group's threads may still read the buffer, so it is never packed again
            self._buffers.pop(sender, None)
            let_go(self._groups.get(sender, {}).pop((place.number, place.name), None))
            is_late = deadline.expired and not isinstance(error, TransferError)
            raise TransferError(
                f"a broadcast failed: {_timeout_message(deadline) if is_late else error}"
            ) from error
        return ()

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """See `transport.SourceEnd`."""
        groups = self._groups.get(sender, {})
        for expired in [key for key in groups if key[0] not in live]:
            let_go(groups.pop(expired))
        if not groups:
            self._groups.pop(sender, None)
            self._buffers.pop(sender, None)

    def close(self) -> None:
        """See `transport.SourceEnd`."""
        for sender in list(self._groups):
            self.let_go(sender, ())

    def _join(self, sender: str, place: GroupAddress, deadline: Deadline) -> BroadcastGroup:
        """Return the group of a place, joined as rank 0 on first use."""
        groups = self._groups.setdefault(sender, {})
        key = place.number, place.name
        if key not in groups:
            device = self._device_for(place.backend)
            groups[key] = in_background(
                lambda: join(
                    device, place.directory, place.name, 0, place.size, deadline.remaining
                ),
                self._changed.set,
            )
        future = groups[key]
        self._wait(future.done, place, deadline)
        return future.result()

    def _wait(self, done: Callable[[], bool], place: GroupAddress, deadline: Deadline) -> None:
        """Wait until ``done``; raise TransferError when the transfer has failed."""
        while not done():
            _check(place, deadline)
            self._changed.wait(_LOOK_SECONDS)
            self._changed.clear()

    def _device_for(self, backend: str) -> torch.device:
        """Return the device from which a backend sends."""
        if backend == HOST:
            return torch.device("cpu")
        if self._device.type != "cuda":
            raise ProtocolError(
                f"the sender broadcasts with {backend}, but this worker computes on the "
                f"{self._device}; give BroadcastTransferSender device='cpu'"
            )
        return torch.device("cuda", self._device.index or torch.cuda.current_device())


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

    Attributes:
        number: number of the set of groups.
    """

    strategy, kind = STRATEGY, "process_group"

    def __init__(self, device: torch.device) -> None:
        self.device, self._backend = device, backend_for(device)
        self.number = 0
        self._source: Callable[[], WeightSource | None] = _no_source
        self._layout_of: Mapping[ReceiverLink, int] = {}
        self._ranks = 0
        self._transfer: Transfer | None = None

    @property
    def threshold(self) -> int:  # type: ignore[override]
        """Bytes of a request."""
        return REQUEST_BYTES

    def source_end(self) -> GroupSource:
        """See `SenderEnd`."""
        return GroupSource(self.device)

    @property
    def live(self) -> tuple[int, ...]:
        """Number of the set of groups."""
        return (self.number,)

    def begin(self, transfer: Transfer) -> None:
        """See `SenderEnd`: new groups if the members have changed."""
        source = None if transfer.remote is None else transfer.remote.source
        layout_of = transfer.layouts.of
        if not self._ranks or self._source() is not source or self._layout_of != layout_of:
            self.forget()
            self.number += 1
            os.close(create(marker(self._directory, self.number)))
            self._ranks = 1 if source is None else source.mesh.world_size
            self._source = _no_source if source is None else weakref.ref(source)
            self._layout_of = dict(layout_of)
        self._transfer = transfer

    def invitation(self, receiver: ReceiverLink) -> tuple[ControlMessage, Sequence[int]]:
        """Return the data for a receiver to join its groups."""
        layout = self._layout_of[receiver]
        members = [
            other for other, other_layout in self._layout_of.items() if other_layout == layout
        ]
        return {
            "groups": self.number,
            "names": [name_of(self.number, rank, layout) for rank in range(self._ranks)],
            "backend": self._backend,
            "rank": members.index(receiver) + 1,
            "size": len(members) + 1,
        }, ()

    def open(self, rank: int, number: int, request: Request) -> GroupAddress:
        """Announce a request to its receivers, and return its group."""
        transfer, layout = self._transfer, request[0].layout
        assert transfer is not None
        receivers = transfer.layouts.holders(layout, self._receivers.active)
        message = {
            "kind": "coming",
            "transfer": transfer.number,
            "from": rank,
            "number": number,
            "blocks": [[route.param, route.target] for route in request],
        }
        for receiver in receivers:
            self._receivers.send(receiver, message, transfer.deadline, ())
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

    def end(self, *, committed: bool, idle: bool) -> None:
        """See `SenderEnd`: after a failure the groups are abandoned."""
        self._transfer = None
        if not committed:
            self.forget()

    def forget(self) -> None:
        """Abandon the groups: sources stop waiting in them, the next transfer makes new ones."""
        if self._ranks:
            marker(self._directory, self.number).unlink(missing_ok=True)
        self._ranks, self._layout_of = 0, {}

    def close(self) -> None:
        """See `SenderEnd`."""
        self.forget()

    @property
    def _directory(self) -> str:
        return os.path.dirname(self._receivers.address)


def _no_source() -> None:
    """Return None, the source of this process's own values."""


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
    address: str,
    *,
    name: str | None = None,
    expect: Manifest | None = None,
    device: str | torch.device = "cpu",
    mesh: Mapping[str, int] | str | None = None,
    rank: int = 0,
    placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
) -> Receiver:
    """Make a receiver for a `BroadcastTransferSender`; see `Receiver`.

    Args:
        device: device of the parameters: ``cpu`` (sockets) or ``cuda:N`` (NCCL), of the same kind
            as the sender's.
        mesh, rank, placements: layout of this receiver's blocks; see `Receiver`.
    """
    layout = ReceiverLayout.from_arguments(mesh, rank, placements)
    end = Arrivals(torch.device(device))
    return Receiver(address, end, name=name, expect=expect, layout=layout)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, SOURCE = GroupAddress, GroupSource
