"""Events and instructions of a pool's policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lazygt.errors import PoolError
from lazygt.pool.turns import Pause, Resume

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks for a session.

    Attributes:
        cores: torch threads of its workers together.
        grace: seconds for which its connection may be dead.
        detach: it is to outlive its client until somebody ends it, or it expires.
    """

    session: str
    client: str
    workers: int
    cores: int
    grace: float = 0.0
    detach: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A session has ended, and its processes are gone; or it has left the queue."""

    session: str


@dataclass(frozen=True, slots=True)
class Load:
    """So many of a session's runs are with its workers, and so many are held back."""

    session: str
    running: int
    held: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A session's workers have run for so long since it was last said."""

    session: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Used:
    """So many bytes are held by sessions' workers and by published values."""

    sessions: Mapping[str, int]
    published: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A session's client is not there.

    Attributes:
        for_good: its process has ended, or it has left: it will not come back.
    """

    session: str
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class ClientBack:
    """A session has a connection again."""

    session: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no session any more, and refuse the waiting ones."""


@dataclass(frozen=True, slots=True)
class Evict:
    """End a session."""

    session: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Asked | Released | Load | Ran | Used | ClientGone | ClientBack | Drain | Evict | Tick
)  # fmt: skip


# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Start a session's workers in these places."""

    session: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a client that its session won't be, and forget it."""

    session: str
    error: PoolError


@dataclass(frozen=True, slots=True)
class End:
    """End a session's processes, tell its client, and say `Released` when they are gone."""

    session: str
    error: PoolError


Instruction = Grant | Refuse | End | Pause | Resume
