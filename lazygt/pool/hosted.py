"""Hosted session of a pool: client connection, admission, and agent of its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from lazygt.errors import PoolError
from lazygt.host import processes
from lazygt.pool.gate import Gate
from lazygt.runtime.cluster.agent import Agent, Connected
from lazygt.runtime.launch.channel import MAX_MESSAGE_BYTES
from lazygt.runtime.launch.launcher import WORKER_FACTORY
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.launch.status_reader import Page

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
    """Limits of a session's workers, for any request of its client.

    Attributes:
        threads: threads of each worker.
        device: ``cpu`` or ``cuda``.
        places: worker slots of the pool, one for each worker; also the numbers of their GPUs.
        hidden: True if other processes of the pool's user can't inspect the workers.
        cache: folder of this client's compiled code; workers load no other code.
    """

    workers: int
    threads: int
    device: str
    cache: str
    places: tuple[int, ...] = ()
    hidden: bool = False

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
            gpus=self.places if self.device == "cuda" else None,
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
