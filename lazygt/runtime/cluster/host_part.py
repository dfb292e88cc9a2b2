"""Part of a session on a remote host: the processes of some ranks, and their messages."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.protocol import Closed, Died, Frozen, Kept, Opened, Refused, Said
from lazygt.runtime.cluster.upload_relay import Say
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.status_reader import Page, read_ranks
from lazygt.runtime.launch.worker_pool import HostMemory
from lazygt.runtime.messages import Copied, Snapped
from lazygt.runtime.wire import decode

_log = logging.getLogger("lazygt")

#: Seconds between two looks while a dead worker has not been replaced yet.
_LOOK_SECONDS = 0.5
#: Bytes of a snapshot in one message.
PIECE_BYTES = 16 << 20


class HostPart(threading.Thread):
    """Some ranks of a session, on this host: their link, on a thread of its own.

    Args:
        say: sends a message to the client; called on the part's thread, so that no other thread has
            to be woken for a worker's message.
        upload: the mirror of the client's arena.
        shadows: memory of the workers' snapshots from a lost host, by worker.
    """

    def __init__(
        self, number: int, spec: LinkSpec, say: Say, upload: Arena | None, shadows: Sequence[Arena]
    ) -> None:
        super().__init__(name=f"lazygt-part-{number}", daemon=True)
        self.number, self._spec, self._say = number, spec, say
        self._memory = HostMemory(upload, tuple(os.dup(arena.fd) for arena in shadows))
        self._link: ProcessLink | None = None
        #: held while status pages are read: their memory goes with the link
        self._looking = threading.Lock()
        self._orders: deque[Callable[[ProcessLink], object]] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = self._at_once = False
        self._reported: set[int] = set()
        #: by worker: (id, offset) of the values of its last snapshot, which the client has
        self._kept: dict[int, set[tuple[int, int]]] = {}

    # -- from the client's side ----------------------------------------------------------

    def tell(self, workers: Sequence[int], frames: Sequence[Frame]) -> None:
        """Pass a message on to workers, after all earlier orders.

        Raises:
            ProtocolError: there are no workers of these numbers.
        """
        for worker in workers:
            self._check(worker)
        link = self._link
        if self._orders or link is None:
            kept = [bytes(frame) for frame in frames]
            self.order(lambda link: self._send(link, workers, kept))
        else:
            self._send(link, workers, frames)

    def order(self, act: Callable[[ProcessLink], object]) -> None:
        """Run a function on the part's own thread."""
        self._orders.append(act)
        os.eventfd_write(self._alarm, 1)

    def look(self, seconds: float) -> tuple[Page | None, ...]:
        """Return the workers' status pages; empty if not started. For any thread.

        Args:
            seconds: time for which the workers shall report more details.
        """
        with self._looking:
            link = self._link
            if link is None or link.status is None:
                return ()
            link.status.watch(seconds)
            return read_ranks(link.status, dict(zip(self._spec.here, link.pids, strict=True)))

    def end(self, at_once: bool = False) -> None:
        """Order the end of the workers; the thread ends with them.

        Args:
            at_once: True to end them without waiting for their current work.
        """
        self._at_once = at_once
        self._ended = True
        os.eventfd_write(self._alarm, 1)

    # -- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._work(ProcessLink(self._spec, memory=self._memory))
        except (OSError, ValueError, LazyGTError) as error:
            self._say(Refused(self.number, f"{type(error).__name__}: {error}"), ())
        finally:
            self._say(Closed(self.number), ())

    def close(self) -> None:
        """Wait for the thread to end, and release the rest."""
        self.join()
        for descriptor in (*self._memory.snapshots, self._alarm):
            os.close(descriptor)

    def _work(self, link: ProcessLink) -> None:
        self._link = link
        self._say(Opened(self.number, link.pids), ())
        try:
            while not self._ended:
                self._follow_orders(link)
                self._pass_on(link)
        finally:
            with self._looking:
                self._link = None
            link.close(self._at_once)

    def _follow_orders(self, link: ProcessLink) -> None:
        """Carry out orders; an order stays in the queue until it is done."""
        while self._orders and not self._ended:
            self._orders[0](link)
            self._orders.popleft()

    def _pass_on(self, link: ProcessLink) -> None:
        """Wait for a worker's message, or for an order."""
        patience = _LOOK_SECONDS if self._reported else None
        try:
            message = link.receive(patience, self._alarm)
            while message is not None:
                self._said(link, *message)
                message = link.receive(0)
        except WorkerDied as death:
            self._died(link, death)
        except WorkerFrozen as frozen:
            self._say(Frozen(self.number, frozen.rank, frozen.pid, frozen.deadline), ())
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)

    def _send(self, link: ProcessLink, workers: Sequence[int], frames: Sequence[Frame]) -> None:
        for worker in workers:
            try:
                link.send(worker, frames)
            except WorkerDied:  # the part's thread reports its death
                continue

    def _died(self, link: ProcessLink, death: WorkerDied) -> None:
        if death.rank in self._reported:
            return
        self._reported.add(death.rank)
        run, step = link.last_step(death.rank) if self._spec.snapshots else (0, 0)
        told = Died(self.number, death.rank, death.pid, death.status, death.stderr, run, step)
        self._say(told, ())

    def replace(self, worker: int, group: int) -> None:
        """Order another process in a worker's place.

        Raises:
            ProtocolError: there is no worker of that number.
        """
        self._check(worker)

        def act(link: ProcessLink) -> None:
            try:
                link.replace(worker, group)
            except OSError as error:
                self._say(Refused(self.number, f"no process can be started: {error}"), ())
                return
            self._reported.discard(worker)
            self._say(Opened(self.number, link.pids, worker), ())

        self.order(act)

    def _check(self, worker: int) -> None:
        if worker >= len(self._spec.here):
            raise ProtocolError(f"there is no worker {worker} in part {self.number}")

    def refill(self) -> None:
        """Order spare processes."""

        def act(link: ProcessLink) -> None:
            try:
                link.refill()
            except OSError as error:
                _log.warning("no spare process could be started: %s", error)

        self.order(act)

    # -- messages of workers -------------------------------------------------------------

    def _said(self, link: ProcessLink, worker: int, frames: list[memoryview]) -> None:
        if Snapped.begins(frames[0]):
            self._keep(link, worker, frames)
        self._say(Said(self.number, worker), frames)

    def _keep(self, link: ProcessLink, worker: int, frames: list[memoryview]) -> None:
        """Send the client the new values of a snapshot, before the message about it."""
        told = decode(frames, (Snapped,))
        assert isinstance(told, Snapped)
        if told.error:
            return
        rows = [row for row in told.values if not row.borrowed]
        before = self._kept.get(worker, set())
        arena = link.snapshot_arena(worker)
        try:
            for row in rows:
                if (row.id, row.offset) not in before:
                    self._give(worker, arena, row)
        finally:
            arena.close()
        self._kept[worker] = {(row.id, row.offset) for row in rows}

    def _give(self, worker: int, arena: Arena, row: Copied) -> None:
        for begin in range(row.offset, row.offset + row.nbytes, PIECE_BYTES):
            if self._ended:
                return
            nbytes = min(PIECE_BYTES, row.offset + row.nbytes - begin)
            piece = arena.view(begin, nbytes).numpy().tobytes()
            self._say(Kept(self.number, worker, begin), [piece])
