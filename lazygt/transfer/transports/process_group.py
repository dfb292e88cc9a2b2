"""Broadcast: by NCCL between GPUs, through packed buffers between CPUs.

Between CPUs receivers map the buffers of the source processes, see `cuda_ipc`.

Between GPUs there is a group for each source process and each different layout of receivers: rank 0
is the source, the other ranks are the receivers of that layout, so a layout with one receiver means
point to point. A sender without blocks is in no group. Contiguous blocks are broadcast in place,
from and to their own memory.

A broadcast cannot be cancelled: after a failure or a change of members the next transfer makes new
groups. A source that waits in an old group polls the marker file of its set of groups, which the
sender removes when a transfer fails. Joining and leaving a group may wait for a frozen rank, so
both happen in the background.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

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
from lazygt.transfer.transports.cuda_ipc import BufferLeases, HostDevice, LeasedBuffers
from lazygt.transfer.version import Block, StagedVersion

STRATEGY = "broadcast"
REQUEST_BYTES = 32 << 20
"""Maximum bytes of a broadcast request, and of a packing buffer."""
HOST, NCCL = "host", "nccl"
"""Backends: buffers in memory of the host, or NCCL."""

T = TypeVar("T")
_GRACE_SECONDS = 1.0  # torch's timeout expires after the transfer's, whose error names the ranks
_BLAME_SECONDS = 0.3  # for the control connection to name the rank behind a failed collective
_LOOK_SECONDS = 1e-3


class GroupAddress(NamedTuple):
    """A group of one source process (rank 0) and the receivers of one layout.

    Attributes:
        directory: the sender's directory; the ranks meet there.
        number: number of the set of groups; its `marker` exists as long as they are valid.
        name: name of this group.
        size: number of its ranks.
        seconds: seconds until the transfer's deadline.
        extent: bytes of the request, if all of it is packed.
    """

    directory: str
    number: int
    name: str
    size: int
    seconds: float
    extent: int


def marker(directory: str, number: int) -> Path:
    """Return the path of a file that exists as long as a set of groups is valid."""
    return Path(directory) / f"groups-{number}"


def meeting_path(directory: str, name: str) -> str:
    """Return the path at which the ranks of a group meet."""
    return os.path.join(directory, f"group-{name}")


def name_of(number: int, rank: int, layout: int) -> str:
    """Return the name of a source rank's group for a layout, in a set of groups."""
    return f"{number}-{rank}-{layout}"


# -- groups of GPUs ------------------------------------------------------------------------


class NcclGroup:
    """One rank's end of an NCCL group, separate from torch's default group; rank 0 sends.

    Args:
        path: path of a file at which the ranks meet.
        seconds: timeout for the other ranks.
    """

    def __init__(
        self, device: torch.device, path: str, rank: int, size: int, seconds: float
    ) -> None:
        # one file for each group: torch removes the file when the first rank leaves the group
        store = FileStore(path, -1)
        store.set_timeout(timedelta(seconds=seconds))
        self._group: Any = self._connect(device, store, rank, size, seconds)

    @staticmethod
    def source_device(device: torch.device) -> torch.device:
        """Return the device from which a process on ``device`` sends."""
        if device.type != "cuda":
            raise ProtocolError(
                f"the sender broadcasts with {NCCL}, but this worker computes on the "
                f"{device}; give BroadcastTransferSender device='cpu'"
            )
        return torch.device("cuda", device.index or torch.cuda.current_device())

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        """Begin to broadcast a tensor from rank 0; ``wake`` is called when it may be done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.remaining + _GRACE_SECONDS)
        work = self._group.broadcast([run], options)
        work.get_future().add_done_callback(lambda _: wake())
        return work

    def close(self) -> None:
        """Leave the group; may wait for collectives that a frozen rank holds up."""
        self._group = None  # destroys the group even if this object is still referenced

    @staticmethod
    def _connect(
        device: torch.device, store: FileStore, rank: int, size: int, seconds: float
    ) -> Any:
        """Return torch's process group."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds + _GRACE_SECONDS)
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # connects now, in the background, instead of within the first collective
        group.eager_connect_single_device(device)
        return group


def finished(works: Sequence[Any]) -> bool:
    """Return whether all broadcasts have ended, in success or failure."""
    return all(work.is_completed() for work in works)


