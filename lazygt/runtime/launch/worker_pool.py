"""A session's worker processes, with their sockets, memory and pollers."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import zmq

from lazygt.host.gc_pause import gc_paused
from lazygt.host.processes import OOMKills
from lazygt.net import channel
from lazygt.net.channel import Address, ClientChannel, new_token
from lazygt.net.mailbox import Cores, Mailboxes, MailboxFiles
from lazygt.net.status_file import StatusFile
from lazygt.runtime.arenas import Arena, create_memory, read_note
from lazygt.runtime.launch.launcher import Boot, Launcher, Process
from lazygt.runtime.launch.session_directory import SessionDirectory
from lazygt.runtime.launch.start_plan import LinkSpec, StartPlan, check_limits
from lazygt.runtime.launch.supervise import DeathWatch

_ORDERLY_SECONDS = 2.0  # for a worker to finish what it does and to leave its group
_TERMINATE_SECONDS = 1.0  # for it to end after SIGTERM
_KILL_SECONDS = 10.0  # for it to end after SIGKILL
_LAST_WORDS_SECONDS = 0.02  # for the last messages of an ended worker to arrive
SNAPSHOT_BYTES = 64 << 20  # size of the first segment if no arena has a given size


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Shared memory that the caller owns."""

    upload: Arena | None = None  # arena of the client's uploads; None: there is none yet
    #: memfds of the workers' snapshots, by worker; empty: there are none yet
    snapshots: tuple[int, ...] = ()


@dataclass(slots=True)
class WorkerProcess:
    """A worker process and its resources in the client.

    Attributes:
        data, control: client's ends of the worker's channels.
        fetch: arena of large fetched values; None: there is none.
        inbox: messages received on ``data`` and not yet delivered.
        pongs: answers to pings received on ``control``.
    """

    process: Process
    data: ClientChannel
    control: ClientChannel
    fetch: Arena | None
    mailboxes: Mailboxes | None
    #: stack that releases the resources of this process
    resources: ExitStack
    plan: StartPlan
    #: number in the names of its sockets
    socket_number: int
    inbox: deque[bytes] = field(default_factory=deque)
    pongs: deque[bytes] = field(default_factory=deque)

    def assign(self, index: int, group_number: int) -> None:
        """Assign a rank to this spare process, by a message to it.

        Args:
            index: number of the worker on this host.
            group_number: number of the process group to join.
        """
        directory, rank = self.plan.directory, self.plan.spec.here[index]
        if self.plan.spec.world_size > 1:
            (directory / f"rendezvous{self.socket_number}").rename(directory / f"rendezvous{rank}")
        environment = self.plan.environment(rank)
        assignment = {
            "rank": rank,
            "index": index,
            "group_number": group_number,
            "environment": environment,
        }
        frames = [json.dumps(assignment).encode()]
        if self.mailboxes is None or not self.mailboxes.put(frames):
            self.data.send(channel.DATA, frames)


