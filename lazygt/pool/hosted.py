"""Hosted session of a pool: client connection, admission, and agent of its workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from lazygt.errors import PoolError, ProtocolError
from lazygt.host import processes
from lazygt.net.channel import MAX_MESSAGE_BYTES
from lazygt.net.mailbox import Frame
from lazygt.net.status_file import Page
from lazygt.runtime.cluster.agent import Agent, Connected
from lazygt.runtime.cluster.protocol import Closed, Died, Look, Opened, Said, Tell
from lazygt.runtime.launch.launcher import WORKER_FACTORY
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.messages import Done, Run
from lazygt.runtime.wire import Buffer, Count, decode, size_of, unpack

# -- admission control of a session: a connection to its agent, with a queue of runs ---------------
# The queued runs wait for a turn of the scheduler. Only a message's kind and the number of its
# run are decoded.

#: Seconds that workers may take to start. Until their first answer, or this time, runs count
#: neither as running nor in run-seconds.
_START_SECONDS = 60.0


class Gate:
    """Connection that holds back a client's runs and counts the answers; see ``Connected``.

    All methods are for the gateway's thread, except ``send``, which is for any: workers' answers
    are sent on the threads that wait for them.

    Args:
        connection: connection to the client.
        may_pass: returns whether the next run may be forwarded, given the number of running ones.
        changed: called after an answer, on the thread that sends it.
    """

    def __init__(
        self,
        connection: Connected,
        may_pass: Callable[[int], bool],
        changed: Callable[[], None],
    ) -> None:
        self.fd = connection.fd
        self._connection, self._may_pass, self._changed = connection, may_pass, changed
        self._queued: deque[list[memoryview]] = deque()
        self._lock = threading.Lock()
        #: run -> workers that have not answered it
        self._running: dict[int, int] = {}
        #: the last forwarded run, and its workers so far; its messages to other workers pass, too
        self._last_run, self._run_workers = 0, set[int]()
        #: time from which run-seconds count: the first answer, or the end of `_START_SECONDS`
        self._counts_from = time.monotonic() + _START_SECONDS
        self._busy_since = 0.0
        self._seconds = 0.0
        #: process ids of the workers, by part
        self.pids: dict[int, tuple[int, ...]] = {}

    @property
    def closed(self) -> str | None:
        """Reason for the connection's end, or None."""
        return self._connection.closed

    def close(self, reason: str = "done") -> None:
        """Do nothing: the gateway closes the connection."""

    @property
    def held(self) -> int:
        """Bytes of the queued messages."""
        return sum(map(size_of, self._queued))

    def put(self, frames: list[memoryview]) -> None:
        """Queue a message from the client for the agent.

        Raises:
            ProtocolError: the message is a malformed run.
        """
        parse_run(frames)
        if Look.begins(frames[0]):  # status requests don't wait behind runs
            self._queued.appendleft(frames)
        else:
            self._queued.append(frames)

    def take(self) -> list[memoryview] | None:
        """Return the next message that may be forwarded; None: there is none."""
        if not self._queued:
            return None
        frames = self._queued[0]
        run = parse_run(frames)
        if run is not None and not self._admit(*run):
            return None
        return self._queued.popleft()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message to the client; count it if it answers a run."""
        self._connection.send(frames)
        header = bytes(frames[0])
        if Said.begins(header):
            if Done.begins(frames[1]):
                self._count_answer(sequence_number(frames[1]))
        elif Opened.begins(header):
            opened = decode([header], (Opened,))
            assert isinstance(opened, Opened)
            self.pids = {**self.pids, opened.part: tuple(opened.pids)}
        elif Died.begins(header) or Closed.begins(header):
            self._reset_runs()

    def load(self) -> tuple[float, int, int]:
        """Return the run time since the last call in seconds, and the counts of runs.

        The counts are those of running and of queued runs.
        """
        now = time.monotonic()
        with self._lock:
            self._add_run_time(now)
            seconds, self._seconds = self._seconds, 0.0
            running = len(self._running) if now >= self._counts_from else 0
        queued = sum(parse_run(frames) is not None for frames in self._queued)
        return seconds, running, queued

    def _admit(self, number: int, workers: tuple[int, ...]) -> bool:
        """Return whether a run's message may be forwarded; count the run as running then."""
        with self._lock:
            running = len(self._running)
        if number != self._last_run or not self._run_workers.isdisjoint(workers):
            if not self._may_pass(running):
                return False
            self._last_run, self._run_workers = number, set()
        self._run_workers.update(workers)
        with self._lock:
            self._add_run_time(time.monotonic())
            self._running[number] = self._running.get(number, 0) + len(workers)
        return True

    def _count_answer(self, number: int) -> None:
        """Count one worker's answer; the last one ends the run."""
        with self._lock:
            self._counts_from = min(self._counts_from, time.monotonic())
            self._add_run_time(time.monotonic())
            unanswered = self._running.get(number, 0) - 1
            if unanswered > 0:
                self._running[number] = unanswered
            else:
                self._running.pop(number, None)
        self._changed()

    def _reset_runs(self) -> None:
        """Forget the running runs, because their workers have ended."""
        with self._lock:
            self._add_run_time(time.monotonic())
            self._running.clear()
        self._changed()

    def _add_run_time(self, now: float) -> None:
        """Add the time until now to the run time, if a run is running."""
        if self._running:
            self._seconds += max(now - max(self._busy_since, self._counts_from), 0.0)
        self._busy_since = now


