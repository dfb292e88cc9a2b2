"""Process group of the workers, joined by a background thread at a worker's start.

Ranks on one host communicate through sockets and memory that only their user can reach, ranks on
several hosts through encrypted connections. Torch's own process group, which listens on a TCP port,
is created only for GPUs, for NCCL.

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
from lazygt.net.sockets import (
    Ends,
    Peer,
    PeerSocket,
    Rendezvous,
    first_to_leave,
    late,
)
from lazygt.runtime.collectives.backends import (
    HOST,
    NCCL,
    Backend,
    PendingSends,
    SocketBackend,
    TorchBackend,
)
from lazygt.runtime.collectives.shared_backend import SharedMemoryBackend

if TYPE_CHECKING:
    from lazygt.net.sockets import GroupSpec
    from lazygt.runtime.collectives.peer_backend import PeerBackend
    from lazygt.runtime.collectives.rendezvous import Meeting


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Group of the ranks along one mesh axis, as this rank sees it."""

    size: int  # size, index: number of ranks along the axis, and the index of this one
    index: int
    #: sockets, shared: backends for small and large values; large ones go through shared memory,
    #: unless the ranks are on several hosts
    sockets: SocketBackend
    shared: SharedMemoryBackend | PeerBackend
    #: connections for point-to-point values, by index on the axis; None for this rank
    singles: tuple[Peer | None, ...]
    group: Any = None  # torch's process group of the same ranks; None without NCCL
    #: a second group, for values to ranks of a lower index. NCCL orders both directions between two
    #: ranks in one sequence, so two crossing sends would deadlock.
    downward: Any = None

    def backend(self, buffer: torch.Tensor, kind: str, nbytes: int) -> Backend:
        """Return the backend for a payload of ``nbytes``; the same choice on all ranks."""
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
        rendezvous: connector of this rank with others.
        number: number of the group: count of the session's earlier groups, all obsolete.
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
        #: the rank whose departure aborted NCCL's kernels; None: no abort
        self.parted_from: int | None = None
        self._leave_lock = threading.Lock()
        self._axis_groups: dict[str, AxisGroup] = {}
        self._connections: dict[int, Ends] = {}
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
        """Leave the group while others may be waiting: their collectives fail at once.

        Args:
            reason: the reason, for the errors of later collectives of this rank.

        Returns:
            True if other ranks notice; False if this rank had left, or is still joining.
        """
        with self._leave_lock:
            if self._left or self._thread.is_alive():
                return False
            self._left, joined = True, self._failure is None
        if joined:
            self._failure = LazyGTError(f"rank {self._rank} left its process group: {reason}")
        # destroying it would wait for collectives that other ranks never join
        self._leave(_abort_process_group)
        return joined

    def late(self) -> tuple[int, ...]:
        """Return the ranks that a collective of this rank waits for. Thread-safe.

        NCCL's collectives do not report that.
        """
        axis_groups = list(self._axis_groups.values())
        peers_in_turn = [
            backend.peers
            for axis_group in axis_groups
            for backend in (axis_group.sockets, axis_group.shared)
        ]
        single_peers = [(peer,) for axis_group in axis_groups for peer in axis_group.singles]
        return tuple(
            sorted({rank for peers in (*peers_in_turn, *single_peers) for rank in late(peers)})
        )

    @property
    def abandoned(self) -> bool:
        """True if this rank has left the group or could not join."""
        return self._failure is not None

    @property
    def left(self) -> bool:
        """True if this rank has left the group; no collective of the group runs any more."""
        return self._left

    @property
    def nccl(self) -> bool:
        """True if GPU tensors are exchanged by NCCL."""
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
        for ends in self._connections.values():
            for peer in ends:
                peer.close()
        for axis_group in self._axis_groups.values():
            axis_group.shared.close()
        self._axis_groups.clear()
        if dist.is_initialized():
            end()

    def _join(self) -> None:
        """Connect to the peers, and create the group of each axis; ``wait`` raises errors."""
        try:
            self._connections = self._rendezvous.meet(self.number, self._peers_on_axes())
            if self.nccl:
                self._join_nccl()
            for axis in self.mesh.names:  # every rank makes every group, in the same order
                self._axis_groups[axis] = self._new_axis_group(self.mesh, axis)
            if self.nccl:
                threading.Thread(
                    target=self._abort_on_departure, name="lazygt-ranks", daemon=True
                ).start()
        except Exception as error:  # noqa: BLE001 - kept, and raised again by `wait`
            self._failure = error

    def _abort_on_departure(self) -> None:
        """Abort NCCL's kernels when a rank of this host has left.

        Otherwise the kernels, and the device's stream, would wait for that rank until torch's
        watchdog ends the process.
        """
        peers = [ends.small for ends in self._connections.values()]
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
            meet = rendezvous(self._rendezvous_url(self.number), self._rank, self._world_size)
            store, _, _ = next(iter(meet))
        store.set_timeout(timeout)
        dist.init_process_group(
            NCCL,
            store=PrefixStore("group", store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        self._remove_old_data()

    def _rendezvous_url(self, number: int) -> str:
        """Return the URL of a group's rendezvous file: each group has its own."""
        return f"file://{self._spec.directory}/group.{number}"

    def _remove_old_data(self) -> None:
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
                Path(self._rendezvous_url(number).removeprefix("file://")).unlink(missing_ok=True)

    def _peers_on_axes(self) -> list[int]:
        """Return the ranks that share a mesh axis with this one, each once."""
        mesh = self.mesh
        return [
            rank
            for axis in mesh.names
            for members in mesh.axis_groups(axis)
            if self.rank in members
            for rank in members
            if rank != self.rank
        ]

    def _new_axis_group(self, mesh: Mesh, axis: str) -> AxisGroup:
        """Create the backends of an axis over this rank's connections."""
        members = next(ranks for ranks in mesh.axis_groups(axis) if self.rank in ranks)
        connections = [self._connections.get(rank) for rank in members]
        return AxisGroup(
            len(members),
            members.index(self.rank),
            SocketBackend([connection and connection.small for connection in connections]),
            _large_value_backend([connection and connection.large for connection in connections]),
            tuple(connection and connection.single for connection in connections),
            self._torch_group(mesh, axis, members) if self.nccl else None,
            self._new_group(mesh, axis, members) if self.nccl else None,
        )

    def _torch_group(self, mesh: Mesh, axis: str, members: tuple[int, ...]) -> Any:
        if len(members) == self._world_size:
            return dist.group.WORLD
        return self._new_group(mesh, axis, members)

    def _new_group(self, mesh: Mesh, axis: str, members: tuple[int, ...]) -> Any:
        seconds = timedelta(seconds=self._spec.timeout)
        return {ranks: dist.new_group(list(ranks), seconds) for ranks in mesh.axis_groups(axis)}[
            members
        ]

    def axis_group(self, axis: str) -> AxisGroup:
        """Return the group of an axis, once all ranks have joined.

        Raises:
            LazyGTError: this rank could not join, or the mesh has no such axis.
        """
        self.wait()
        if axis not in self._axis_groups:
            raise LazyGTError(f"the mesh {self._spec.mesh!r} has no axis {axis!r}")
        return self._axis_groups[axis]


def _large_value_backend(peers: Sequence[Peer | None]) -> SharedMemoryBackend | PeerBackend:
    """Return the backend for large values: shared memory if all ranks are on one host.

    All ranks choose the same: with several hosts, each rank has a peer on another host.
    """
    local_peers = [peer for peer in peers if peer is None or isinstance(peer, PeerSocket)]
    if len(local_peers) == len(peers):
        return SharedMemoryBackend(local_peers)
    # why: few groups are on several hosts
    from lazygt.runtime.collectives.peer_backend import PeerBackend

    return PeerBackend(peers)


def pin_to_cores(rank: int, world_size: int) -> None:
    """Pin this thread, and those it starts from now on, to this rank's share of the cores.

    Ranks that alternately wait for each other look like one busy process, so the kernel's scheduler
    may keep them on one core. No pinning happens if a rank has more threads than its share has
    cores, or if the share is a single core.
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
        pin_to_cores(rank, world_size)
    _current = Group(spec, rank, world_size, _rendezvous(spec, rank, listener), number)


def _rendezvous(spec: GroupSpec, rank: int, listener: int) -> Rendezvous | Meeting:
    """Return the connector of the ranks: for one host, or for several."""
    if not spec.store:
        return Rendezvous(rank, listener, spec.rendezvous, spec.timeout)
    # why: only on several hosts are there encrypted connections, for which sockets are loaded
    from lazygt.runtime.collectives.rendezvous import Meeting, RankAddress
    from lazygt.runtime.collectives.rendezvous_store import StoreClient

    token = bytes.fromhex(spec.token)
    store = StoreClient(spec.store, token, spec.timeout)
    location = RankAddress(spec.host, spec.rendezvous(rank), spec.address, spec.backend)
    return Meeting(rank, location, listener, store, token, spec.timeout)


def _required_group() -> Group:
    """Return this worker's group; LazyGTError if there is none."""
    if _current is None:
        raise LazyGTError("this worker is alone: there is no process group")
    return _current


def wait() -> None:
    """Wait until this worker's group is joined; call it before the first collective.

    Raises:
        LazyGTError: this worker has no group (it is the only one), or could not join.
    """
    _required_group().wait()


def axis_group(axis: str) -> AxisGroup:
    """Return this worker's group of a mesh axis.

    Raises:
        LazyGTError: this worker has no group, or the mesh no such axis.
    """
    return _required_group().axis_group(axis)


def pending_sends() -> PendingSends:
    """Return this worker's point-to-point sends in flight.

    Raises:
        LazyGTError: this worker has no group.
    """
    return _required_group().pending_sends


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
