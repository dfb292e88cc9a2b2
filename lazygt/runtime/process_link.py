"""The client's link to its worker processes: launcher, channels, arenas and supervision together.

Whatever waits, waits in one poll over all sockets and all processes, so a death is seen the moment
it happens. Every message that has arrived is delivered before any error is raised.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from lazygt.errors import LazyGTError, ProtocolError, WorkerDied, WorkerFrozen
from lazygt.runtime import channel, supervise
from lazygt.runtime.channel import Address, Client, Frame, Keys, SessionDirectory, new_token
from lazygt.runtime.group import backend_for, why_gloo
from lazygt.runtime.interrupts import HOLD
from lazygt.runtime.launchers.base import WORKER_FACTORY, Boot, GroupSpec, Launcher, Process
from lazygt.runtime.launchers.local import LocalLauncher, share_of_cores, visible_gpu
from lazygt.runtime.shm import Arena, create_memory

_ORDERLY_SECONDS = 2.0  # for a worker to finish what it does and to leave its group
_TERMINATE_SECONDS = 1.0
_KILL_SECONDS = 10.0
_LAST_WORDS_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a session's workers are to be.

    Attributes:
        world_size: number of worker processes.
        device: ``cpu``, or ``cuda`` for one GPU each (shared when there are fewer GPUs).
        threads: torch threads a worker; None for a fair share of the cores.
        transport: ``ipc``, or ``tcp://HOST`` for encrypted TCP.
        factory: ``module:attribute`` that makes a worker's message handler.
        frozen_after: seconds without an answer until WorkerFrozen.
        start_timeout: the same for a worker that is still starting.
        max_message: bytes of the longest message either way.
        arena_bytes: size of the first segment of each arena, or 0 for no shared memory.
        group_timeout: seconds a collective waits for the other ranks.
        mesh: the ranks as a grid with named axes, for example ``data=2,model=2``.
        environment: variables added to the workers' environment.
        loads_torch: False for handlers that do without torch.
    """

    world_size: int = 1
    device: str = "cpu"
    threads: int | None = None
    transport: str = "ipc"
    factory: str = WORKER_FACTORY
    frozen_after: float = 30.0
    start_timeout: float = 120.0
    max_message: int = channel.MAX_MESSAGE_BYTES
    arena_bytes: int = 64 << 20
    group_timeout: float = 300.0
    mesh: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    loads_torch: bool = True


