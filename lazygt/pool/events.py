"""Events and instructions of a pool's policy."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from lazygt.errors import PoolError
from lazygt.pool.scheduler import Pause, Resume

# -- events ------------------------------------------------------------------------------------


class Asked(Struct, frozen=True):
    """A client's request for a session."""

    session: str
    client: str
    workers: int
    cores: int  # torch threads of all its workers
    grace: float = 0.0  # seconds for which its connection may be dead
    detach: bool = False  # True if the session outlives its client, until it is ended or expires


class Released(Struct, frozen=True):
    """End of a session: its processes are gone, or it has left the queue."""

    session: str


class Load(Struct, frozen=True):
    """Numbers of a session's runs on its workers, and of those waiting for a turn."""

    session: str
    running: int
    held: int


class Ran(Struct, frozen=True):
    """Seconds that a session's workers have run since the last such event."""

    session: str
    seconds: float


class Used(Struct, frozen=True):
    """Bytes held by sessions' workers, and by clients' published values."""

    sessions: Mapping[str, int]
    published: Mapping[str, int]


class ClientGone(Struct, frozen=True):
    """Loss of a session's client."""

    session: str
    for_good: bool = False  # True if the client will not come back: its process has ended or left


class ClientBack(Struct, frozen=True):
    """Return of a session's client."""

    session: str


class Drain(Struct, frozen=True):
    """Request to admit no more sessions, and to refuse the waiting ones."""


class Evict(Struct, frozen=True):
    """Request to end a session."""

    session: str


class Tick(Struct, frozen=True):
    """Passage of time."""


Event = (
    Asked | Released | Load | Ran | Used | ClientGone | ClientBack | Drain | Evict | Tick
)  # fmt: skip


# -- instructions ------------------------------------------------------------------------------


class Grant(Struct, frozen=True):
    """Instruction to start a session's workers in these worker slots."""

    session: str
    places: tuple[int, ...]


class Refuse(Struct, frozen=True):
    """Instruction to refuse a client's session."""

    session: str
    error: PoolError


class End(Struct, frozen=True):
    """Instruction to end a session's processes, and notify its client.

    `Released` follows when the processes are gone.
    """

    session: str
    error: PoolError


Instruction = Grant | Refuse | End | Pause | Resume