class WorkerPool:
    """Resources of a session: processes, sockets, arenas, the directory. No decisions.

    The workers are those of one host. Their indices count from 0; ``spec.here`` has their ranks.

    Attributes:
        poller: poller of all descriptors of the workers, and of ``wakeup``.
        poll_other_events: poll function for all events other than messages in mailboxes.
        mailboxes: client's ends of the workers' mailboxes.
        mailboxes_of: wake-up descriptor -> its mailboxes.
        cores: decides whether to spin.
        index_of: pidfd of a process, readable when it has ended -> index of the worker.
        wakeup: an eventfd, or -1 once all is released.
        status: the file that `lazygt top` reads; None before the start.
    """

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.upload: Arena | None = None
        self.poller, self._other_poller = select.poll(), select.poll()
        self.poll_other_events = partial(self._other_poller.poll, 0)
        self.mailboxes: list[Mailboxes] = []
        self.mailboxes_of: dict[int, Mailboxes] = {}
        self.cores = Cores((), 0)
        self.index_of: dict[int, int] = {}
        self.wakeup = -1
        self.status: StatusFile | None = None
        self.directory = Path()
        self._status = -1
        self._stack = ExitStack()
        self._launch: Callable[..., WorkerProcess]
        #: processes without a rank, and their configured number
        self._spares: list[WorkerProcess] = []
        self._spare_count = 0
        #: memfds of snapshots, by worker
        self._snapshots: list[int] = []
        #: the ranks of the workers
        self._ranks: tuple[int, ...] = ()
        self._oom_kills = OOMKills()
        #: lock for starting processes, also by the `DeathWatch`
        self._start_lock = threading.RLock()
        self._death_watch: DeathWatch | None = None
        self._ending = False

    def start(self, spec: LinkSpec, launcher: Launcher, memory: HostMemory | None = None) -> None:
        """Start the workers, without waiting for them.

        Args:
            memory: memory shared with others; None: new memory.

        Raises:
            OSError: there are too few descriptors, processes or threads; or one can't be started.
        """
        self._ranks = spec.here
        check_limits(len(self._ranks) + spec.spares, spec.threads_a_worker)
        directory = SessionDirectory()
        self._stack.callback(directory.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, 0)
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stack.callback(self._close_wakeup)
        self._register(self.wakeup, self._stack)
        self._status = StatusFile.create(spec.world_size)
        self._stack.callback(os.close, self._status)
        self.status, self.directory = StatusFile(self._status), directory.path
        self._stack.callback(self.status.close)
        self._create_memory(spec, memory or HostMemory())
        plan = StartPlan(spec, directory.path, spec.token or new_token())
        self._launch = partial(self._start_process, plan, context, launcher)
        self._socket_numbers = count(spec.world_size)
        for index, rank in enumerate(self._ranks):
            self.workers.append(self._launch(rank, index, spec.group_number))
            self._register_worker(index)
        self._update_workers()
        self._spare_count = spec.spares
        self.refill()
        if spec.snapshots:
            self._death_watch = DeathWatch(self._live_pidfds, self.start_replacements)
            self._death_watch.start()

    def _create_memory(self, spec: LinkSpec, memory: HostMemory) -> None:
        """Set the upload arena and the snapshot memfds; create those that ``memory`` lacks."""
        self.upload = memory.upload
        if self.upload is None and spec.arena_bytes:
            self.upload = Arena.create(spec.arena_bytes)
            self._stack.callback(self.upload.close)
        self._snapshots = list(memory.snapshots)
        if spec.snapshots and not self._snapshots:
            for _ in self._ranks:
                self._snapshots.append(create_memory(spec.arena_bytes or SNAPSHOT_BYTES))
                self._stack.callback(os.close, self._snapshots[-1])

    def replace(self, index: int, group_number: int) -> None:
        """Replace an ended worker by a spare process or a new one.

        The worker is killed if it still runs.

        Args:
            index: of the worker on this host.
            group_number: number of the group for it to join.

        Raises:
            OSError: no process can be started.
        """
        with self._start_lock:
            previous = self.workers[index]
            previous.process.kill()
            previous.process.wait(_KILL_SECONDS)
            spare = self._spare(index, group_number)
            self.workers[index] = spare or self._launch(self._ranks[index], index, group_number)
            previous.resources.close()
        self._register_worker(index)
        self._update_workers()
        if self._death_watch is not None:
            self._death_watch.processes_changed()

    def refill(self) -> None:
        """Start spare processes up to the configured number.

        Raises:
            OSError: a process can't be started.
        """
        self._start_spares(self._spare_count)

    def start_replacements(self) -> None:
        """Start a spare process for each worker that has died, ahead of `replace`.

        The process loads its modules while the program goes on. Called by the `DeathWatch`.
        """
        with self._start_lock, gc_paused():
            if self._ending:
                return
            dead = len(self.workers) - len(self._live_pidfds())
            with suppress(OSError):  # `replace` tries again, and raises then
                self._start_spares(dead)

    def _start_spares(self, count: int) -> None:
        """Start spare processes until there are ``count``."""
        with self._start_lock:
            while len(self._spares) < count:
                self._spares.append(self._launch(next(self._socket_numbers), None))

    def _live_pidfds(self) -> list[int]:
        """Return the pidfds of the workers that have not ended."""
        with self._start_lock:
            processes = [worker.process for worker in self.workers]
            return [process.pidfd for process in processes if process.status() is None]

    def _spare(self, index: int, group_number: int) -> WorkerProcess | None:
        """Return a spare process with the worker's rank assigned, if there is one."""
        while self._spares:
            spare = self._spares.pop(0)
            if spare.process.status() is None:
                spare.assign(index, group_number)
                return spare
            spare.resources.close()
        return None

    def last_step(self, index: int) -> tuple[int, int]:
        """Return the run and the step that a worker noted last, in a timed run."""
        return read_note(self._snapshots[index])

    def snapshot_arena(self, index: int) -> Arena:
        """Return a new mapping of a worker's snapshot memory."""
        return Arena.attach(os.dup(self._snapshots[index]))

    def _update_workers(self) -> None:
        """Collect the mailboxes and the cores of the current workers."""
        self.mailboxes = [
            worker.mailboxes for worker in self.workers if worker.mailboxes is not None
        ]
        pids = (os.getpid(), *(worker.process.pid for worker in self.workers))
        self.cores = Cores(pids, len(pids))

    def _start_process(
        self,
        plan: StartPlan,
        context: zmq.Context[zmq.Socket[bytes]],
        launcher: Launcher,
        socket_number: int,
        index: int | None,
        group_number: int = 0,
    ) -> WorkerProcess:
        """Start a process, and connect to it.

        Args:
            socket_number: number in the names of its sockets.
            index: number of the worker on this host; None: a spare process.
            group_number: number of the process group to join.
        """
        rank = None if index is None else self._ranks[index]
        with ExitStack() as undo, ExitStack() as copies:
            resources = ExitStack()
            undo.callback(resources.close)
            fetch = None
            if plan.spec.arena_bytes and plan.spec.client_here:
                fetch = Arena.attach(create_memory(plan.spec.arena_bytes))
                resources.callback(fetch.close)
            mailboxes = _create_mailboxes(plan.spec.transport, resources)
            files = None if mailboxes is None else mailboxes.files
            boot = replace(
                plan.boot(socket_number, rank, self.upload, fetch, files, copies),
                snapshots=self._snapshots[index] if self._snapshots and index is not None else None,
                spare=tuple(self._snapshots) if rank is None else None,
                group_number=group_number,
                status=self._status,
            )
            process = launcher.start(boot, {} if rank is None else plan.environment(rank))
            resources.callback(process.close)
            data = _connect(context, boot, boot.data, resources, mailboxes)
            control = _connect(context, boot, boot.control, resources)
            undo.pop_all()
        return WorkerProcess(
            process, data, control, fetch, mailboxes, resources, plan, socket_number
        )

    def _register_worker(self, index: int) -> None:
        """Register a worker's descriptors, until its resources are released."""
        worker = self.workers[index]
        resources = worker.resources
        self.index_of[worker.process.pidfd] = index
        resources.callback(self.index_of.pop, worker.process.pidfd)
        for descriptor in (worker.process.pidfd, worker.data.fd, worker.control.fd):
            self._register(descriptor, resources)
        if (mailboxes := worker.mailboxes) is not None:
            self.mailboxes_of[mailboxes.wakes] = mailboxes
            resources.callback(self.mailboxes_of.pop, mailboxes.wakes)
            self.poller.register(mailboxes.wakes, select.POLLIN)
            resources.callback(self.poller.unregister, mailboxes.wakes)

    def _register(self, descriptor: int, resources: ExitStack) -> None:
        """Register a descriptor with both pollers, until its owner releases it."""
        for poller in (self.poller, self._other_poller):
            poller.register(descriptor, select.POLLIN)
            resources.callback(_unregister, poller, descriptor)

    def reap(self, index: int) -> tuple[str, str]:
        """Stop watching an ended worker; return its exit status and the end of its stderr."""
        worker = self.workers[index]
        _unregister(self.poller, worker.process.pidfd)
        _unregister(self._other_poller, worker.process.pidfd)
        # The worker's last messages may still be in transit in ZMQ's own thread.
        last_words = select.poll()  # unlike select(), poll() has no limit on descriptor numbers
        last_words.register(worker.data.fd, select.POLLIN)
        last_words.poll(1_000 * _LAST_WORDS_SECONDS)
        while worker.data.take(worker.inbox):
            continue
        worker.data.disconnect()
        worker.control.disconnect()
        stderr = worker.process.stderr_tail()
        return self._oom_kills.explained(worker.process.status() or "unknown", stderr), stderr

    def end(self, orderly: Collection[int], stuck: Collection[int]) -> None:
        """End all processes, and escalate to SIGTERM and SIGKILL after timeouts.

        Args:
            orderly: workers that are sent SHUTDOWN.
            stuck: workers that are sent SIGKILL at once; the others lose their liveness pipe.
        """
        with self._start_lock:
            self._ending = True
        death_watch, self._death_watch = self._death_watch, None
        if death_watch is not None:
            death_watch.end()
        for index, worker in enumerate(self.workers):
            if index in stuck:
                worker.process.kill()
            elif index in orderly:
                worker.data.send(channel.SHUTDOWN)
            else:
                worker.process.close_pipe()
        for spare in self._spares:
            spare.process.close_pipe()
        everyone = [worker.process for worker in (*self.workers, *self._spares)]
        living = _wait_for(everyone, _ORDERLY_SECONDS)
        for process in living:
            process.close_pipe()
            process.terminate()
        living = _wait_for(living, _TERMINATE_SECONDS)
        for process in living:
            process.kill()
        _wait_for(living, _KILL_SECONDS)

    def close(self) -> None:
        """Release everything. Idempotent."""
        for worker in (*self.workers, *self._spares):
            worker.resources.close()
        self._stack.close()

    def _close_wakeup(self) -> None:
        """Close the eventfd that wakes a waiting thread."""
        wakeup, self.wakeup = self.wakeup, -1
        os.close(wakeup)


def _create_mailboxes(transport: str, resources: ExitStack) -> Mailboxes | None:
    """Create a worker's mailboxes, and return the client's end; None for TCP."""
    files = MailboxFiles.create() if transport == "ipc" else None
    if files is None:
        return None
    mailboxes = Mailboxes(files, of_worker=False)
    resources.callback(mailboxes.close)
    mailboxes.use_extension()
    return mailboxes


def _connect(
    context: zmq.Context[zmq.Socket[bytes]],
    boot: Boot,
    address: Address,
    resources: ExitStack,
    mailboxes: Mailboxes | None = None,
) -> ClientChannel:
    """Connect a client socket to an address of a worker."""
    key = boot.keys.public if boot.keys else None
    token = bytes.fromhex(boot.token)
    client = ClientChannel(context, address.endpoint, token, key, boot.max_message, mailboxes)
    resources.callback(client.close)
    return client


def _unregister(poller: select.poll, descriptor: int) -> None:
    """Remove a descriptor from a poller, if it is registered."""
    with suppress(KeyError):
        poller.unregister(descriptor)


def _wait_for(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait up to ``seconds`` for all processes together; return those that still run."""
    until = time.monotonic() + seconds
    return [process for process in processes if not process.wait(until - time.monotonic())]
