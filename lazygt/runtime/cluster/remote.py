"""Client's view of a host: the agent there, and the session's parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import Elsewhere, Page, StatusFile, WorkerPage, decoded
from lazygt.runtime.arenas import Arena, create_memory
from lazygt.runtime.cluster import protocol
from lazygt.runtime.cluster.agent import Connected
from lazygt.runtime.cluster.host_part import PIECE_BYTES
from lazygt.runtime.cluster.protocol import (
    TO_CLIENT,
    Alone,
    Close,
    Closed,
    Died,
    Frozen,
    Has,
    Kept,
    Listens,
    Look,
    Mirror,
    Open,
    Opened,
    Refill,
    Refused,
    Replace,
    Said,
    Seen,
    Shadow,
    Tell,
)
from lazygt.runtime.cluster.upload_relay import write
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.worker_pool import SNAPSHOT_BYTES
from lazygt.runtime.wire import Message, decode, encode


@dataclass(slots=True)
class RemotePart:
    """Part of a session: some of its ranks, on another host."""

    number: int
    ranks: tuple[int, ...]  # ranks of its workers, by their number in the part
    pids: tuple[int, ...]
    #: True if its processes have been started; ended: True if they have all gone
    opened: bool = False
    ended: bool = False
    #: workers that are being replaced: messages of the old process are ignored
    replacing: set[int] = field(default_factory=set)
    #: time of the unanswered status request, in nanoseconds of the monotonic clock; 0: none
    requested_at: int = 0
    seen: tuple[Page | None, ...] | None = None  # the last status answer, until it is used


class RemoteHost:
    """Host on which an agent serves this session.

    Received messages are queued in order: those of workers in ``inbox``, errors in ``errors``.

    Args:
        name: name of the host, for people.
        connection: connection to its agent.
    """

    def __init__(self, name: str, connection: Connected) -> None:
        self.name, self.connection = name, connection
        self.parts: dict[int, RemotePart] = {}
        self.inbox: deque[tuple[int, list[memoryview]]] = deque()
        self.errors: deque[LazyGTError] = deque()
        #: messages about relayed uploads, for `upload_progress`
        self.upload_events: deque[Listens | Has | Alone] = deque()
        #: rank -> the error of its death
        self.deaths: dict[int, WorkerDied] = {}
        #: rank -> its last run and step before its death
        self.last_steps: dict[int, tuple[int, int]] = {}
        #: rank -> copies of its snapshots, which outlive the host
        self.shadows: dict[int, Arena] = {}
        self._last_frames: Sequence[Frame] | None = None
        self._loss_handled = self._closing = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of this host, dead or alive."""
        return tuple(rank for part in self.parts.values() for rank in part.ranks)

    @property
    def lost(self) -> bool:
        """True if no message will come from there any more."""
        return self.connection.closed is not None

    # -- to the agent --------------------------------------------------------------------

    def open(self, number: int, spec: LinkSpec, shadows: Sequence[Arena | None] = ()) -> None:
        """Order the start of workers; does not wait for them.

        Args:
            spec: specification of the workers, with their ranks in ``here``.
            shadows: copies of their snapshots, by worker; empty: the workers are new.
        """
        first = spec.arena_bytes or SNAPSHOT_BYTES
        for worker, arena in enumerate(shadows):
            if arena is not None:
                for offset, piece in pieces(arena):
                    self.say(Shadow(number, worker, first, offset), [piece])
        self.parts[number] = RemotePart(number, spec.here, (0,) * len(spec.here))
        if spec.snapshots:
            for rank, arena in zip(spec.here, shadows or [None] * len(spec.here), strict=True):
                self.shadows[rank] = arena or Arena.own(create_memory(first))
        self.say(Open(number, protocol.spec_text(spec)))

    def send(self, rank: int, frames: Sequence[Frame], mirrors: int = 0) -> None:
        """Send a worker a message; does not wait.

        The same frames for several workers in a row are transmitted once.

        Args:
            mirrors: number of the last piece of uploads that must arrive before it.
        """
        part, worker = self._locate(rank)
        same, self._last_frames = frames is self._last_frames, frames
        self.say(Tell(part.number, (worker,), mirrors), () if same else frames)

    def mirror(self, message: Mirror, data: Frame) -> None:
        """Send bytes of the client's arena to the host."""
        self.say(message, [data])

    def replace(self, rank: int, group: int) -> None:
        """Order the replacement of a worker by another process."""
        part, worker = self._locate(rank)
        part.replacing.add(worker)
        self.deaths.pop(rank, None)
        self.inbox = deque(item for item in self.inbox if item[0] != rank)
        self.errors = deque(e for e in self.errors if getattr(e, "rank", None) != rank)
        self.say(Replace(part.number, worker, group))

    def refill(self) -> None:
        """Order spare processes up to the configured number."""
        for part in self.parts.values():
            self.say(Refill(part.number))

    def look(self, seconds: float) -> None:
        """Request the workers' status, unless a request is pending. For any thread.

        Args:
            seconds: time for which the workers shall report more details.
        """
        for part in list(self.parts.values()):
            if not (part.requested_at or part.ended or self.lost):
                part.requested_at = time.monotonic_ns()
                self.say(Look(part.number, seconds))

    def close(self) -> None:
        """Order the end of all workers; `ended` becomes True afterwards."""
        self._closing = True
        for part in self.parts.values():
            self.say(Close(part.number))

    @property
    def ended(self) -> bool:
        """True if no worker of this session is left there."""
        return self.lost or all(part.ended for part in self.parts.values())

    def release(self) -> None:
        """Release the memory of the snapshot copies."""
        for arena in self.shadows.values():
            arena.close()
        self.shadows.clear()

    def say(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        """Send the agent a message; does not wait."""
        if not self.lost:
            self.connection.send(encode(message, list(frames)))

    def _locate(self, rank: int) -> tuple[RemotePart, int]:
        """Return the part of a rank, and the number of its worker there."""
        for part in self.parts.values():
            if rank in part.ranks:
                return part, part.ranks.index(rank)
        raise LazyGTError(f"rank {rank} is not on host {self.name}; please report this")

    # -- from the agent ------------------------------------------------------------------

    def pump(self) -> None:
        """Handle arrived messages; if the host is lost, all its workers have died."""
        while (frames := self.connection.take()) is not None:
            self._handle(decode(frames, TO_CLIENT), frames[1:])
        if self.lost and not self._loss_handled:
            self._loss_handled = True
            for part in self.parts.values():
                for worker, rank in enumerate(part.ranks):
                    # after `close` the ends of the workers are expected
                    if not self._closing and rank not in self.deaths:
                        reason = f"its host {self.name} is lost ({self.connection.closed})"
                        self._record_death(WorkerDied(rank, part.pids[worker], reason, ""))

    def _handle(self, message: Message, frames: list[memoryview]) -> None:
        """Handle one message of the agent.

        Args:
            frames: the frames after the message's header.
        """
        if isinstance(message, Listens | Has | Alone):
            self.upload_events.append(message)
            return
        part = self.parts.get(message.part)  # type: ignore[attr-defined]
        if part is None:
            return
        match message:
            case Said(_, worker):
                if worker not in part.replacing:
                    self.inbox.append((part.ranks[worker], frames))
            case Kept(_, worker, offset):
                if worker not in part.replacing:
                    write(self.shadows[part.ranks[worker]], offset, frames[0])
            case Opened(_, pids, replaced):
                part.opened, part.pids = True, pids
                if replaced is not None:
                    part.replacing.discard(replaced)
            case Died(_, worker, pid, status, stderr, run, step):
                if worker not in part.replacing:
                    rank = part.ranks[worker]
                    self.last_steps[rank] = run, step
                    self._record_death(WorkerDied(rank, pid, self._with_host_name(status), stderr))
            case Frozen(_, worker, pid, deadline):
                self.errors.append(WorkerFrozen(part.ranks[worker], pid, deadline))
            case Seen():
                part.seen, part.requested_at = protocol.pages_of(frames[0]), 0
            case Refused(_, why):
                self.errors.append(ProtocolError(f"host {self.name}: {why}"))
            case Closed():
                part.ended = True

    def _with_host_name(self, status: str) -> str:
        """Add the host's name to an exit status."""
        return f"{status}, on host {self.name}"

    def _record_death(self, death: WorkerDied) -> None:
        """Record a worker's death, and queue its error."""
        self.deaths[death.rank] = death
        self.errors.append(death)


def pieces(arena: Arena) -> Sequence[tuple[int, bytes]]:
    """Return the written bytes of an arena in pieces of bounded size, as (offset, bytes)."""
    return [
        (offset, arena.view(offset, nbytes).numpy().tobytes())
        for offset, nbytes in arena.extents(PIECE_BYTES)
    ]


# -- interface of host allocators ------------------------------------------------------------------
# They serve sessions that an engine did not start.


class HostLauncher(Protocol):
    """Launcher that starts agents on hosts, and replaces lost ones."""

    def start(self, seconds: float) -> Sequence[tuple[RemoteHost, int]]:
        """Return all hosts, each with its number of workers; ranks follow this order.

        Args:
            seconds: time limit of the whole start.

        Raises:
            LaunchError: not all hosts are there in time; nothing is left of them.
        """

    def another(self, rank: int) -> RemoteHost:
        """Return a host for a worker of a lost host; it may take several such workers.

        Raises:
            LaunchError: there is no host in time.
        """

    def close(self) -> None:
        """Release all hosts. Idempotent."""


# -- relay of status pages -------------------------------------------------------------------------
# While `lazygt top` watches, the client requests the pages of ranks on other hosts a few times a
# second, and writes them into its own file, with times on its host's clock. A host gets no new
# request before it has answered, so a link that is down queues one request.

#: Seconds for which workers report details: longer than the interval of the requests.
_LEASE_SECONDS = 3.0
#: Nanoseconds after which a request counts as not answered.
_UNHEARD_AFTER = 1_000_000_000


class Relay:
    """Writer of the pages of other hosts' ranks. For one thread.

    Args:
        file: the client's status file.
    """

    def __init__(self, file: StatusFile) -> None:
        self._file = file
        #: rank -> its last page, and the page's time on this host's clock
        self._last_pages: dict[int, tuple[WorkerPage, int]] = {}

    def look(self, hosts: Sequence[RemoteHost], host_of: Mapping[int, RemoteHost]) -> None:
        """Write the pages that have arrived, and request new ones.

        Args:
            host_of: rank -> its current host: a rank of a lost host may be on another one.
        """
        for host in hosts:
            for part in list(host.parts.values()):
                workers_here = {
                    worker: rank
                    for worker, rank in enumerate(part.ranks)
                    if host_of.get(rank) is host and not part.ended
                }
                self._update_part(host, part, workers_here)
            host.look(_LEASE_SECONDS)

    def _update_part(
        self, host: RemoteHost, part: RemotePart, workers_here: Mapping[int, int]
    ) -> None:
        """Write the pages of a part's workers.

        Args:
            workers_here: number of a worker in the part -> its rank, if it runs on this host.
        """
        now = time.monotonic_ns()
        pages, part.seen = part.seen, None
        if host.lost:
            for rank in workers_here.values():
                self._write(rank, Elsewhere(host.name, "", now))
        elif pages is not None:
            for worker, rank in workers_here.items():
                page = pages[worker] if worker < len(pages) else None
                self._store_page(rank, part.pids[worker], page, now)
                process = "S" if page is None else page.process
                self._write(rank, Elsewhere(host.name, process, now))
        elif part.requested_at and now - part.requested_at > _UNHEARD_AFTER:
            for rank in workers_here.values():
                self._write(rank, Elsewhere(host.name, "S", now, part.requested_at))

    def _store_page(self, rank: int, pid: int, page: Page | None, now: int) -> None:
        """Store a rank's page, with times converted to this host's clock."""
        self._last_pages[rank] = WorkerPage(rank, pid, "starting"), now
        if page is None:
            return
        when = now - int(page.age * 1e9)
        clock_offset = when - page.when  # of this host's clock, as far as that shows
        with suppress(ProtocolError):
            message = decoded(page.message, WorkerPage)
            message = replace(
                message,
                rank=rank,
                begun=message.begun and message.begun + clock_offset,
                measured_at=message.measured_at and message.measured_at + clock_offset,
            )
            self._last_pages[rank] = message, when

    def _write(self, rank: int, elsewhere: Elsewhere) -> None:
        """Write a rank's last page, with the state of its process on its host."""
        message, when = self._last_pages.get(
            rank, (WorkerPage(rank, 0, "starting"), elsewhere.received)
        )
        self._file.write(1 + rank, replace(message, elsewhere=elsewhere), when)
