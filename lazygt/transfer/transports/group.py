"""Broadcast groups of a source and its receivers: sockets between CPUs, NCCL between GPUs.

Joining and leaving an NCCL group may wait for a frozen rank, so both happen in the background.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from lazygt.transfer.connection import Deadline
from lazygt.transfer.transports.host_group import HostGroup

#: Backends of a group: sockets of the host, or NCCL.
HOST, NCCL = "host", "nccl"
T = TypeVar("T")
_GRACE_SECONDS = 1.0  # torch's own timeout comes after ours, which knows names


class BroadcastGroup(Protocol):
    """One rank's end of a group; rank 0 sends."""

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        """Begin to broadcast a tensor from rank 0; ``wake`` is called when it may be done."""

    def close(self) -> None:
        """Leave the group; may wait for collectives that a frozen rank holds up."""


def join(
    device: torch.device, directory: str, name: str, rank: int, size: int, seconds: float
) -> BroadcastGroup:
    """Join a group.

    Args:
        directory: the sender's directory; the ranks meet there.
        name: name of the group, unique for the sender.
        seconds: timeout for the other ranks.
    """
    place = os.path.join(directory, f"group-{name}")
    if backend_for(device) == NCCL:
        return _Nccl(device, place, rank, size, seconds)
    return HostGroup(place, rank, size)


class _Nccl:
    """An NCCL process group of torch.distributed, separate from torch's default group."""

    def __init__(
        self, device: torch.device, place: str, rank: int, size: int, seconds: float
    ) -> None:
        # a file of its own: torch removes it when the first of the ranks leaves an older group
        here = FileStore(place, -1)
        here.set_timeout(timedelta(seconds=seconds))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds + _GRACE_SECONDS)
        self._group: Any = dist.ProcessGroupNCCL(here, rank, size, options)
        # here, in the background, and not within the first collective
        self._group.eager_connect_single_device(device)

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.remaining + _GRACE_SECONDS)
        work = self._group.broadcast([run], options)
        work.get_future().add_done_callback(lambda _: wake())
        return work

    def close(self) -> None:
        self._group = None  # now, even if others still refer to this object


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

    _thread(run)
    return future


def _thread(run: Callable[[], object]) -> None:
    # No daemon: torch would abort the process if it ended while a group is being taken down. Each
    # of these threads ends at its transfer's timeout at the latest.
    threading.Thread(target=run, name="lazygt-group", daemon=False).start()


def let_go(group: Future[BroadcastGroup] | None) -> None:
    """Drop a group, if there is one, without waiting for its threads."""
    if group is None:
        return

    def drop() -> None:
        if group.exception() is None:  # waits for a group that is still being made
            group.result().close()

    _thread(drop)


def backend_for(device: torch.device) -> str:
    """Return `NCCL` for GPUs, else `HOST`."""
    return NCCL if device.type == "cuda" else HOST
