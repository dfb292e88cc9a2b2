"""Limits of a pool, and quotas of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quota:
    """Quota of all sessions of one client; None: no limit.

    Attributes:
        sessions: sessions with workers, or waiting for them.
        workers: workers of these sessions.
        cores: torch threads of these workers.
        memory: bytes of the workers and the published values.
    """

    sessions: int | None = None
    workers: int | None = None
    cores: int | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a pool.

    Attributes:
        workers: number of worker slots (places).
        at_once: number of workers that may run at the same time.
        queue: number of sessions that may wait for workers.
        grace: maximum seconds for which a session's connection may be dead.
        expiry: seconds that a detached session lives without its client.
        quotas: quota of each client; all others have ``quota``.
        hidden: True if workers can't inspect one another.
    """

    workers: int
    at_once: int
    queue: int = 64
    grace: float = 300.0
    expiry: float = 24 * 3600.0
    quota: Quota = Quota()
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    hidden: bool = False

    def of(self, client: str) -> Quota:
        """Return a client's quota."""
        return self.quotas.get(client, self.quota)
