"""The client's link to workers on several hosts: a `ProcessLink` for its own host, and an agent on
each other one.

Uploads that lie in the client's arena are mirrored to every host, at the same offsets, so a message
reads the same everywhere; hosts pass them on (`chain`). Copies of snapshots come back, so that what
a host knew outlives it.
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
from lazygt.runtime.cluster.alarm import can_be_read
from lazygt.runtime.cluster.chain import Chain
from lazygt.runtime.cluster.hosts import HostLauncher
from lazygt.runtime.cluster.inside import AgentThread
from lazygt.runtime.cluster.relay import Relay
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.collectives.store import StoreServer
from lazygt.runtime.launch import channel
from lazygt.runtime.launch.interrupts import DEFER_INTERRUPT
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.status_file import StatusFile
from lazygt.runtime.shared_memory import Arena
from lazygt.runtime.wire import encode

_log = logging.getLogger("lazygt")

#: Seconds between two looks whether a host is lost.
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 15.0
#: Numbers of parts: agents outlive sessions, of which each has others.
_PARTS = count()


class ClusterLink:
    """Workers on several hosts, and the way to them; the session's `Link`.

    Ranks are given host by host: the first ones to the client's own.

    Args:
        spec: what the workers are to be, on all hosts together.
        here: how many of them are on the client's host.
        hosts: the other hosts, each with how many of them are there.
        store: in which the ranks meet; closed with the link.
        launcher: what gave the hosts, and may give another for one that is lost; closed with this.
        name: by which `lazygt top` calls the session; by default its directory's, on this host.

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
        self.status = self._status_pages()
        self._relay = Relay(self.status)
        self._hosts, self._launcher = [host for host, _ in hosts], launcher
        #: which remote host a rank is on; the others are on this one
        self._host_of: dict[int, RemoteHost] = {}
        self._receiving = threading.RLock()
        #: what was wrong with messages that were taken by `look`
        self._broken: deque[LazyGTError] = deque()
        self._closed = False
        #: for a link that was dropped or forgotten: its agents may outlive it
        self._net = weakref.finalize(self, _abandon, self._hosts, os.getpid())
        #: of this host, once ranks of a lost one have come here
        self._agent: AgentThread | None = None
        self._epoll = select.epoll()
        self._chain = Chain(self.upload, spec.arena_bytes, spec.token)
        first = here
        for host, workers in hosts:
            self._take_in(host)
            if not workers:
                continue
            ranks = tuple(range(first, first + workers))
            host.open(next(_PARTS), replace(spec, ranks=ranks, client_here=False))
            self._host_of |= dict.fromkeys(ranks, host)
            first += workers

    def _status_pages(self) -> StatusFile:
        """The pages of all ranks, which lie in the file of those that are here."""
        if self._local is not None and self._local.status is not None:
            return self._local.status
        descriptor = StatusFile.create(self.world_size)
        pages = StatusFile(descriptor)
        self._close_pages = weakref.finalize(self, _close_pages, pages, descriptor)
        return pages

    def _take_in(self, host: RemoteHost) -> None:
        """Be woken by what comes from a host, and let it have what is uploaded."""
        with suppress(FileExistsError):  # all connections of one listener have its descriptor
            self._epoll.register(host.connection.fd, select.EPOLLIN)
        self._chain.add(host)

    @property
    def elsewhere(self) -> Mapping[int, int]:
        """A rank on each host but the client's own, by the number of the host."""
        numbers = {id(host): number for number, host in enumerate(self._hosts)}
        ranks = sorted(self._host_of.items(), reverse=True)
        return {numbers[id(host)]: rank for rank, host in ranks}

    # -- what is wrong ---------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers, each on its own host; 0 where that is not known yet."""
        known = dict(enumerate(self._local.pids)) if self._local is not None else {}
        for host in self._hosts:
            for part in host.parts.values():
                known |= dict(zip(part.ranks, part.pids, strict=True))
        return tuple(known[rank] for rank in range(self.world_size))

    @property
    def healthy(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        here = self._local is None or self._local.healthy
        return here and not self._closed and not any(h.deaths or h.lost for h in self._hosts)

    @property
    def lost(self) -> Mapping[int, WorkerDied]:
        """The workers that are known to have died, with how they did."""
        known = dict(self._local.lost) if self._local is not None else {}
        for host in self._hosts:
            deaths = list(host.deaths.items())  # at once: `look` may hear of others
            known |= {r: death for r, death in deaths if self._host_of[r] is host}
        return known

    def look(self) -> None:
        """See ``Link.look``."""
        if self.status.watched:
            self._take_what_came()
            self._relay.look(self._hosts, self._host_of)

    def _take_what_came(self) -> None:
        """Read what hosts have said, unless somebody waits for messages, and so reads that."""
        if self._epoll.poll(0) and self._receiving.acquire(blocking=False):
            try:
                for host in self._hosts:
                    host.pump()
            except LazyGTError as error:  # for who waits next
                self._broken.append(error)
            finally:
                self._receiving.release()

    # -- recovery --------------------------------------------------------------------------

    def replace(self, rank: int, group_number: int) -> None:
        """Start a new process in the place of a worker; on another host where its own is lost.

        Raises:
            OSError: none can be started.
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
        """Have a rank of a lost host on another one, with what its snapshots have."""
        host = self._another(rank, lost)
        shadow = lost.shadows.pop(rank, None)
        spec = replace(self._spec, ranks=(rank,), group_number=group_number)
        spec = replace(spec, client_here=False, spares=0)
        host.open(next(_PARTS), spec, [shadow])
        lost.deaths.pop(rank, None)
        self._host_of[rank] = host

    def _another(self, rank: int, lost: RemoteHost) -> RemoteHost:
        """A host for a rank whose own is lost: a new one, or the one with fewest ranks."""
        if self._launcher is not None:
            try:
                return self._joined(self._launcher.another(rank))
            except LaunchError as error:
                _log.warning("host %s is lost, and there is no other: %s", lost.name, error)
        living = [host for host in self._hosts if not host.lost] or [self._own_host()]
        return min(living, key=lambda host: len(host.ranks))

    def _own_host(self) -> RemoteHost:
        """The client's host, with an agent of its own for ranks that come there."""
        spec = self._spec
        self._agent = AgentThread(
            lambda asked: replace(asked, host=spec.host, address=spec.address)
        )
        return self._joined(RemoteHost(socket.gethostname(), self._agent.end))

    def _joined(self, host: RemoteHost) -> RemoteHost:
        """A host of this session, which may be new: then it gets what the others have."""
        if host not in self._hosts:
            self._hosts.append(host)
            self._take_in(host)
        return host

    def refill(self) -> None:
        """Have as many spare processes as there are to be, on each host."""
        if self._local is not None:
            self._local.refill()
        for host in self._hosts:
            host.refill()

    def last_step(self, rank: int) -> tuple[int, int]:
        """The run and the step of it that a worker did last."""
        host = self._host_of.get(rank)
        if host is not None:
            return host.last_steps.get(rank, (0, 0))
        assert self._local is not None
        return self._local.last_step(rank)

    def snapshot_arena(self, rank: int) -> Arena:
        """A mapping of the memory in which a worker's snapshots lie, or of its copy here."""
        host = self._host_of.get(rank)
        if host is not None:
            return Arena.attach(os.dup(host.shadows[rank].fd))
        assert self._local is not None
        return self._local.snapshot_arena(rank)

    # -- messages --------------------------------------------------------------------------

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        """None: there is more than a mailbox between client and workers."""
        return None

    def fetch_arena(self, rank: int) -> Arena | None:
        """Of a worker on this host; what others send comes with their messages."""
        if rank in self._host_of or self._local is None:
            return None
        return self._local.fetch_arena(rank)

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Have uploads, (offset, bytes) each, on every host before a message tells of them."""
        self._chain.mirror(slots)

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
            host.send(rank, frames, self._chain.number)

    def receive(
        self, timeout: float | None, beside: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """The next message of any rank; see ``ProcessLink.receive``."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while True:
                self._check_open()
                message = self._next()
                if message is not None:
                    return message
                self._raise_news()
                left = None if until is None else until - time.monotonic()
                if left is None or left <= 0:
                    self._raise_if_lost()
                if left is not None and left <= 0:
                    return None
                message = self._wait(_LOOK_SECONDS if left is None else left, beside)
                if message is not None:
                    return message
                if beside is not None and can_be_read(beside):
                    return None

    def _next(self) -> tuple[int, list[memoryview]] | None:
        """What has come, from another host or from here."""
        for host in self._hosts:
            host.pump()
            if host.inbox:
                return host.inbox.popleft()
        self._chain.pump()
        return None if self._local is None else self._local.receive(0)

    def _raise_news(self) -> None:
        """Raise what has gone wrong since, unless the worker is elsewhere by now."""
        if self._broken:
            raise self._broken.popleft()
        for host in self._hosts:
            while host.errors:
                error = host.errors.popleft()
                rank = error.rank if isinstance(error, WorkerDied | WorkerFrozen) else None
                if rank is None or self._host_of[rank] is host:
                    raise error

    def _raise_if_lost(self) -> None:
        """Do not wait for ever, nor come back with nothing, when an answer is known not to come."""
        for host in self._hosts:
            for rank in sorted(host.deaths):
                if self._host_of[rank] is host:
                    raise host.deaths[rank]

    def _wait(self, seconds: float, beside: int | None) -> tuple[int, list[memoryview]] | None:
        """Wait for anything at all; a message of this host's, if it is that."""
        seconds = min(seconds, _LOOK_SECONDS)
        if beside is not None:
            self._epoll.register(beside, select.EPOLLIN)
        try:
            if self._local is not None:
                return self._local.receive(seconds, self._epoll.fileno())
            poller = select.poll()
            poller.register(self._epoll.fileno(), select.POLLIN)
            DEFER_INTERRUPT.wait(poller, 1_000 * seconds)
        finally:
            if beside is not None:
                self._epoll.unregister(beside)
        return None

    def close(self) -> None:
        """End the workers everywhere. Idempotent; takes seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._net.detach()
        for host in self._hosts:
            host.close()
        self._chain.close()
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
            self._close_pages()
        if self._local is None and self.upload is not None:
            self.upload.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LazyGTError("the link to the workers is closed")


def _close_pages(pages: StatusFile, descriptor: int) -> None:
    pages.close()
    os.close(descriptor)


def _abandon(hosts: Sequence[RemoteHost], owner: int) -> None:
    """Have all workers of a session ended, without waiting."""
    if os.getpid() == owner:  # else a child that the client forked
        for host in hosts:
            host.close()