def parse_run(frames: Sequence[Buffer]) -> tuple[int, tuple[int, ...]] | None:
    """Parse a run's number and workers from a message to an agent; None for other messages.

    Raises:
        ProtocolError: the message is malformed.
    """
    if len(frames) < 2 or not Tell.begins(frames[0]) or not Run.begins(frames[1]):
        return None
    message = decode(frames, (Tell,))
    assert isinstance(message, Tell)
    return sequence_number(frames[1]), message.workers


class _Numbered(msgspec.Struct, array_like=True):
    """The beginning of a `Run` or a `Done`."""

    kind: int
    seq: Count


def sequence_number(header: Buffer) -> int:
    """Return the number of a run, from the header of its message or of the answer to it.

    Raises:
        ProtocolError: the header has no valid number.
    """
    try:
        return cast(_Numbered, unpack(header, _Numbered)).seq
    except ProtocolError as error:
        raise ProtocolError("a run without a number: expected [tag, seq, ...]") from error


# -- hosted session of a pool: client connection, admission, and agent of its workers --------------

#: Allowed factories of a worker's copier; see ``session.COPIER``.
_COPIERS = frozenset({"", "lazygt.transfer.copier:copier_for"})
#: Variables that a client may set in its workers' environment.
_VARIABLES = frozenset({
    "LAZYGT_MAX_MESSAGE_BYTES", "LAZYGT_MAX_PLANS", "LAZYGT_MAX_PLAN_BYTES", "LAZYGT_SHM_THRESHOLD",
    "LAZYGT_PLAN_CODE", "LAZYGT_CUDA_GRAPHS", "LAZYGT_MAX_CUDA_GRAPH_BYTES", "LAZYGT_SHIP_CODE",
})  # fmt: skip
_LARGEST_ARENA = 1 << 30
#: Seconds for which workers write detailed status pages after a request for one.
_WATCHED_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits of a session's workers, for any request of its client."""

    workers: int
    threads: int  # threads of each worker
    device: str  # ``cpu`` or ``cuda``
    cache: str  # folder of this client's compiled code; workers load no other code
    #: worker slots of the pool, one for each worker; also the numbers of their GPUs
    slots: tuple[int, ...] = ()
    hidden: bool = False  # True if other processes of the pool's user can't inspect the workers

    def apply(self, spec: LinkSpec) -> LinkSpec:
        """Return the client's specification of the workers, within these limits.

        Raises:
            PoolError: the client asks for more than it may.
        """
        if spec.world_size != self.workers or sorted(spec.here) != list(range(self.workers)):
            raise PoolError(f"{self.workers} worker(s) were granted, not {spec.world_size}")
        if spec.factory != WORKER_FACTORY or spec.copier not in _COPIERS or not spec.loads_torch:
            raise PoolError("a pool starts lazygt's own workers only")
        if spec.transport != "ipc":
            raise PoolError(f"transport={spec.transport!r} is not the client's choice in a pool")
        if not 0 <= spec.arena_bytes <= _LARGEST_ARENA:
            raise PoolError(f"an arena of {spec.arena_bytes} bytes")
        if not 0 < spec.max_message <= MAX_MESSAGE_BYTES:
            raise PoolError(f"messages of {spec.max_message} bytes")
        return replace(
            spec,
            threads=self.threads,
            device=self.device,
            gpus=self.slots if self.device == "cuda" else None,
            spares=0,
            ranks=None,
            token=None,
            client_here=False,
            environment=self._environment(spec.environment),
        )

    def _environment(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Return the allowed variables of a client's request, and the pool's own."""
        allowed = {name: requested[name] for name in requested.keys() & _VARIABLES}
        hiding = {processes.VARIABLE: "1"} if self.hidden else {}
        return {**allowed, **hiding, "LAZYGT_CACHE_DIR": self.cache}


class Hosted:
    """Session with workers in a pool.

    Args:
        may_pass, changed: see `Gate`.
    """

    def __init__(
        self,
        connection: Connected,
        terms: Terms,
        may_pass: Callable[[int], bool],
        changed: Callable[[], None],
    ) -> None:
        self.gate = Gate(connection, may_pass, changed)
        self._terms = terms
        self._opened = False
        self.agent = Agent(self.gate, self._check)
        self.ending = False

    def _check(self, spec: LinkSpec) -> LinkSpec:
        """Apply the terms to the one request to start workers."""
        if self._opened:
            raise PoolError("the workers of this session have been started already")
        limited = self._terms.apply(spec)
        self._opened = True
        return limited

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(pid for host_pids in self.gate.pids.values() for pid in host_pids)

    def memory(self) -> int:
        """Return the session's bytes: private and shared memory of workers, and messages.

        Code and mapped files do not count.
        """
        private = sum(processes.resident(pid, "RssAnon") for pid in self.pids)
        shared = sum(processes.resident(pid, "RssShmem") for pid in self.pids)
        return private + max(shared, self.agent.held) + self.gate.held

    def status_pages(self) -> tuple[Page | None, ...]:
        """Return the status pages of the workers; None: not written yet."""
        host_parts = self.agent.parts.values()
        pages = tuple(page for host_part in host_parts for page in host_part.look(_WATCHED_SECONDS))
        return pages or (None,) * self._terms.workers

    def end(self, ended: Callable[[], None], kill: bool) -> None:
        """End the workers, on a new thread.

        Args:
            ended: called on that thread once the workers are gone.
            kill: kill the workers at once.
        """

        def end_workers() -> None:
            if kill:
                self._kill()
            try:
                self.agent.close()
            finally:
                ended()

        self.ending = True
        threading.Thread(target=end_workers, name="lazygt-pool-end", daemon=True).start()

    def _kill(self) -> None:
        """Kill the workers that are still children of this process."""
        for pid in self.pids:
            # an unreaped child, so no other process can have this id
            if processes.parent(pid) == os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
