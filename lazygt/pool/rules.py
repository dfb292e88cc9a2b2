"""What a pool allows, and what each of its clients may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quota:
    """What the sessions of one client may have together; None: as much as there is.

    Attributes:
        sessions: with workers, or waiting for them.
        workers: of these.
        cores: torch threads of these workers.
        memory: bytes that the workers and what is published may hold.
    """

    sessions: int | None = None
    workers: int | None = None
    cores: int | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pool allows.

    Attributes:
        workers: places.
        at_once: workers that may run at the same time.
        queue: sessions that may wait for places.
        grace: the longest time, in seconds, for which a session's connection may be dead.
        expiry: seconds that a detached session lives without its client.
        quotas: by client; those who are not here have ``quota``.
        hidden: whether workers are kept from looking into one another; see ``hidden.hide``.
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
        """A client's quota."""
        return self.quotas.get(client, self.quota)
