"""Limits of a pool, and messages between it and its clients, beside those of a session's agent.

Tags begin at 32; the header alone distinguishes these messages from an agent's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lazygt import errors
from lazygt.errors import PoolError
from lazygt.graph.meta import TensorMeta
from lazygt.net.channel import MAX_MESSAGE_BYTES
from lazygt.runtime.wire import Buffer, Count, Message

# -- limits of a pool, and quotas of its clients ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quota:
    """Quota of all sessions of one client; None: no limit."""

    sessions: int | None = None  # sessions with workers, or waiting for them
    workers: int | None = None  # workers of these sessions
    cores: int | None = None  # torch threads of these workers
    memory: int | None = None  # bytes of the workers and the published values


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a pool."""

    workers: int  # number of worker slots
    at_once: int  # number of workers that may run at the same time
    queue: int = 64  # number of sessions that may wait for workers
    grace: float = 300.0  # maximum seconds for which a session's connection may be dead
    expiry: float = 24 * 3600.0  # seconds that a detached session lives without its client
    quota: Quota = Quota()
    #: quota of each client; all others have ``quota``
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    hidden: bool = False  # True if workers can't inspect one another

    def of(self, client: str) -> Quota:
        """Return a client's quota."""
        return self.quotas.get(client, self.quota)


