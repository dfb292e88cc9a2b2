"""Session that a pool hosts: client connection, gate, and agent of its workers."""

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
#: Seconds for which workers write detailed status pages after a look.
_WATCHED_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits of a session's workers, for any request of its client.

    Attributes:
        threads: threads of each worker.
        device: ``cpu`` or ``cuda``.
        places: places of the pool, one for each worker; also the numbers of their GPUs.
        hidden: True if other processes of the pool's user are kept from inspecting them.
        cache: folder of this client's compiled code: no other code is run for it.
    """

    workers: int
    threads: int
    device: str
    cache: str
    places: tuple[int, ...] = ()
    hidden: bool = False

    def apply(self, spec: LinkSpec) -> LinkSpec:
        """Return the specification of the workers.

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

    def _environment(self, asked: Mapping[str, str]) -> dict[str, str]:
        kept = {name: asked[name] for name in asked.keys() & _VARIABLES}
        told = {processes.VARIABLE: "1"} if self.hidden else {}
        return {**kept, **told, "LAZYGT_CACHE_DIR": self.cache}


class Hosted:
    """A session with workers.

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
        if self._opened:
            raise PoolError("the workers of this session have been started already")
        allowed = self._terms.apply(spec)
        self._opened = True
        return allowed

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its workers."""
        return tuple(pid for part in self.gate.pids.values() for pid in part)

    def memory(self) -> int:
        """Return the bytes held for it: its workers' private and shared memory, and messages.

        Code and files do not count.
        """
        private = sum(processes.resident(pid, "RssAnon") for pid in self.pids)
        shared = sum(processes.resident(pid, "RssShmem") for pid in self.pids)
        return private + max(shared, self.agent.held) + self.gate.held

    def doing(self) -> tuple[Page | None, ...]:
        """Return the status pages of its workers; None: not written yet."""
        parts = self.agent.parts.values()
        pages = tuple(page for part in parts for page in part.look(_WATCHED_SECONDS))
        return pages or (None,) * self._terms.workers

    def end(self, ended: Callable[[], None], kill: bool) -> None:
        """End its workers, on a thread of its own.

        Args:
            ended: called on that thread once they are gone.
            kill: kill them at once.
        """

        def act() -> None:
            if kill:
                self._kill()
            try:
                self.agent.close()
            finally:
                ended()

        self.ending = True
        threading.Thread(target=act, name="lazygt-pool-end", daemon=True).start()

    def _kill(self) -> None:
        for pid in self.pids:
            # a child that is not reaped, so no other process can have its number
            if processes.parent(pid) == os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