def conclude(works: Sequence[Any], device: torch.device) -> None:
    """Make the results of finished broadcasts usable.

    Raises:
        RuntimeError: a broadcast failed.
    """
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def in_background(make: Callable[[], T], done: Callable[[], object]) -> Future[T]:
    """Run ``make``, which may block for long, in a thread; then call ``done``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        done()

    _start_thread(run)
    return future


def let_go(group: Future[NcclGroup] | None) -> None:
    """Drop a group, if there is one, without waiting for its threads."""
    if group is None:
        return

    def drop() -> None:
        if group.exception() is None:  # waits for a group that is still joining
            group.result().close()

    _start_thread(drop)


def _start_thread(run: Callable[[], object]) -> None:
    """Run a function in a thread of its own, to its end."""
    # No daemon: torch aborts a process that exits while a group is being destroyed. Each thread
    # ends at its transfer's timeout at the latest.
    threading.Thread(target=run, name="lazygt-group", daemon=False).start()


# -- the source ----------------------------------------------------------------------------


class GroupMemory:
    """`Destination` in the memory of receivers: a set of groups joined as rank 0.

    Args:
        device: device of the values, from which they are sent.
        group: class of the groups.
    """

    def __init__(
        self, device: torch.device, place: GroupAddress, group: type[NcclGroup] = NcclGroup
    ) -> None:
        self.borrows, self._group_class = group.source_device(device), group
        self._groups: dict[str, Future[NcclGroup]] = {}
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

    def _join(self, place: GroupAddress, deadline: Deadline) -> NcclGroup:
        """Return the group of a place, joined as rank 0 on first use."""
        if place.name not in self._groups:
            path = meeting_path(place.directory, place.name)
            self._groups[place.name] = in_background(
                lambda: self._group_class(self.borrows, path, 0, place.size, deadline.remaining),
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
        device: device of this process's values.
        group: class of the groups.
    """

    strategy, kind = STRATEGY, "process_group"

    def __init__(self, device: torch.device, group: type[NcclGroup] = NcclGroup) -> None:
        self.device, self._group = device, group
        self._layout_of: Mapping[ReceiverLink, int] = {}
        self._directory = ""

    @property
    def threshold(self) -> int:  # type: ignore[override]
        """Bytes of a request."""
        return REQUEST_BYTES

    def open_here(self, device: torch.device, place: GroupAddress) -> GroupMemory:
        """See `SenderEnd`."""
        return GroupMemory(device, place, self._group)

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
            "backend": NCCL,
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


class HostBuffers(BufferLeases):
    """Sender's end between CPUs: packed buffers of the source processes."""

    strategy = STRATEGY

    def __init__(self) -> None:
        super().__init__(REQUEST_BYTES, HostDevice())

    def invitation(self, transfer: Transfer, receiver: ReceiverLink) -> ControlMessage:
        """See `SenderEnd`."""
        return {"backend": HOST}


def BroadcastTransferSender(  # noqa: N802 - named like a class
    *,
    device: str | torch.device = "cpu",
    verify: str = "crc32",
    skip_unchanged: bool = False,
) -> Sender:
    """Make a sender to receivers with memory of their own, on CPUs or on other GPUs.

    Args:
        device: device to send from: ``cpu`` (packed buffers) or ``cuda:N`` (NCCL: one broadcast for
            each block). Parameters elsewhere are copied there first.
        verify, skip_unchanged: see `Sender`.
    """
    to = torch.device(device)
    end = BroadcastGroups(to) if to.type == "cuda" else HostBuffers()
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
        group: class of the groups.
    """

    strategy = STRATEGY

    def __init__(self, device: torch.device, group: type[NcclGroup] = NcclGroup) -> None:
        self._device, self._group_class = device, group
        self._memory = ReceiveBuffers(device)
        self._number = 0
        self._invitation: ControlMessage = {}
        self._groups: dict[int, Future[NcclGroup]] = {}
        self._in_flight: dict[int, ReceivedRound] = {}

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        _check_backend(begin, NCCL, self._device)
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

    def _join_group(self, rank: int, deadline: Deadline) -> Future[NcclGroup]:
        """Join a source rank's group in the background, once."""
        if rank not in self._groups:
            names, own_rank, size = (self._invitation[key] for key in ("names", "rank", "size"))
            path = meeting_path(os.path.dirname(self._address), names[rank])
            self._groups[rank] = in_background(
                lambda: self._group_class(self._device, path, own_rank, size, deadline.remaining),
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
        while not finished(works):
            wait(_LOOK_SECONDS)
        try:
            conclude(works, self._device)
        except RuntimeError:
            # another rank's failure is the cause, and the sender is about to name it
            deadline = Deadline(_BLAME_SECONDS)
            while not deadline.expired:
                wait(deadline.remaining)
            raise


class HostArrivals(LeasedBuffers):
    """Receiver's end between CPUs."""

    strategy = STRATEGY

    def __init__(self) -> None:
        super().__init__(HostDevice())

    def stage(self, begin: ControlMessage, extent: int) -> Tensor | None:
        """See `ReceiverEnd`."""
        _check_backend(begin, HOST, self._device.device)
        return super().stage(begin, extent)


def _check_backend(begin: ControlMessage, backend: str, device: torch.device) -> None:
    """Raise TransferError if the sender broadcasts with another backend."""
    if begin["backend"] != backend:
        raise TransferError(
            f"the sender broadcasts with {begin['backend']}, but this receiver's device is "
            f"{device}; give both the same kind of device"
        )


def BroadcastTransferReceiver(  # noqa: N802 - named like a class
    address: str, *, device: str | torch.device = "cpu", **options: Unpack[ReceiverOptions]
) -> Receiver:
    """Make a receiver for a `BroadcastTransferSender`; see `Receiver`.

    Args:
        device: device of the parameters: ``cpu`` or ``cuda:N`` (NCCL), of the same kind as the
            sender's.
        options: name, expect, mesh, rank and placements; see `Receiver`.
    """
    to = torch.device(device)
    end = Arrivals(to) if to.type == "cuda" else HostArrivals()
    return Receiver(address, end, **options)


#: Names by which requests find the classes of a transport, see `copy_request.transport_module`.
ADDRESS, DESTINATION = GroupAddress, GroupMemory