_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def address(text: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``.

    Raises:
        ValueError: the text has another form.
    """
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address such as 'tcp://127.0.0.1:7000'")
    return host.strip("[]"), int(port)


def quotas(path: Path) -> tuple[Quota, dict[str, Quota]]:
    """Read the default quota and those of some clients from a TOML file::

        [default]
        workers = 4
        memory = "8 GiB"

        [client.alice]
        sessions = 2

    Entries missing in a client's table default to those of ``default``.

    Raises:
        ValueError: the file is no valid quota file.
        OSError: the file can't be read.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    unknown = sorted(tables.keys() - {"default", "client"})
    if unknown:
        raise ValueError(f"{path}: [{unknown[0]}]: expected [default] and [client.NAME]")
    default = _limits(path, "default", tables.get("default", {}))
    clients = tables.get("client", {})
    if not isinstance(clients, Mapping):
        raise ValueError(f"{path}: expected [client.NAME]")
    return Quota(**default), {
        name: Quota(**{**default, **_limits(path, f"client.{name}", table)})
        for name, table in clients.items()
    }


def _limits(path: Path, name: str, table: Any) -> dict[str, int]:
    """Parse and check one table of quotas."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{path}: expected a table [{name}]")
    allowed = [field.name for field in fields(Quota)]
    limits = {}
    for key, value in table.items():
        if key not in allowed:
            raise ValueError(f"{path}: [{name}] {key}: expected {', '.join(allowed)}")
        number = _nbytes(value) if key == "memory" and isinstance(value, str) else value
        if type(number) is not int or number < 0:
            raise ValueError(f"{path}: [{name}] {key} = {value!r}: expected a whole number >= 0")
        limits[key] = number
    return limits


def _nbytes(text: str) -> int | None:
    """Parse a size such as ``8 GiB`` into bytes; None: the text is no size."""
    number, _, unit = text.strip().partition(" ")
    with suppress(ValueError, KeyError):
        return int(float(number) * _SIZES[unit.strip()])
    return None


# -- messages between a pool and its clients, beside those of a session's agent --------------------

#: Bytes of the longest message, with 64 KiB besides its payload: numbers, lengths, headers.
LONGEST = MAX_MESSAGE_BYTES + (64 << 10)
_FIRST_TAG = 32

# -- to a pool -------------------------------------------------------------------------------


class Ask(Message, tag=32):
    """Request for a session."""

    workers: Count
    cores: Count  # torch threads of all workers; 0: one for each worker
    grace: float  # see ``policy.SessionRequest``, also for detach
    detach: bool


class Leave(Message, tag=33):
    """Notice that the client leaves its session; answered by ``Ok`` when its workers have ended."""


class Publish(Message, tag=34):
    """Request to publish a value; answered by ``Ok`` before and after its ``ValuePiece``s."""

    name: str
    #: name and meta of each tensor, in the order of their bytes; "": a single tensor
    rows: tuple[tuple[str, TensorMeta], ...]
    shared: bool = False  # True if other clients may fetch it


class ValuePiece(Message, tag=35):
    """The next bytes of a value, in the frame that follows; in either direction."""


class Fetch(Message, tag=36):
    """Request for a published value; answered by ``Value`` and its pieces."""

    name: str


class Names(Message, tag=37):
    """Request for the names of published values; answered by ``Listed``."""


class Forget(Message, tag=38):
    """Request to remove a published value; answered by ``Ok``."""

    name: str


class Status(Message, tag=39):
    """Request for a ``PoolReport``.

    Without the right to administer, other clients' sessions are only counted.
    """

    pages: bool = False  # True to include the status pages of workers and clients


class DrainAll(Message, tag=40):
    """Request to admit no more sessions; answered by ``Ok``; for administrators."""


class EvictOne(Message, tag=41):
    """Request to end a session; answered by ``Ok``; another client's for administrators."""

    session: str


class Doing(Message, tag=42):
    """Status page of a session's client, in the frame that follows."""


class AreYouThere(Message, tag=46):
    """Request for a sign of life; answered by ``Here``."""


# -- to a client -----------------------------------------------------------------------------


class Waits(Message, tag=48):
    """Notice that a session waits, with the number of sessions before it."""

    ahead: Count


class Admitted(Message, tag=49):
    """Notice that a session has workers; later messages are for and from its agent."""

    session: str
    device: str  # device of the workers


class RequestFailed(Message, tag=50):
    """Error of a refused request or an ended session, as its class and arguments."""

    kind: str
    given: tuple[Any, ...] = ()

    @classmethod
    def of(cls, error: PoolError) -> RequestFailed:
        """Build the message of an error."""
        return cls(type(error).__name__, tuple(error.given))

    def error(self) -> PoolError:
        """Rebuild the error; an unknown class becomes a plain `PoolError`."""
        error_class = getattr(errors, self.kind, None)
        if not (isinstance(error_class, type) and issubclass(error_class, PoolError)):
            return PoolError(f"{self.kind}: {', '.join(map(str, self.given))}")
        try:
            return error_class(*self.given)
        except (TypeError, ValueError):  # fields of another version of the class
            return PoolError(f"{self.kind}: {', '.join(map(str, self.given))}")


class Ok(Message, tag=51):
    """Confirmation of a request."""


class Value(Message, tag=52):
    """A published value; its pieces follow. See ``Publish``."""

    rows: tuple[tuple[str, TensorMeta], ...]


class Listed(Message, tag=53):
    """Published values: name, bytes, client, shared."""

    rows: tuple[tuple[str, Count, str, bool], ...] = ()


class PoolReport(Message, tag=54):
    """Report of the pool as JSON; a frame with status pages by session follows on request."""

    text: str


class Watched(Message, tag=55):
    """Request for the client's status page; answered by ``Doing``, when the client is free."""


class Here(Message, tag=60):
    """Sign of life of the pool."""


TO_POOL: tuple[type[Message], ...] = (
    Ask, Leave, Publish, ValuePiece, Fetch, Names, Forget, Status, DrainAll, EvictOne, Doing,
    AreYouThere,
)  # fmt: skip
TO_CLIENT: tuple[type[Message], ...] = (
    Waits, Admitted, RequestFailed, Ok, Value, ValuePiece, Listed, PoolReport, Watched, Here,
)  # fmt: skip


def is_ours(header: Buffer) -> bool:
    """Return whether a message is between pool and client, rather than an agent's."""
    return len(header) > 1 and header[1] >= _FIRST_TAG
