"""Meetings: the groups in which a process that holds blocks broadcasts them to receivers.

It packs a request into one buffer and is rank 0 of a group for each different holding, so a
holding of one receiver makes it point to point. A collective cannot be taken back; whoever waits
in one looks at the marker of its set of groups, which the sender removes when a transfer fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.control import Deadline
from lazygt.transfer.errors import TransferError
from lazygt.transfer.group import HOST, Group, conclude, finished, in_background, join, let_go
from lazygt.transfer.orders import Meeting

_LOOK_SECONDS = 1e-3


def marker(directory: str, number: int) -> Path:
    """The file that is there as long as a set of groups is good."""
    return Path(directory) / f"groups-{number}"


def _too_late(deadline: Deadline) -> str:
    """What is said, whether this thread or one of a group's sees it first."""
    return f"receivers did not take it within {deadline.seconds:g} s"


class Meetings:
    """This process's ends of groups, and a buffer to pack for each sender.

    Args:
        device: where the values are; NCCL sends from there, sockets from the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dict[tuple[int, str], Future[Group]]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._changed = threading.Event()

    def room(self, sender: str, place: Meeting) -> Callable[[int, int], Tensor]:
        """See `Outlet`."""
        buffer = self._buffers.get(sender)
        device = self._device_for(place.backend)
        if buffer is None or buffer.numel() < place.extent or buffer.device != device:
            buffer = torch.empty(place.extent, dtype=torch.uint8, device=device)
            self._buffers[sender] = buffer
        packed = buffer[: place.extent]
        return lambda offset, nbytes: packed[offset : offset + nbytes]

    def deliver(self, sender: str, place: Meeting) -> Sequence[Any]:
        """Broadcast what was packed; returns when this process has sent it.

        Raises:
            TransferError: the transfer was given up, or its receivers did not take it in time.
        """
        deadline = Deadline(place.seconds)
        run = self._buffers[sender][: place.extent]
        try:
            self._check(place, deadline)
            group = self._joined(sender, place, deadline)
            works = [group.broadcast(run, deadline, self._changed.set)]
            self._wait(lambda: finished(works), place, deadline)
            conclude(works, run.device)
        except (RuntimeError, TransferError) as error:
            # it may still be read from: left to the group's threads, and never packed again
            self._buffers.pop(sender, None)
            let_go(self._groups.get(sender, {}).pop((place.number, place.name), None))
            late = deadline.expired and not isinstance(error, TransferError)
            raise TransferError(
                f"a broadcast failed: {_too_late(deadline) if late else error}"
            ) from error
        return ()

    def let_go(self, sender: str, live: Collection[int]) -> None:
        """See `Outlet`."""
        known = self._groups.get(sender, {})
        for gone in [key for key in known if key[0] not in live]:
            let_go(known.pop(gone))
        if not known:
            self._groups.pop(sender, None)
            self._buffers.pop(sender, None)

    def close(self) -> None:
        """See `Outlet`."""
        for sender in list(self._groups):
            self.let_go(sender, ())

    def _joined(self, sender: str, place: Meeting, deadline: Deadline) -> Group:
        known = self._groups.setdefault(sender, {})
        key = place.number, place.name
        if key not in known:
            device = self._device_for(place.backend)
            known[key] = in_background(
                lambda: join(
                    device, place.directory, place.name, 0, place.size, deadline.remaining
                ),
                self._changed.set,
            )
        future = known[key]
        self._wait(future.done, place, deadline)
        return future.result()

    def _wait(self, done: Callable[[], bool], place: Meeting, deadline: Deadline) -> None:
        while not done():
            self._check(place, deadline)
            self._changed.wait(_LOOK_SECONDS)
            self._changed.clear()

    def _check(self, place: Meeting, deadline: Deadline) -> None:
        """Raise TransferError when there is nothing to wait for any more."""
        if not marker(place.directory, place.number).exists():
            raise TransferError("the sender has given the transfer up")
        if deadline.expired:
            raise TransferError(_too_late(deadline))

    def _device_for(self, backend: str) -> torch.device:
        if backend == HOST:
            return torch.device("cpu")
        if self._device.type != "cuda":
            raise ProtocolError(
                f"the sender broadcasts with {backend}, but this worker computes on the "
                f"{self._device}; give BroadcastTransferSender device='cpu'"
            )
        return torch.device("cuda", self._device.index or torch.cuda.current_device())
