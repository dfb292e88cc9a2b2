"""Share of a session on a remote host: the processes of some ranks, and their messages."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import Page, read_ranks
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.protocol import Closed, Died, Frozen, Kept, Opened, Refused, Said
from lazygt.runtime.cluster.upload_relay import SendMessage
from lazygt.runtime.launch.process_link import ProcessLink
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.worker_pool import HostMemory
from lazygt.runtime.messages import Copied, Snapped
from lazygt.runtime.wire import decode

_log = logging.getLogger("lazygt")

#: Longest wait in seconds while a dead worker has not been replaced yet.
_LOOK_SECONDS = 0.5
#: Bytes of a snapshot in one message.
PIECE_BYTES = 16 << 20


class HostPart(threading.Thread):
    """Thread that runs the link to some of a session's workers, on this host.

    Args:
        send: sends a message to the client; called on this thread, so that no other thread has to
            be woken for a worker's message.
        upload: the mirror of the client's arena.
        shadows: memory of the workers' snapshots from a lost host, by worker.
    """

    def __init__(
        self,
        number: int,
        spec: LinkSpec,
        send: SendMessage,
        upload: Arena | None,
        shadows: Sequence[Arena],
    ) -> None:
        super().__init__(name=f"lazygt-part-{number}", daemon=True)
        self.number, self._spec, self._send = number, spec, send
        self._memory = HostMemory(upload, tuple(os.dup(arena.fd) for arena in shadows))
        self._link: ProcessLink | None = None
        #: lock for reading status pages: the end of the link releases their memory
        self._status_lock = threading.Lock()
        self._orders: deque[Callable[[ProcessLink], object]] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = self._at_once = False
        self._reported: set[int] = set()
        #: worker -> (id, offset) of the values of its last snapshot, which the client has
        self._sent_copies: dict[int, set[tuple[int, int]]] = {}

    # -- from the client's side ----------------------------------------------------------

    def tell(self, workers: Sequence[int], frames: Sequence[Frame]) -> None:
        """Forward a message to workers, after all earlier orders.

        Raises:
            ProtocolError: there are no workers of these numbers.
        """
        for worker in workers:
            self._check_worker(worker)
        link = self._link
        if self._orders or link is None:
            copies = [bytes(frame) for frame in frames]
            self.order(lambda link: self._send_to_workers(link, workers, copies))
        else:
            self._send_to_workers(link, workers, frames)

    def order(self, action: Callable[[ProcessLink], object]) -> None:
        """Queue a function for the part's own thread."""
        self._orders.append(action)
        os.eventfd_write(self._eventfd, 1)

    def look(self, seconds: float) -> tuple[Page | None, ...]:
        """Return the workers' status pages; empty if not started. For any thread.

        Args:
            seconds: time for which the workers shall report more details.
        """
        with self._status_lock:
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
        os.eventfd_write(self._eventfd, 1)

    # -- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Start the workers and serve them; report an error, and the end, to the client."""
        try:
            self._work(ProcessLink(self._spec, memory=self._memory))
        except (OSError, ValueError, LazyGTError) as error:
            self._send(Refused(self.number, f"{type(error).__name__}: {error}"), ())
        finally:
            self._send(Closed(self.number), ())

    def close(self) -> None:
        """Wait for the thread to end, and release the rest."""
        self.join()
        for descriptor in (*self._memory.snapshots, self._eventfd):
            os.close(descriptor)

    def _work(self, link: ProcessLink) -> None:
        """Execute orders and forward messages until the part is ended."""
        self._link = link
        self._send(Opened(self.number, link.pids), ())
        try:
            while not self._ended:
                self._follow_orders(link)
                self._receive(link)
        finally:
            with self._status_lock:
                self._link = None
            link.close(self._at_once)

    def _follow_orders(self, link: ProcessLink) -> None:
        """Carry out orders; an order stays in the queue until it is done."""
        while self._orders and not self._ended:
            self._orders[0](link)
            self._orders.popleft()

    def _receive(self, link: ProcessLink) -> None:
        """Wait for messages or an order; forward the messages, and report deaths."""
        timeout = _LOOK_SECONDS if self._reported else None
        try:
            message = link.receive(timeout, self._eventfd)
            while message is not None:
                self._forward(link, *message)
                message = link.receive(0)
        except WorkerDied as death:
            self._report_death(link, death)
        except WorkerFrozen as frozen:
            self._send(Frozen(self.number, frozen.rank, frozen.pid, frozen.deadline), ())
        with suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def _send_to_workers(
        self, link: ProcessLink, workers: Sequence[int], frames: Sequence[Frame]
    ) -> None:
        """Send a message to workers, except those that have died."""
        for worker in workers:
            try:
                link.send(worker, frames)
            except WorkerDied:  # `_receive` reports the death
                continue

    def _report_death(self, link: ProcessLink, death: WorkerDied) -> None:
        """Report a worker's death once, with its last run and step."""
        if death.rank in self._reported:
            return
        self._reported.add(death.rank)
        run, step = link.last_step(death.rank) if self._spec.snapshots else (0, 0)
        message = Died(self.number, death.rank, death.pid, death.status, death.stderr, run, step)
        self._send(message, ())

    def replace(self, worker: int, group: int) -> None:
        """Order the replacement of a worker by another process.

        Raises:
            ProtocolError: there is no worker of that number.
        """
        self._check_worker(worker)

        def replace_worker(link: ProcessLink) -> None:
            try:
                link.replace(worker, group)
            except OSError as error:
                self._send(Refused(self.number, f"no process can be started: {error}"), ())
                return
            self._reported.discard(worker)
            self._send(Opened(self.number, link.pids, worker), ())

        self.order(replace_worker)

    def _check_worker(self, worker: int) -> None:
        """Raise ProtocolError unless there is a worker of this number."""
        if worker >= len(self._spec.here):
            raise ProtocolError(f"there is no worker {worker} in part {self.number}")

    def refill(self) -> None:
        """Order the start of spare processes, up to the configured number."""

        def start_spares(link: ProcessLink) -> None:
            try:
                link.refill()
            except OSError as error:
                _log.warning("no spare process could be started: %s", error)

        self.order(start_spares)

    # -- messages of workers -------------------------------------------------------------

    def _forward(self, link: ProcessLink, worker: int, frames: list[memoryview]) -> None:
        """Send the client a worker's message, after the values of a snapshot in it."""
        if Snapped.begins(frames[0]):
            self._send_snapshot(link, worker, frames)
        self._send(Said(self.number, worker), frames)

    def _send_snapshot(self, link: ProcessLink, worker: int, frames: list[memoryview]) -> None:
        """Send the client the values of a snapshot that it does not have yet."""
        message = decode(frames, (Snapped,))
        assert isinstance(message, Snapped)
        if message.error:
            return
        copies = [copy for copy in message.values if not copy.borrowed]
        already_sent = self._sent_copies.get(worker, set())
        arena = link.snapshot_arena(worker)
        try:
            for copy in copies:
                if (copy.id, copy.offset) not in already_sent:
                    self._send_copy(worker, arena, copy)
        finally:
            arena.close()
        self._sent_copies[worker] = {(copy.id, copy.offset) for copy in copies}

    def _send_copy(self, worker: int, arena: Arena, copy: Copied) -> None:
        """Send the client a value of a snapshot, in pieces."""
        for begin in range(copy.offset, copy.offset + copy.nbytes, PIECE_BYTES):
            if self._ended:
                return
            nbytes = min(PIECE_BYTES, copy.offset + copy.nbytes - begin)
            piece = arena.view(begin, nbytes).numpy().tobytes()
            self._send(Kept(self.number, worker, begin), [piece])
