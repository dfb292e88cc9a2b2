"""Events and instructions of a pool's policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazygt.errors import PoolError
from lazygt.pool.scheduler import Pause, Resume

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request for a session.

    Attributes:
        cores: torch threads of its workers together.
        grace: seconds for which its connection may be dead.
        detach: True if it outlives its client until it is ended, or expires.
    """

    session: str
    client: str
    workers: int
    cores: int
    grace: float = 0.0
    detach: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """End of a session: its processes are gone, or it has left the queue."""

    session: str


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of a session's runs with its workers, and held back."""

    session: str
    running: int
    held: int


@dataclass(frozen=True, slots=True)
class Ran:
    """Seconds that a session's workers have run since the last such event."""

    session: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Used:
    """Bytes held by sessions' workers, and by clients' published values."""

    sessions: Mapping[str, int]
    published: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Loss of a session's client.

    Attributes:
        for_good: True if it will not come back: its process has ended, or it has left.
    """

    session: str
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class ClientBack:
    """Return of a session's client."""

    session: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Request to admit no session any more, and to refuse the waiting ones."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Request to end a session."""

    session: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Passage of time."""


Event = (
    Asked | Released | Load | Ran | Used | ClientGone | ClientBack | Drain | Evict | Tick
)  # fmt: skip


# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Instruction to start a session's workers in these places."""

    session: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Instruction to refuse a client's session, and forget it."""

    session: str
    error: PoolError


@dataclass(frozen=True, slots=True)
class End:
    """Instruction to end a session's processes, and tell its client.

    `Released` follows when they are gone.
    """

    session: str
    error: PoolError


Instruction = Grant | Refuse | End | Pause | Resume
