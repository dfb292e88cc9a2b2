"""Broadcast with torch.distributed: Gloo between CPUs, NCCL between GPUs. Each chunk at once.

Sender and receivers form a process group of their own beside torch's default one. A collective
cannot be taken back, so after a failure or a change of members the next transfer makes a new
group; the old one is let go in the background, because letting it go may wait for a frozen rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from lazygt.transfer.batches import Piece, Request, joined
from lazygt.transfer.control import Connection, Deadline, Message
from lazygt.transfer.errors import TransferError
from lazygt.transfer.peers import Peer
from lazygt.transfer.receiver import Incoming, Receiver
from lazygt.transfer.sender import Outgoing, Sender
from lazygt.transfer.spec import Manifest
from lazygt.transfer.staging import Staging

T = TypeVar("T")
_GRACE_SECONDS = 1.0  # torch's own timeout comes after ours, which knows names
_FAILED_SECONDS = 0.3  # in which the control connection says who made a collective fail
_LOOK_SECONDS = 1e-3


class Group:
    """One rank's end of the process group; rank 0 sends.

    Args:
        directory: of the sender; the ranks meet there.
        number: counts the groups of a sender.
        seconds: to wait for the other ranks.
    """

    def __init__(
        self,
        device: torch.device,
        directory: str,
        number: int,
        rank: int,
        size: int,
        seconds: float,
    ) -> None:
        store = FileStore(os.path.join(directory, "group"), -1)
        store.set_timeout(timedelta(seconds=seconds))
        here = PrefixStore(str(number), store)
        patience = timedelta(seconds=seconds + _GRACE_SECONDS)
        self._group: Any
        if backend_for(device) == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = dist.ProcessGroupNCCL(here, rank, size, options)
            # here, in the background, and not within the first collective
            self._group.eager_connect_single_device(device)
        else:
            self._group = dist.ProcessGroupGloo(here, rank, size, patience)

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        """Begin to broadcast a tensor from rank 0; ``wake`` is called when it may be done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.remaining + _GRACE_SECONDS)
        work = self._group.broadcast([run], options)
        work.get_future().add_done_callback(lambda _: wake())
        return work


def finished(works: Sequence[Any]) -> bool:
    """Whether all broadcasts have ended, well or not."""
    return all(work.is_completed() for work in works)


def conclude(works: Sequence[Any], device: torch.device) -> None:
    """Make the results of finished broadcasts usable.

    Raises:
        RuntimeError: one failed.
    """
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def in_background(make: Callable[[], T], done: Callable[[], object]) -> Future[T]:
    """Run something that may block for long in a thread that nobody has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - kept for who asks the future
            future.set_exception(error)
        done()

    threading.Thread(target=run, name="lazygt-group", daemon=True).start()
    return future


def let_go(group: Future[Group] | None) -> None:
    """Drop a group without waiting for its threads."""
    if group is None:
        return
    held = [group]
    del group

    def drop() -> None:
        future = held.pop()
        future.exception()  # waits for a group that is still being made

    threading.Thread(target=drop, name="lazygt-group-end", daemon=True).start()


def backend_for(device: torch.device) -> str:
    """gloo for the CPU, nccl for GPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


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
        if self._check is not None:
            checks = self._crew.check([self._run(out, piece) for piece in request], self._check)
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
