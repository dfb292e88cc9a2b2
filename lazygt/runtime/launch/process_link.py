"""The client's link to its worker processes: messages, deaths and unresponsive workers.

Every wait is one poll over all sockets and all processes, so a death is seen the moment it happens.
Every message that has arrived is delivered before any error is raised.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.host.processes import Usage
from lazygt.net import channel
from lazygt.net.mailbox import Frame, spin
from lazygt.runtime.arenas import Arena
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.launch import supervise
from lazygt.runtime.launch.launcher import Launcher
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.worker_pool import HostMemory, WorkerPool
from lazygt.runtime.wire import encode


class ProcessLink:
    """Worker processes and the channels to them; the session's `Link`.

    `send` may be called from any thread. `receive` is for one thread at a time; a second one waits
    for the first. The constructor does not wait for the workers: messages sent meanwhile are queued
    for them.

    All workers are on this host, and are counted from 0 here; if the session has workers on other
    hosts, too, ``spec.here`` has the ranks of these workers.

    Args:
        memory: memory that the workers share with others, see `HostMemory`.

    Raises:
        ValueError: ``device="cuda"`` and there is no GPU, or an unknown transport.
        OSError: there are too few descriptors or processes left, or one could not be started.
    """

    encode = staticmethod(encode)
    mirrors = False

    def __init__(
        self,
        spec: LinkSpec | None = None,
        launcher: Launcher | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        spec = spec or LinkSpec()
        self._pool = pool = WorkerPool()
        # Registered before the first process starts, so that no process is ever left behind.
        self._finalizer = weakref.finalize(self, _abandon, pool, os.getpid())
        try:
            pool.start(spec, launcher or Launcher(), memory)
        except BaseException:
            self._finalizer()
            raise
        self.world_size = len(spec.here)
        self.hosts: tuple[int, ...] = (self.world_size,)
        self.elsewhere: Mapping[int, int] = {}
        self.pids = tuple(worker.process.pid for worker in pool.workers)
        self.upload, self.status = pool.upload, pool.status
        self.name = pool.directory.name
        # Reentrant, for a signal handler that closes the session in the middle of a `receive`.
        self._receiving = threading.RLock()
        self._watch = supervise.Watch(
            self.world_size, time.monotonic(), spec.frozen_after, spec.start_timeout
        )
        #: rank -> time of its last sign of life, not yet reported to the watch
        self._last_heard: dict[int, float] = {}
        #: time of the next check of the workers by the watch
        self._next_check = 0.0
        #: rank -> exit status and last output of a worker that has died
        self._deaths: dict[int, tuple[str, str]] = {}
        #: errors to raise, each once
        self._errors: deque[LazyGTError] = deque()
        #: rank -> reason for which the worker has dropped this session
        self._refused: dict[int, str] = {}
        #: rank -> processor usage at its ping, or at the last check since
        self._usage: dict[int, Usage] = {}
        #: rank whose message is delivered first (round robin)
        self._next_rank = 0
        self._closed = False

    @property
    def healthy(self) -> bool:
        """True if no fault of the link is known."""
        return not (self._closed or self._deaths or self._refused)

    @property
    def lost(self) -> dict[int, WorkerDied]:
        """Workers that are known to have died, with their errors."""
        return {rank: self._death_error(rank) for rank in self._deaths}

    def replace(self, rank: int, group_number: int) -> None:
        """Start a new process in the place of a worker, which is killed if it still runs.

        Messages from and to the old process are lost.

        Raises:
            OSError: no process can be started.
        """
        with self._receiving:
            self._pool.replace(rank, group_number)
            for record in (self._deaths, self._refused, self._last_heard, self._usage):
                record.pop(rank, None)
            self._errors = deque(e for e in self._errors if getattr(e, "rank", None) != rank)
            self._watch.handle(supervise.Started(rank), time.monotonic())
            self._next_check = 0.0
            self.pids = tuple(worker.process.pid for worker in self._pool.workers)

    def refill(self) -> None:
        """Start spare processes up to the configured number.

        Raises:
            OSError: a process can't be started.
        """
        self._pool.refill()

    def update_status(self) -> None:
        """Do nothing: no rank is on another host."""

    def last_step(self, rank: int) -> tuple[int, int]:
        """Return the run that a worker last timed, and its step in that run."""
        return self._pool.last_step(rank)

    def native_fetcher(self, make: Any, *arguments: Any) -> Any:
        """Return the C++ fetcher over the mailboxes, if these are the extension's; else None."""
        pool = self._pool
        if self.world_size > 1 or not pool.mailboxes or pool.mailboxes[0].spin is None:
            return None
        return make.by_mailbox(*arguments, pool.mailboxes[0], pool.cores, self._note_sign_of_life)

    def mirror(self, slots: Sequence[tuple[int, int]]) -> None:
        """Do nothing: workers have mapped the arena itself."""

    def fetch_arena(self, rank: int) -> Arena | None:
        """Return our mapping of a worker's fetch arena; None without shared memory."""
        return self._pool.workers[rank].fetch

    def snapshot_arena(self, rank: int) -> Arena:
        """Return a new mapping of a worker's snapshot memory; the caller closes it."""
        return self._pool.snapshot_arena(rank)

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Queue a message for a worker. Does not wait; the frames are copied.

        Raises:
            WorkerDied: the worker is known to have died.
            ProtocolError: the worker has refused an earlier message.
            ValueError: the message is longer than the limit.
            LazyGTError: the link is closed.
        """
        self._check_open()
        if rank in self._deaths:
            raise self._death_error(rank)
        if rank in self._refused:
            raise self._refusal_error(rank)
        worker = self._pool.workers[rank]
        if worker.mailboxes is not None and worker.mailboxes.put(frames):
            return
        if worker.data.send(channel.DATA, frames):
            self._wake()

    def receive(
        self, timeout: float | None, wake_fd: int | None = None
    ) -> tuple[int, list[memoryview]] | None:
        """Return the next message of any rank, as ``(rank, frames)``.

        Args:
            timeout: seconds to wait; 0: don't wait; None: wait for ever.
            wake_fd: a descriptor that also ends the wait when it becomes readable.

        Returns:
            None if the wait has ended without a message. Messages that have arrived come before any
            error.

        Raises:
            WorkerDied: at once when a worker dies; again whenever a wait would otherwise end with
                nothing or last for ever, since that worker's answer will not come.
            WorkerFrozen: a worker has given no sign of life for the deadline.
            ProtocolError: a worker refused a message; again as for a worker that has died.
            LazyGTError: the link is closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while True:
                if self._closed:
                    self._check_open()
                message = (
                    self._next_in_mailboxes(timeout != 0 and wake_fd is None)
                    or self._next_on_sockets()
                )
                if message is not None:
                    return message
                if not self._wait(until, wake_fd):
                    return None

    def close(self, at_once: bool = False) -> None:
        """End the workers and remove all their resources. Idempotent; takes seconds at most.

        First a shutdown message, then SIGTERM, then SIGKILL, each with a bounded wait.

        Args:
            at_once: SIGKILL alone: the client is gone, so an orderly end has no use.
        """
        self._closed = True
        if not self._finalizer.alive:
            return
        self._wake()
        with self._receiving:
            self._report_signs_of_life()
            ranks = range(self.world_size)
            stuck = {rank for rank in ranks if at_once or self._watch.is_frozen(rank)}
            started = {rank for rank in ranks if self._watch.is_started(rank)}
            orderly = started - stuck - set(self._refused)  # these do not listen any more
            self._pool.end(orderly, stuck)
            self._finalizer()

    def _check_open(self) -> None:
        """Raise LazyGTError if the link is closed."""
        if self._closed:
            raise LazyGTError("the link to the workers is closed")

    def _death_error(self, rank: int) -> WorkerDied:
        return WorkerDied(rank, self.pids[rank], *self._deaths[rank])

    def _next_in_mailboxes(self, waits: bool) -> tuple[int, list[memoryview]] | None:
        """Return the next message from the mailboxes, round robin over the ranks.

        Args:
            waits: True to spin briefly for a message.
        """
        pool = self._pool
        if not pool.mailboxes:
            return None
        if waits and pool.cores.enough:
            spin(pool.mailboxes, pool.poll_other_events)
        for step in range(len(pool.mailboxes)):
            rank = (self._next_rank + step) % len(pool.mailboxes)
            frames = pool.mailboxes[rank].take()
            if frames is not None:
                self._note_sign_of_life(rank)
                self._next_rank = rank + 1
                return rank, frames
        return None

    def _next_on_sockets(self) -> tuple[int, list[memoryview]] | None:
        """Return the next message from the sockets, round robin over the ranks."""
        workers = self._pool.workers
        for step in range(len(workers)):
            rank = (self._next_rank + step) % len(workers)
            worker = workers[rank]
            while worker.inbox or _receive_one(worker.data, worker.inbox):
                # Read the mailbox once more: its messages may precede the socket's.
                frames = None if worker.mailboxes is None else worker.mailboxes.take()
                if frames is None:
                    frames = self._unpack(rank, worker.inbox.popleft())
                if frames is not None:
                    self._next_rank = rank + 1
                    return rank, frames
        return None

    def _unpack(self, rank: int, message: bytes) -> list[memoryview] | None:
        """Unpack a socket's message; return its frames if it is DATA, None if it is WELCOME."""
        kind, frames = channel.unpack(message)
        self._note_sign_of_life(rank)
        if kind == channel.DATA:
            mailboxes = self._pool.workers[rank].mailboxes
            if mailboxes is not None:
                mailboxes.received += 1
            return frames
        if kind == channel.WELCOME:
            return None
        text = bytes(frames[0]).decode(errors="replace") if frames else repr(kind)
        self._refused[rank] = text
        raise self._refusal_error(rank)

    def _refusal_error(self, rank: int) -> ProtocolError:
        return ProtocolError(f"worker {rank} dropped this session: {self._refused[rank]}")

    def _wait(self, until: float | None, wake_fd: int | None) -> bool:
        """Wait for an event; return False if the caller has to stop waiting, True to look again.

        Called when no message is left. Pings quiet workers and records deaths meanwhile.

        Raises:
            WorkerDied, WorkerFrozen, ProtocolError: as ``receive``.
        """
        self._receive_pongs()
        now = time.monotonic()
        if now >= self._next_check:
            self._check_workers(now)
        if self._errors:
            raise self._errors.popleft()
        remaining = None if until is None else until - now
        if remaining is None or remaining <= 0:
            self._raise_if_lost()
        seconds = self._next_check - now
        if remaining is not None:
            seconds = min(seconds, max(remaining, 0))
        ready = self._poll(seconds, wake_fd)
        for fd in ready:
            if fd in self._pool.index_of:
                self._reap(self._pool.index_of[fd])
        if wake_fd in ready:
            return False
        return bool(ready) or remaining is None or remaining > 0

    def _poll(self, seconds: float, wake_fd: int | None) -> list[int]:
        """Wait for any event, also of ``wake_fd``; return the readable descriptors."""
        poller, wakeup = self._pool.poller, self._pool.wakeup
        if wake_fd is not None:
            poller.register(wake_fd, select.POLLIN)
        try:
            ready = [fd for fd, _ in DEFER_INTERRUPT.wait(poller, math.ceil(seconds * 1000))]
        finally:
            if wake_fd is not None:
                poller.unregister(wake_fd)
        for fd in ready:
            if fd == wakeup:
                os.eventfd_read(wakeup)
            elif fd in self._pool.mailboxes_of:
                self._pool.mailboxes_of[fd].clear_wakeup()
        return ready

    def _wake(self) -> None:
        """Make a `_poll` in another thread return."""
        if self._pool.wakeup >= 0:
            os.eventfd_write(self._pool.wakeup, 1)

    def _raise_if_lost(self) -> None:
        """Raise for a worker that has died or refused, since its answer will not come."""
        if self._deaths:
            raise self._death_error(min(self._deaths))
        if self._refused:
            raise self._refusal_error(min(self._refused))

    def _check_workers(self, now: float) -> None:
        """Report events to the watch, and execute its instructions; set the next check's time."""
        self._report_signs_of_life()
        self._report_usage(now)
        self._execute(self._watch.handle(supervise.Tick(), now))
        self._next_check = now + self._watch.seconds_to_next(now)

    def _note_sign_of_life(self, rank: int) -> None:
        """Record a sign of life of a worker, now."""
        self._last_heard[rank] = now = time.monotonic()
        self._next_check = min(self._next_check, now + self._watch.silence)

    def _report_signs_of_life(self) -> None:
        """Report the signs of life since the last call to the watch."""
        last_heard, self._last_heard = self._last_heard, {}
        for rank, when in last_heard.items():
            self._watch.handle(supervise.Heard(rank), when)

    def _report_usage(self, now: float) -> None:
        """Report processor usage to the watch: a worker that works without answering is busy."""
        for rank in self._watch.awaiting_pong:
            previous, self._usage[rank] = (
                self._usage[rank],
                self._pool.workers[rank].process.usage(),
            )
            usage = self._usage[rank]
            runnable = usage.is_runnable_since(previous)
            self._watch.handle(
                supervise.Used(rank, usage.seconds - previous.seconds, runnable), now
            )

    def _receive_pongs(self) -> None:
        """Receive the answers to pings, which are signs of life."""
        for rank, worker in enumerate(self._pool.workers):
            while _receive_one(worker.control, worker.pongs):
                worker.pongs.clear()
                self._note_sign_of_life(rank)

    def _reap(self, rank: int) -> None:
        """Record the death of a worker."""
        self._deaths[rank] = self._pool.reap(rank)
        self._execute(self._watch.handle(supervise.Ended(rank), time.monotonic()))

    def _execute(self, instructions: Sequence[supervise.Instruction]) -> None:
        """Send the pings, and queue the errors that the watch has requested."""
        for instruction in instructions:
            match instruction:
                case supervise.Ping(rank):
                    worker = self._pool.workers[rank]
                    self._usage[rank] = worker.process.usage()
                    worker.control.send(channel.PING)
                case supervise.ReportDied(rank):
                    self._errors.append(self._death_error(rank))
                case supervise.ReportFrozen(rank, deadline):
                    self._errors.append(WorkerFrozen(rank, self.pids[rank], deadline))


def _receive_one(client: channel.ClientChannel, inbox: deque[bytes]) -> bool:
    """Move one message of a socket to ``inbox``; False if there is none."""
    doorbell = client.doorbell
    return bool(not doorbell.drained or doorbell.has_signalled()) and client.take(inbox)


def _abandon(pool: WorkerPool, owner: int) -> None:
    """Clean up after a link that was dropped without `ProcessLink.close`."""
    if os.getpid() != owner:
        return  # in a forked child: the parent owns the workers
    pool.end(orderly=(), stuck=range(len(pool.workers)))
    pool.close()
