"""The client's link to workers on several hosts.

A `ProcessLink` serves the client's own host, and an agent each other host.

Uploads in the client's arena are mirrored to every host, at the same offsets, so a message has the
same offsets for all hosts; hosts relay the uploads in a chain (`upload_progress`). Copies of
snapshots come back to the client, so that a host's values outlive the host.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from lazygt.errors import LaunchError, LazyGTError, WorkerDied, WorkerFrozen
from lazygt.host.timer import can_be_read
from lazygt.net import channel
from lazygt.net.channel import new_token
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import StatusFile
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.agent import AgentThread, host_id
from lazygt.runtime.cluster.remote import HostLauncher, Relay, RemoteHost
from lazygt.runtime.cluster.upload_progress import Chain
from lazygt.runtime.collectives.rendezvous_store import StoreServer
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import encode

_log = logging.getLogger("lazygt")

#: Seconds between two checks for lost hosts.
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 15.0
#: Numbers of parts, unique over sessions, since agents outlive these.
_PARTS = count()


class ClusterLink:
    """Workers on several hosts, and the channels to them; the session's `Link`.

    Ranks are assigned host by host, the first ones to the client's own.

    Args:
        spec: specification of the workers on all hosts together.
        here: number of workers on the client's host.
        hosts: the other hosts, each with its number of workers.
        store: the store of the ranks' rendezvous; closed with the link.
        launcher: the launcher of the hosts, which may replace a lost one; closed with the link.
        name: the session's name in `lazygt top`; by default that of its directory on this host.

    Raises:
        ValueError, OSError: as `ProcessLink`.
    """

    encode = staticmethod(encode)
    mirrors = True

    def __init__(
        self,
        spec: LinkSpec,
        here: int,
        hosts: Sequence[tuple[RemoteHost, int]],
        store: StoreServer | None = None,
        launcher: HostLauncher | None = None,
        name: str = "",
    ) -> None:
        if here + sum(workers for _, workers in hosts) != spec.world_size:
            raise ValueError(f"the hosts have other than {spec.world_size} workers")
        self.world_size, self._spec, self._store = spec.world_size, spec, store
        self.hosts = tuple(filter(None, (here, *(workers for _, workers in hosts))))
        self._local: ProcessLink | None = None
        if here:
            self._local = ProcessLink(replace(spec, ranks=tuple(range(here))))
        arena = Arena.create(spec.arena_bytes) if spec.arena_bytes and not here else None
        self.upload = arena if self._local is None else self._local.upload
        directory = self._local.name if self._local else f"lazygt-{secrets.token_hex(8)}"
        self.name = name or directory
        self.status = self._open_status_file()
        self._relay = Relay(self.status)
        self._hosts, self._launcher = [host for host, _ in hosts], launcher
        #: rank -> its remote host; the other ranks are on this host
        self._host_of: dict[int, RemoteHost] = {}
        self._receiving = threading.RLock()
        #: errors of messages that `look` has received, for the next `receive`
        self._deferred_errors: deque[LazyGTError] = deque()
        self._closed = False
        #: ends the workers of a link that was dropped without `close`
        self._finalizer = weakref.finalize(self, _abandon, self._hosts, os.getpid())
        #: agent of this host, for ranks of a lost host that moved here
        self._agent: AgentThread | None = None
        self._epoll = select.epoll()
        self._uploads = Chain(self.upload, spec.arena_bytes, spec.token)
        first = here
        for host, workers in hosts:
            self._register_host(host)
            if not workers:
                continue
            ranks = tuple(range(first, first + workers))
            host.open(next(_PARTS), replace(spec, ranks=ranks, client_here=False))
            self._host_of |= dict.fromkeys(ranks, host)
            first += workers

    @classmethod
    def at(
        cls,
        address: str,
        spec: LinkSpec,
        here: int,
        hosts: Sequence[tuple[RemoteHost, int]],
        launcher: HostLauncher | None = None,
    ) -> ClusterLink:
        """Start the workers of a session whose client has this address for other hosts."""
        token = new_token()
        store = StoreServer(address, token)
        spec = replace(spec, token=token, store=store.endpoint, host=host_id(), address=address)
        try:
            return cls(spec, here, hosts, store, launcher)
        except BaseException:
            store.close()
            raise

    def _open_status_file(self) -> StatusFile:
        """Return the file with the status of each rank of all hosts, for ``lazygt top``.

        It is the local link's, which has room for all ranks; without one, a new file, closed with
        this link.
        """
        if self._local is not None and self._local.status is not None:
            return self._local.status
        descriptor = StatusFile.create(self.world_size)
        status_file = StatusFile(descriptor)
        self._status_finalizer = weakref.finalize(self, _close_status, status_file, descriptor)
        return status_file

    def _register_host(self, host: RemoteHost) -> None:
        """Register a host's descriptor, and send it the uploads."""
        with suppress(FileExistsError):  # all connections of one listener have its descriptor
            self._epoll.register(host.connection.fd, select.EPOLLIN)
        self._uploads.add(host)

    @property
    def elsewhere(self) -> Mapping[int, int]:
        """One rank on each host other than the client's, by the host's number."""
        numbers = {id(host): number for number, host in enumerate(self._hosts)}
        ranks = sorted(self._host_of.items(), reverse=True)
        return {numbers[id(host)]: rank for rank, host in ranks}

    # -- faults ----------------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, each on its own host; 0 while not known."""
        pids = dict(enumerate(self._local.pids)) if self._local is not None else {}
        for host in self._hosts:
            for part in host.parts.values():
                pids |= dict(zip(part.ranks, part.pids, strict=True))
        return tuple(pids[rank] for rank in range(self.world_size))

    @property
    def healthy(self) -> bool:
        """True if no fault of the link is known."""
        here = self._local is None or self._local.healthy
        return here and not self._closed and not any(h.deaths or h.lost for h in self._hosts)

    @property
    def lost(self) -> Mapping[int, WorkerDied]:
        """Workers that are known to have died, with their errors."""
        deaths_by_rank = dict(self._local.lost) if self._local is not None else {}
        for host in self._hosts:
            deaths = list(host.deaths.items())  # a copy: `look` may add others meanwhile
            deaths_by_rank |= {r: death for r, death in deaths if self._host_of[r] is host}
        return deaths_by_rank

    def update_status(self) -> None:
        """See ``Link.update_status``."""
        if self.status.watched:
            self._receive_arrived()
            self._relay.look(self._hosts, self._host_of)

    def _receive_arrived(self) -> None:
        """Receive the hosts' messages, unless another thread is in `receive` and does that."""
        if self._epoll.poll(0) and self._receiving.acquire(blocking=False):
            try:
                for host in self._hosts:
                    host.pump()
            except LazyGTError as error:  # the next wait raises it
                self._deferred_errors.append(error)
            finally:
                self._receiving.release()

    # -- recovery --------------------------------------------------------------------------

    def replace(self, rank: int, group_number: int) -> None:
        """Start a new process in the place of a worker, on another host if its own is lost.

        Raises:
            OSError: no process can be started.
        """
        with self._receiving:
            host = self._host_of.get(rank)
            if host is None:
                assert self._local is not None
                self._local.replace(rank, group_number)
            elif not host.lost:
                host.replace(rank, group_number)
            else:
                self._move(rank, host, group_number)

    def _move(self, rank: int, lost: RemoteHost, group_number: int) -> None:
        """Move a rank of a lost host to another one, with its last snapshots."""
        host = self._replacement_host(rank, lost)
        shadow = lost.shadows.pop(rank, None)
        spec = replace(self._spec, ranks=(rank,), group_number=group_number)
        spec = replace(spec, client_here=False, spares=0)
        host.open(next(_PARTS), spec, [shadow])
        lost.deaths.pop(rank, None)
        self._host_of[rank] = host

    def _replacement_host(self, rank: int, lost: RemoteHost) -> RemoteHost:
        """Return a host for a rank of a lost host: a new one, or the one with the fewest ranks."""
        if self._launcher is not None:
            try:
                return self._add_host(self._launcher.another(rank))
            except LaunchError as error:
                _log.warning("host %s is lost, and there is no other: %s", lost.name, error)
        living = [host for host in self._hosts if not host.lost] or [self._start_own_host()]
        return min(living, key=lambda host: len(host.ranks))

    def _start_own_host(self) -> RemoteHost:
        """Start an agent on the client's host, for ranks that move there; return the host."""
        spec = self._spec
        self._agent = AgentThread(
            lambda requested: replace(requested, host=spec.host, address=spec.address)
        )
        return self._add_host(RemoteHost(socket.gethostname(), self._agent.end))

    def _add_host(self, host: RemoteHost) -> RemoteHost:
        """Add a host to this session, unless it is part of it, and send it the uploads."""
        if host not in self._hosts:
            self._hosts.append(host)
            self._register_host(host)
        return host

    def refill(self) -> None:
        """Start spare processes up to the configured number, on each host."""
        if self._local is not None:
            self._local.refill()
        for host in self._hosts:
            host.refill()

    def last_step(self, rank: int) -> tuple[int, int]:
        """Return the run that a worker last timed, and its step in that run."""
        host = self._host_of.get(rank)
        if host is not None:
            return host.last_steps.get(rank, (0, 0))
        assert self._local is not None
        return self._local.last_step(rank)

    def snapshot_arena(self, rank: int) -> Arena:
        """Return a new mapping of a worker's snapshot memory, or of its copy here."""
        host = self._host_of.get(rank)
        if host is not None:
            return Arena.attach(os.dup(host.shadows[rank].fd))
        assert self._local is not None
        return self._local.snapshot_arena(rank)

    # -- messages --------------------------------------------------------------------------

    def native_fetcher(self, make: Any, *arguments: Any) -> Any:
        """Return None: the client has no mailboxes to all workers."""
        return None

    def fetch_arena(self, rank: int) -> Arena | None:
        """Return the fetch arena of a worker on this host.

        None for others: their values come with their messages.
        """
        if rank in self._host_of or self._local is None:
            return None
        return self._local.fetch_arena(rank)

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Send slots of the upload arena, (offset, bytes) each, to every host."""
        self._uploads.mirror(slots)

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Queue a message for a worker. Does not wait.

        Raises:
            WorkerDied, ProtocolError, ValueError, LazyGTError: as ``ProcessLink.send``.
        """
        self._check_open()
        host = self._host_of.get(rank)
        if host is None:
            assert self._local is not None
            self._local.send(rank, frames)
        elif rank in host.deaths:
            raise host.deaths[rank]
        else:
            channel.check_length(channel.length_of(frames), self._spec.max_message)
            host.send(rank, frames, self._uploads.number)

    def receive(
        self, timeout: float | None, wake_fd: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Return the next message of any rank; see ``ProcessLink.receive``."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while True:
                self._check_open()
                message = self._next_message()
                if message is not None:
                    return message
                self._raise_new_error()
                remaining = None if until is None else until - time.monotonic()
                if remaining is None or remaining <= 0:
                    self._raise_if_lost()
                if remaining is not None and remaining <= 0:
                    return None
                message = self._wait(_LOOK_SECONDS if remaining is None else remaining, wake_fd)
                if message is not None:
                    return message
                if wake_fd is not None and can_be_read(wake_fd):
                    return None

    def _next_message(self) -> tuple[int, list[memoryview]] | None:
        """Return the next arrived message, from another host or from this one."""
        for host in self._hosts:
            host.pump()
            if host.inbox:
                return host.inbox.popleft()
        self._uploads.pump()
        return None if self._local is None else self._local.receive(0)

    def _raise_new_error(self) -> None:
        """Raise the next new error; drop errors of workers that have moved to another host."""
        if self._deferred_errors:
            raise self._deferred_errors.popleft()
        for host in self._hosts:
            while host.errors:
                error = host.errors.popleft()
                rank = error.rank if isinstance(error, WorkerDied | WorkerFrozen) else None
                if rank is None or self._host_of[rank] is host:
                    raise error

    def _raise_if_lost(self) -> None:
        """Raise for a worker that has died, since its answer will not come."""
        for host in self._hosts:
            for rank in sorted(host.deaths):
                if self._host_of[rank] is host:
                    raise host.deaths[rank]

    def _wait(self, seconds: float, wake_fd: int | None) -> tuple[int, list[memoryview]] | None:
        """Wait for any event; return a message if it is one of this host's."""
        seconds = min(seconds, _LOOK_SECONDS)
        if wake_fd is not None:
            self._epoll.register(wake_fd, select.EPOLLIN)
        try:
            if self._local is not None:
                return self._local.receive(seconds, self._epoll.fileno())
            poller = select.poll()
            poller.register(self._epoll.fileno(), select.POLLIN)
            DEFER_INTERRUPT.wait(poller, 1_000 * seconds)
        finally:
            if wake_fd is not None:
                self._epoll.unregister(wake_fd)
        return None

    def close(self) -> None:
        """End the workers everywhere. Idempotent; takes seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        for host in self._hosts:
            host.close()
        self._uploads.close()
        if self._local is not None:
            self._local.close()
        until = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < until and not all(host.ended for host in self._hosts):
            self._epoll.poll(_LOOK_SECONDS)
            for host in self._hosts:
                host.pump()
        for host in self._hosts:
            host.release()
        if self._agent is not None:
            self._agent.end.close("the session is closed")
            self._agent.join()
        if self._launcher is not None:
            self._launcher.close()
        self._epoll.close()
        if self._store is not None:
            self._store.close()
        if self._local is None:
            self._status_finalizer()
        if self._local is None and self.upload is not None:
            self.upload.close()

    def _check_open(self) -> None:
        """Raise LazyGTError if the link is closed."""
        if self._closed:
            raise LazyGTError("the link to the workers is closed")


def _close_status(status_file: StatusFile, descriptor: int) -> None:
    """Close the status file of a link without workers on this host."""
    status_file.close()
    os.close(descriptor)


def _abandon(hosts: Sequence[RemoteHost], owner: int) -> None:
    """Order the end of all workers of a session, without waiting."""
    if os.getpid() == owner:  # not in a child that the client forked
        for host in hosts:
            host.close()
