"""Process group of the workers, joined in the background of a worker's start.

Ranks on one host communicate through sockets and memory that only their user can reach, ranks on
several hosts through encrypted connections. Torch's own process group, which listens on a TCP port,
is made only for GPUs, for NCCL.

Joining waits for every other rank, and most plans need no collective. So a thread joins, and a
collective calls `wait` first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group
from torch.distributed.rendezvous import rendezvous

from lazygt.errors import LazyGTError
from lazygt.graph.collectives import goes_by_sockets
from lazygt.graph.mesh import Mesh
from lazygt.runtime.collectives.backends import (
    HOST,
    NCCL,
    Backend,
    PendingSends,
    SocketBackend,
    TorchBackend,
)
from lazygt.runtime.collectives.shared_backend import SharedMemoryBackend
from lazygt.runtime.collectives.sockets import (
    Ends,
    Peer,
    PeerSocket,
    Rendezvous,
    first_to_leave,
    late,
)

if TYPE_CHECKING:
    from lazygt.runtime.collectives.rendezvous import Meeting
    from lazygt.runtime.collectives.shared_backend import PeerBackend
    from lazygt.runtime.launch.launcher import GroupSpec


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """This rank's place on one axis of the mesh.

    Attributes:
        size, index: number of ranks along the axis, and the index of this one.
        sockets, shared: backends for small and large values; large ones go through shared memory,
            unless the ranks are on several hosts.
        singles: connections for point-to-point values, by index on the axis; None for this rank.
        group: torch's process group of the same ranks; None without NCCL.
        downward: a second group, for values to ranks of a lower index. NCCL orders both directions
            between two ranks in one sequence, so two crossing sends would deadlock.
    """

    size: int
    index: int
    sockets: SocketBackend
    shared: SharedMemoryBackend | PeerBackend
    singles: tuple[Peer | None, ...]
    group: Any = None
    downward: Any = None

    def backend(self, buffer: torch.Tensor, kind: str, nbytes: int) -> Backend:
        """Return the backend for a payload size as in ``Communication``; equal on all ranks."""
        if buffer.device.type != "cpu":
            return TorchBackend(self.group)
        return self.sockets if goes_by_sockets(kind, nbytes, self.size) else self.shared

    def carries(self, device: torch.device) -> bool:
        """Return whether tensors travel from this device directly, not through host memory."""
        return self.group is not None or device.type == "cpu"

    def one_way(self, source: int, target: int) -> Any:
        """Return torch's group that carries values from one of the ranks to another."""
        return self.group if source < target else self.downward

    def single(self, index: int) -> Peer:
        """Return the point-to-point connection to another rank of the axis."""
        peer = self.singles[index]
        if peer is None:
            raise LazyGTError("a rank sends nothing to itself")
        return peer


