"""Messages between a pool and its clients, beside those of a session's agent.

Tags begin at 32; the header alone distinguishes these messages from an agent's.
"""

from __future__ import annotations

from typing import Any

from lazygt import errors
from lazygt.errors import PoolError
from lazygt.graph.meta import TensorMeta
from lazygt.runtime.wire import Buffer, Count, Part

_FIRST_TAG = 32

# -- to a pool -------------------------------------------------------------------------------


class Ask(Part, tag=32):
    """Request for a session."""

    workers: Count
    cores: Count  # torch threads of all workers; 0: one for each worker
    grace: float  # see ``events.Asked``, also for detach
    detach: bool


class Leave(Part, tag=33):
    """Notice that the client leaves its session; answered by ``Ok`` when its workers have ended."""


class Publish(Part, tag=34):
    """Request to publish a value; answered by ``Ok`` before and after its ``Piece``s."""

    name: str
    #: name and meta of each tensor, in the order of their bytes; "": a single tensor
    rows: tuple[tuple[str, TensorMeta], ...]
    shared: bool = False  # True if other clients may fetch it


class Piece(Part, tag=35):
    """The next bytes of a value, in the frame that follows; in either direction."""


class Fetch(Part, tag=36):
    """Request for a published value; answered by ``Value`` and its pieces."""

    name: str


class Names(Part, tag=37):
    """Request for the names of published values; answered by ``Listed``."""


class Forget(Part, tag=38):
    """Request to remove a published value; answered by ``Ok``."""

    name: str


class Status(Part, tag=39):
    """Request for a ``Report``.

    Without the right to administer, other clients' sessions are only counted.
    """

    pages: bool = False  # True to include the status pages of workers and clients


class DrainAll(Part, tag=40):
    """Request to admit no more sessions; answered by ``Ok``; for administrators."""


class EvictOne(Part, tag=41):
    """Request to end a session; answered by ``Ok``; another client's for administrators."""

    session: str


class Doing(Part, tag=42):
    """Status page of a session's client, in the frame that follows."""


class AreYouThere(Part, tag=46):
    """Request for a sign of life; answered by ``Here``."""


# -- to a client -----------------------------------------------------------------------------


class Waits(Part, tag=48):
    """Notice that a session waits, with the number of sessions before it."""

    ahead: Count


class Admitted(Part, tag=49):
    """Notice that a session has workers; later messages are for and from its agent."""

    session: str
    device: str  # device of the workers


class Failed(Part, tag=50):
    """Error of a refused request or an ended session, as its class and arguments."""

    kind: str
    given: tuple[Any, ...] = ()

    @classmethod
    def of(cls, error: PoolError) -> Failed:
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


class Ok(Part, tag=51):
    """Confirmation of a request."""


class Value(Part, tag=52):
    """A published value; its pieces follow. See ``Publish``."""

    rows: tuple[tuple[str, TensorMeta], ...]


class Listed(Part, tag=53):
    """Published values: name, bytes, client, shared."""

    rows: tuple[tuple[str, Count, str, bool], ...] = ()


class Report(Part, tag=54):
    """Report of the pool as JSON; a frame with status pages by session follows on request."""

    text: str


class Watched(Part, tag=55):
    """Request for the client's status page; answered by ``Doing``, when the client is free."""


class Here(Part, tag=60):
    """Sign of life of the pool."""


TO_POOL: tuple[type[Part], ...] = (
    Ask, Leave, Publish, Piece, Fetch, Names, Forget, Status, DrainAll, EvictOne, Doing,
    AreYouThere,
)  # fmt: skip
TO_CLIENT: tuple[type[Part], ...] = (
    Waits, Admitted, Failed, Ok, Value, Piece, Listed, Report, Watched, Here,
)  # fmt: skip


def is_ours(header: Buffer) -> bool:
    """Return whether a message is between pool and client, rather than an agent's."""
    return len(header) > 1 and header[1] >= _FIRST_TAG
