"""Crew: a session's worker processes, and all that must be given back when they have ended."""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import zmq

from lazygt.runtime import channel
from lazygt.runtime.channel import Address, Client, new_token
from lazygt.runtime.directory import SessionDirectory
from lazygt.runtime.interrupts import HOLD
from lazygt.runtime.killings import Killings
from lazygt.runtime.launchers.base import Boot, Launcher, Process
from lazygt.runtime.room import check_room
from lazygt.runtime.shm import Arena, create_memory
from lazygt.runtime.start import LinkSpec, StartPlan

_ORDERLY_SECONDS = 2.0  # for a worker to finish what it does and to leave its group
_TERMINATE_SECONDS = 1.0
_KILL_SECONDS = 10.0
_LAST_WORDS_SECONDS = 0.02


@dataclass(slots=True)
class WorkerProcess:
    """One worker as the client sees it."""

    process: Process
    data: Client
    control: Client
    fetch: Arena | None
    inbox: deque[bytes] = field(default_factory=deque)
    pongs: deque[bytes] = field(default_factory=deque)


class Crew:
    """All that must be given back: processes, sockets, arenas, the directory. No decisions."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.upload: Arena | None = None
        self._stack = ExitStack()
        self._poller = select.poll()
        self._pidfds: dict[int, int] = {}
        self._wake = -1
        self._killings = Killings()

    def start(self, spec: LinkSpec, launcher: Launcher) -> None:
        """Start the workers, without waiting for them.

        Raises:
            OSError: there are too few descriptors, processes or threads; or one can't be started.
        """
        check_room(spec.world_size, spec.threads_a_worker)
        directory = SessionDirectory()
        self._stack.callback(directory.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, 0)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stack.callback(self._close_wake)
        self._poller.register(self._wake, select.POLLIN)
        if spec.arena_bytes:
            self.upload = Arena.create(spec.arena_bytes)
            self._stack.callback(self.upload.close)
        plan = StartPlan(spec, directory.path, new_token())
        for rank in range(spec.world_size):
            self._start_worker(plan, rank, context, launcher)

    def _start_worker(
        self,
        plan: StartPlan,
        rank: int,
        context: zmq.Context[zmq.Socket[bytes]],
        launcher: Launcher,
    ) -> None:
        fetch = None
        if plan.spec.arena_bytes:
            fetch = Arena.attach(create_memory(plan.spec.arena_bytes))
            self._stack.callback(fetch.close)
        with ExitStack() as ours:
            boot = plan.boot(rank, self.upload, fetch, ours)
            process = launcher.start(boot, plan.environment(rank))
            self._stack.callback(process.close)
            # From here on `end` knows the process, whatever happens below.
            data = self._connect(context, boot, boot.data)
            control = self._connect(context, boot, boot.control)
            self.workers.append(WorkerProcess(process, data, control, fetch))
        self._pidfds[process.pidfd] = rank
        self._poller.register(process.pidfd, select.POLLIN)

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], boot: Boot, address: Address
    ) -> Client:
        key = boot.keys.public if boot.keys else None
        token = bytes.fromhex(boot.token)
        client = Client(context, address.endpoint, token, key, boot.max_message)
        self._stack.callback(client.close)
        self._poller.register(client.fd, select.POLLIN)
        return client

    def wake(self) -> None:
        """Make a `poll` in another thread return."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def poll(self, seconds: float, beside: int | None) -> tuple[set[int], list[int]]:
        """Wait for anything at all, also for another descriptor.

        Returns:
            The descriptors that can be read, and the ranks whose process has ended.
        """
        if beside is not None:
            self._poller.register(beside, select.POLLIN)
        try:
            ready = {fd for fd, _ in HOLD.wait(self._poller, math.ceil(seconds * 1000))}
        finally:
            if beside is not None:
                self._poller.unregister(beside)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready, [self._pidfds[fd] for fd in ready if fd in self._pidfds]

    def bury(self, rank: int) -> tuple[str, str]:
        """Stop watching a worker that has ended: how it ended, and the end of its stderr."""
        worker = self.workers[rank]
        self._poller.unregister(worker.process.pidfd)
        # Its last messages may still be on their way through ZMQ's own thread.
        select.select([worker.data.fd], [], [], _LAST_WORDS_SECONDS)
        while worker.data.take(worker.inbox):
            continue
        worker.data.disconnect()
        worker.control.disconnect()
        stderr = worker.process.stderr_tail()
        return self._killings.explained(worker.process.status() or "unknown", stderr), stderr

    def end(self, orderly: Collection[int], stuck: Collection[int]) -> None:
        """End all processes: some in good order, the stuck ones at once, the rest by hanging up."""
        for rank, worker in enumerate(self.workers):
            if rank in stuck:
                worker.process.kill()
            elif rank in orderly:
                worker.data.send(channel.SHUTDOWN)
            else:
                worker.process.hang_up()
        living = _wait_for([worker.process for worker in self.workers], _ORDERLY_SECONDS)
        for process in living:
            process.hang_up()
            process.terminate()
        living = _wait_for(living, _TERMINATE_SECONDS)
        for process in living:
            process.kill()
        _wait_for(living, _KILL_SECONDS)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._stack.close()

    def _close_wake(self) -> None:
        wake, self._wake = self._wake, -1
        os.close(wake)


def _wait_for(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait so long in all; those that still run."""
    until = time.monotonic() + seconds
    return [process for process in processes if not process.wait(until - time.monotonic())]