class Group:
    """This rank's membership in a session's group of workers.

    Args:
        spec: the backend, the rendezvous of the ranks, and their timeout.
        rendezvous: meeting point of this rank with others.
        number: number of the session's earlier groups, which are all obsolete.
    """

    def __init__(
        self,
        spec: GroupSpec,
        rank: int,
        world_size: int,
        rendezvous: Rendezvous | Meeting,
        number: int = 0,
    ) -> None:
        self._spec, self._rank, self._world_size, self._rendezvous = (
            spec,
            rank,
            world_size,
            rendezvous,
        )
        self.mesh, self.rank, self.number = Mesh.parse(spec.mesh), rank, number
        #: point-to-point sends of NCCL in flight, on any axis
        self.pending_sends = PendingSends()
        self._left = self._closed = False
        #: the rank that left, so that NCCL's kernels were aborted; None: they were not
        self.parted_from: int | None = None
        self._leaving = threading.Lock()
        self._lines: dict[str, AxisGroup] = {}
        self._ends: dict[int, Ends] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._join, name="lazygt-group", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all ranks have joined; each waits at most the group's timeout.

        Raises:
            LazyGTError: this rank could not join, with the reason.
        """
        self._thread.join()
        if isinstance(self._failure, LazyGTError):
            raise self._failure
        if self._failure is not None:
            raise LazyGTError(
                f"rank {self._rank} of {self._world_size} could not join the group of workers: "
                f"{self._failure}"
            ) from self._failure

    def abandon(self, reason: str) -> bool:
        """Leave while others may be waiting: their collectives fail at once, as all later ones do.

        Args:
            reason: the reason, for the errors of later collectives of this rank.

        Returns:
            True if other ranks notice; False if this rank had left, or not all have joined yet.
        """
        with self._leaving:
            if self._left or self._thread.is_alive():
                return False
            self._left, joined = True, self._failure is None
        if joined:
            self._failure = LazyGTError(f"rank {self._rank} left its process group: {reason}")
        # destroying it would wait for collectives that other ranks never join
        self._leave(_abort_process_group)
        return joined

    def late(self) -> tuple[int, ...]:
        """Return the ranks that a collective of this one waits for. For any thread.

        NCCL's collectives do not report that.
        """
        lines = list(self._lines.values())
        turns = [turn.peers for line in lines for turn in (line.sockets, line.shared)]
        alone = [(peer,) for line in lines for peer in line.singles]
        return tuple(sorted({rank for peers in (*turns, *alone) for rank in late(peers)}))

    @property
    def abandoned(self) -> bool:
        """True if this rank has left, or never came."""
        return self._failure is not None

    @property
    def left(self) -> bool:
        """True if a collective of this group could not run here: none ever will again."""
        return self._left

    @property
    def nccl(self) -> bool:
        """True if tensors on a GPU travel from there directly."""
        return self._spec.backend == NCCL

    def successor(self, number: int) -> Group:
        """Leave this group and begin to join the session's next one, as all ranks do."""
        self._thread.join()  # each wait in it ends with the group's timeout
        self.abandon("the ranks form a new one")
        return Group(self._spec, self._rank, self._world_size, self._rendezvous, number)

    def close(self) -> None:
        """Leave the group, if it was joined. Does not wait for ranks that never came."""
        self._closed = True
        if not self._thread.is_alive() and self._failure is None:
            self._leave(dist.destroy_process_group)

    def _leave(self, end: Callable[[], object]) -> None:
        self.pending_sends.close()
        for ends in self._ends.values():
            for peer in ends:
                peer.close()
        for line in self._lines.values():
            line.shared.close()
        self._lines.clear()
        if dist.is_initialized():
            end()

    def _join(self) -> None:
        try:
            self._ends = self._rendezvous.meet(self.number, self._others())
            if self.nccl:
                self._join_nccl()
            for axis in self.mesh.names:  # every rank makes every group, in the same order
                self._lines[axis] = self._line(self.mesh, axis)
            if self.nccl:
                threading.Thread(target=self._watch, name="lazygt-ranks", daemon=True).start()
        except Exception as error:  # noqa: BLE001 - kept, and raised again by `wait`
            self._failure = error

    def _watch(self) -> None:
        """Abort NCCL's kernels when a rank of this host has left.

        They would wait for it, and the device's stream with them, until torch's watchdog ends the
        process.
        """
        peers = [ends.small for ends in self._ends.values()]
        self._thread.join()
        rank = first_to_leave(peers, lambda: self._left or self._closed)
        if rank is not None:
            self.parted_from = rank  # before a kernel can end by it
            self.abandon(f"rank {rank} has left")

    def _join_nccl(self) -> None:
        """Join torch's default group.

        Its ranks meet in the session's store, or on one host in a file that only their user can
        open.
        """
        timeout = timedelta(seconds=self._spec.timeout)
        store: Any = self._rendezvous.store
        if store is not None:
            store = PrefixStore(f"nccl/{self.number}", store)
        else:
            meet = rendezvous(self._place(self.number), self._rank, self._world_size)
            store, _, _ = next(iter(meet))
        store.set_timeout(timeout)
        dist.init_process_group(
            NCCL,
            store=PrefixStore("group", store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        self._sweep()

    def _place(self, number: int) -> str:
        """Return the rendezvous address of a group: each group has a store of its own."""
        return f"file://{self._spec.directory}/group.{number}"

    def _sweep(self) -> None:
        """Remove the rendezvous data of earlier groups.

        All ranks have left these; torch removes most of the files, not all.
        """
        if self._rank:
            return
        store = self._rendezvous.store
        if store is not None:
            if self.number:
                store.delete_all(f"nccl/{self.number - 1}/")
        else:
            for number in range(self.number):
                Path(self._place(number).removeprefix("file://")).unlink(missing_ok=True)

    def _others(self) -> list[int]:
        """Return the ranks that share an axis with this one: two share one at most."""
        mesh = self.mesh
        return [
            rank
            for axis in mesh.names
            for line in mesh.lines(axis)
            if self.rank in line
            for rank in line
            if rank != self.rank
        ]

    def _line(self, mesh: Mesh, axis: str) -> AxisGroup:
        members = next(ranks for ranks in mesh.lines(axis) if self.rank in ranks)
        ends = [self._ends.get(rank) for rank in members]
        return AxisGroup(
            len(members),
            members.index(self.rank),
            SocketBackend([end and end.small for end in ends]),
            _for_large([end and end.large for end in ends]),
            tuple(end and end.single for end in ends),
            self._torch_group(mesh, axis, members) if self.nccl else None,
            self._new_group(mesh, axis, members) if self.nccl else None,
        )

    def _torch_group(self, mesh: Mesh, axis: str, members: tuple[int, ...]) -> Any:
        if len(members) == self._world_size:
            return dist.group.WORLD
        return self._new_group(mesh, axis, members)

    def _new_group(self, mesh: Mesh, axis: str, members: tuple[int, ...]) -> Any:
        seconds = timedelta(seconds=self._spec.timeout)
        return {ranks: dist.new_group(list(ranks), seconds) for ranks in mesh.lines(axis)}[members]

    def line(self, axis: str) -> AxisGroup:
        """Return this rank's place on an axis, once all ranks have joined.

        Raises:
            LazyGTError: this rank could not join, or the mesh has no such axis.
        """
        self.wait()
        if axis not in self._lines:
            raise LazyGTError(f"the mesh {self._spec.mesh!r} has no axis {axis!r}")
        return self._lines[axis]


def _for_large(peers: Sequence[Peer | None]) -> SharedMemoryBackend | PeerBackend:
    """Return the backend for large values: shared memory if all ranks are on one host.

    All ranks decide alike: otherwise each has a peer on another host.
    """
    here = [peer for peer in peers if peer is None or isinstance(peer, PeerSocket)]
    if len(here) == len(peers):
        return SharedMemoryBackend(here)
    # why: few groups are on several hosts
    from lazygt.runtime.collectives.shared_backend import PeerBackend

    return PeerBackend(peers)


def keep_apart(rank: int, world_size: int) -> None:
    """Pin this thread, and those it starts from now on, to this rank's share of the cores.

    Ranks that wait for each other in turn look like one busy process, so a busy scheduler puts them
    on one core, and there they stay. Nothing happens if a rank has more threads than its share has
    cores, nor if that is one core, which others may want as well.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = cores[rank * len(cores) // world_size : (rank + 1) * len(cores) // world_size]
    if len(share) > 1 and torch.get_num_threads() <= len(share):
        os.sched_setaffinity(0, share)


_current: Group | None = None  # torch, too, has one default group a process


def join(spec: GroupSpec, rank: int, world_size: int, listener: int, number: int = 0) -> None:
    """Begin to join this process's group, without waiting.

    Args:
        listener: a descriptor of the socket at ``spec.rendezvous(rank)``.
        number: number of groups that the session had before.
    """
    global _current
    if spec.backend == HOST and not spec.store:
        keep_apart(rank, world_size)
    _current = Group(spec, rank, world_size, _rendezvous(spec, rank, listener), number)


def _rendezvous(spec: GroupSpec, rank: int, listener: int) -> Rendezvous | Meeting:
    """Return the meeting point of the ranks: on this host, or on several."""
    if not spec.store:
        return Rendezvous(rank, listener, spec.rendezvous, spec.timeout)
    # why: only on several hosts are there encrypted connections, for which sockets are loaded
    from lazygt.runtime.collectives.rendezvous import Meeting, Place
    from lazygt.runtime.collectives.rendezvous_store import StoreClient

    token = bytes.fromhex(spec.token)
    store = StoreClient(spec.store, token, spec.timeout)
    place = Place(spec.host, spec.rendezvous(rank), spec.address, spec.backend)
    return Meeting(rank, place, listener, store, token, spec.timeout)


def _own() -> Group:
    if _current is None:
        raise LazyGTError("this worker is alone: there is no process group")
    return _current


def wait() -> None:
    """Wait until this worker's group is joined; call it before the first collective.

    Raises:
        LazyGTError: this worker has no group (it is alone), or could not join it.
    """
    _own().wait()


def line(axis: str) -> AxisGroup:
    """Return this worker's place on an axis of the mesh.

    Raises:
        LazyGTError: this worker has no group, or the mesh no such axis.
    """
    return _own().line(axis)


def pending_sends() -> PendingSends:
    """Return this worker's point-to-point sends in flight.

    Raises:
        LazyGTError: this worker has no group.
    """
    return _own().pending_sends


def current() -> Group | None:
    """Return this worker's group; None if it is alone."""
    return _current


def abandon(reason: str) -> bool:
    """Leave the group for good, so that no other rank waits in a collective for this one.

    Returns:
        True if other ranks notice; see ``Group.abandon``.
    """
    return _current is not None and _current.abandon(reason)


def renew(number: int) -> None:
    """Leave this worker's group, and begin to join the one of a later number.

    All workers do, between the same two runs. Does not wait for the others.
    """
    global _current
    if _current is not None and _current.number != number:
        _current = _current.successor(number)


def leave() -> None:
    """Leave the group, if there is one."""
    if _current is not None:
        _current.close()