class ProcessLink:
    """Worker processes and the way to them; the session's `Link`.

    `send` may be called from any thread. `receive` is for one thread at a time; a second one waits
    for the first. Start does not wait for the workers: what is sent meanwhile is kept for them.

    Raises:
        ValueError: ``device="cuda"`` and there is no GPU, or an unknown transport.
        OSError: a process could not be started.
    """

    def __init__(self, spec: LinkSpec | None = None, launcher: Launcher | None = None) -> None:
        spec = spec or LinkSpec()
        self._crew = crew = _Crew()
        # Registered before the first process starts: whatever happens, nothing stays behind.
        self._finalizer = weakref.finalize(self, _abandon, crew, os.getpid())
        try:
            crew.start(spec, launcher or LocalLauncher())
        except BaseException:
            self._finalizer()
            raise
        self.world_size = spec.world_size
        self.pids = tuple(worker.process.pid for worker in crew.workers)
        self.upload = crew.upload
        # Reentrant, for a signal handler that closes the session in the middle of a `receive`.
        self._receiving = threading.RLock()
        self._watch = supervise.Watch(
            spec.world_size, time.monotonic(), spec.frozen_after, spec.start_timeout
        )
        self._deaths: dict[int, tuple[str, str]] = {}
        self._errors: deque[LazyGTError] = deque()
        self._refused: set[int] = set()
        self._turn = 0
        self._closed = False

    def fetch_arena(self, rank: int) -> Arena | None:
        """The client's mapping of the arena that a worker owns, or None without shared memory."""
        return self._crew.workers[rank].fetch

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Queue a message for a worker. Does not wait; the frames are copied.

        Raises:
            WorkerDied: the worker is known to have died.
            ValueError: the message is longer than the limit.
            LazyGTError: the link is closed.
        """
        self._check_open()
        if rank in self._deaths:
            raise self._died(rank)
        if self._crew.workers[rank].data.send(channel.DATA, frames):
            self._crew.wake()

    def receive(self, timeout: float | None) -> tuple[int, list[memoryview]] | None:
        """The next message of any rank, as ``(rank, frames)``.

        Args:
            timeout: seconds to wait; 0 only looks, None waits for ever.

        Returns:
            None when the time is over. Messages that have arrived come before any error.

        Raises:
            WorkerDied: at once when a worker dies; again whenever a wait would otherwise end with
                nothing or last for ever, since that worker's answer will not come.
            WorkerFrozen: a worker has not answered a ping for the deadline.
            ProtocolError: a worker refused what it was sent.
            LazyGTError: the link is closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while True:
                self._check_open()
                message = self._next()
                if message is not None:
                    return message
                if not self._wait(until):
                    return None

    def close(self) -> None:
        """End the workers and remove all that belongs to them. Idempotent; takes seconds at most.

        First a shutdown message, then SIGTERM, then SIGKILL, each with a bounded wait.
        """
        self._closed = True
        if not self._finalizer.alive:
            return
        self._crew.wake()
        with self._receiving:
            ranks = range(self.world_size)
            stuck = {rank for rank in ranks if self._watch.is_frozen(rank)}
            started = {rank for rank in ranks if self._watch.is_started(rank)}
            orderly = started - stuck - self._refused  # who refused us does not listen any more
            self._crew.end(orderly, stuck)
            self._finalizer()

    def _check_open(self) -> None:
        if self._closed:
            raise LazyGTError("the link to the workers is closed")

    def _died(self, rank: int) -> WorkerDied:
        return WorkerDied(rank, self.pids[rank], *self._deaths[rank])

    def _next(self) -> tuple[int, list[memoryview]] | None:
        """The next message that has arrived, taking turns between the ranks."""
        workers = self._crew.workers
        for step in range(len(workers)):
            rank = (self._turn + step) % len(workers)
            worker = workers[rank]
            while worker.inbox or worker.data.take(worker.inbox):
                frames = self._open(rank, worker.inbox.popleft())
                if frames is not None:
                    self._turn = rank + 1
                    return rank, frames
        return None

    def _open(self, rank: int, message: bytes) -> list[memoryview] | None:
        """The frames of a message for the session; None for one of our own."""
        kind, frames = channel.unpack(message)
        now = time.monotonic()
        if kind == channel.WELCOME:
            self._watch.handle(supervise.Welcomed(rank), now)
            return None
        self._watch.handle(supervise.Heard(rank), now)
        if kind == channel.DATA:
            return frames
        self._refused.add(rank)
        text = bytes(frames[0]).decode(errors="replace") if frames else repr(kind)
        raise ProtocolError(f"worker {rank} dropped this session: {text}")

    def _wait(self, until: float | None) -> bool:
        """Wait until something happens; False when the time is over. Nothing has arrived yet."""
        self._take_pongs()
        now = time.monotonic()
        self._follow(self._watch.handle(supervise.Tick(), now))
        if self._errors:
            raise self._errors.popleft()
        left = None if until is None else until - now
        self._raise_if_dead(left)
        seconds = self._watch.seconds_to_next(now)
        happened, ended = self._crew.poll(seconds if left is None else min(seconds, max(left, 0)))
        for rank in ended:
            self._bury(rank)
        return happened or left is None or left > 0

    def _raise_if_dead(self, left: float | None) -> None:
        """Do not wait for ever, nor come back with nothing, when a worker is known to be dead."""
        if self._deaths and (left is None or left <= 0):
            raise self._died(min(self._deaths))

    def _take_pongs(self) -> None:
        for rank, worker in enumerate(self._crew.workers):
            while worker.control.take(worker.pongs):
                worker.pongs.clear()
                self._watch.handle(supervise.Heard(rank), time.monotonic())

    def _bury(self, rank: int) -> None:
        self._deaths[rank] = self._crew.bury(rank)
        self._follow(self._watch.handle(supervise.Ended(rank), time.monotonic()))

    def _follow(self, instructions: Sequence[supervise.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case supervise.Ping(rank):
                    self._crew.workers[rank].control.send(channel.PING)
                case supervise.ReportDied(rank):
                    self._errors.append(self._died(rank))
                case supervise.ReportFrozen(rank, deadline):
                    self._errors.append(WorkerFrozen(rank, self.pids[rank], deadline))


@dataclass(slots=True)
class _Worker:
    """One worker as the client sees it."""

    process: Process
    data: Client
    control: Client
    fetch: Arena | None
    inbox: deque[bytes] = field(default_factory=deque)
    pongs: deque[bytes] = field(default_factory=deque)


class _Crew:
    """All that must be given back: processes, sockets, arenas, the directory. No decisions."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.upload: Arena | None = None
        self._stack = ExitStack()
        self._poller = select.poll()
        self._pidfds: dict[int, int] = {}
        self._wake = -1

    def start(self, spec: LinkSpec, launcher: Launcher) -> None:
        """Start the workers, without waiting for them."""
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
        plan = _StartPlan(spec, directory.path, new_token())
        for rank in range(spec.world_size):
            self._start_worker(plan, rank, context, launcher)

    def _start_worker(
        self,
        plan: _StartPlan,
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
            self.workers.append(_Worker(process, data, control, fetch))
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

    def poll(self, seconds: float) -> tuple[bool, list[int]]:
        """Wait for anything at all; whether there was, and the ranks whose process has ended."""
        ready = [fd for fd, _ in HOLD.wait(self._poller, math.ceil(seconds * 1000))]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return bool(ready), [self._pidfds[fd] for fd in ready if fd in self._pidfds]

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
        return worker.process.status() or "unknown", worker.process.stderr_tail()

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


@dataclass(frozen=True, slots=True)
class _StartPlan:
    """What the workers of one session have in common at their start."""

    spec: LinkSpec
    directory: Path
    token: bytes

    def boot(self, rank: int, upload: Arena | None, fetch: Arena | None, ours: ExitStack) -> Boot:
        """A worker's boot configuration; ``ours`` closes our copies of its listening sockets."""
        spec = self.spec
        keys = None if spec.transport == "ipc" else Keys.generate()
        addresses = []
        for name in ("data", "control"):
            address = self._listen(f"{name}{rank}", keys)
            ours.callback(os.close, address.fd)
            addresses.append(address)
        return Boot(
            factory=spec.factory,
            device="cuda:0" if spec.device == "cuda" else spec.device,
            rank=rank,
            world_size=spec.world_size,
            threads=spec.threads or share_of_cores(spec.world_size),
            client_pid=os.getpid(),
            token=self.token.hex(),
            data=addresses[0],
            control=addresses[1],
            keys=keys,
            max_message=spec.max_message,
            upload=upload.fd if upload else None,
            fetch=fetch.fd if fetch else None,
            directory=str(self.directory),
            group=self._group(),
            loads_torch=spec.loads_torch,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of one worker, its GPU among them."""
        given = dict(self.spec.environment)
        if self.spec.device == "cuda":
            given["CUDA_VISIBLE_DEVICES"] = visible_gpu(rank, torch.cuda.device_count())
        return given

    def _listen(self, name: str, keys: Keys | None) -> Address:
        if keys is None:
            return channel.listen_local(self.directory / name)
        scheme, _, host = self.spec.transport.partition("://")
        if scheme != "tcp":
            raise ValueError(f"transport {self.spec.transport!r}: expected 'ipc' or 'tcp://HOST'")
        return channel.listen_tcp(host or "127.0.0.1", keys)

    def _group(self) -> GroupSpec | None:
        if self.spec.world_size == 1:
            return None
        gpus = torch.cuda.device_count() if self.spec.device == "cuda" else 0
        backend = backend_for(self.spec.device, self.spec.world_size, gpus)
        if slow := why_gloo(self.spec.device, self.spec.world_size, gpus):
            warnings.warn(f"lazygt.session: {slow}", RuntimeWarning, stacklevel=2)
        return GroupSpec(backend, f"file://{self.directory}/group", self.spec.group_timeout,
                         self.spec.mesh)  # fmt: skip


def _wait_for(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait so long in all; those that still run."""
    until = time.monotonic() + seconds
    return [process for process in processes if not process.wait(until - time.monotonic())]


def _abandon(crew: _Crew, owner: int) -> None:
    """The net under `ProcessLink.close`, for a link that was dropped or forgotten."""
    if os.getpid() != owner:
        return  # a child that the client forked: the workers are not its own
    crew.end(orderly=(), stuck=range(len(crew.workers)))
    crew.close()
