"""Client connection of a pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from lazygt.errors import PoolError, ProtocolError
from lazygt.pool.published import PublishedValue
from lazygt.pool.requests import Failed, Watched
from lazygt.runtime.cluster.connection import Connection
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.launch.status_file import CAPACITY, ClientPage, decoded
from lazygt.runtime.launch.status_reader import Page
from lazygt.runtime.wire import Part, encode

#: Seconds for which a client's status page is valid without a new request.
_STALE_SECONDS = 2.0


@dataclass(slots=True)
class Visitor:
    """A connected client with an allowed key.

    Attributes:
        session: the session that it has asked for.
        publishing: an incomplete value that it is publishing.
        lost: True if its connection is dead at the moment.
    """

    connection: Connection
    session: str | None = None
    publishing: PublishedValue | None = None
    lost: bool = False
    #: messages of requested published values
    sending: deque[Iterator[tuple[Part, list[Frame]]]] = field(default_factory=deque)
    #: last status page of its client, and its time; and the time of an unanswered request
    _page: Page | None = None
    _told: float = 0.0
    _asked: float | None = None

    @property
    def client(self) -> str:
        """Name of its key."""
        return self.connection.peer

    def say(self, message: Part, frames: Sequence[Frame] = ()) -> None:
        """Send a message, unless the connection has ended."""
        if self.connection.closed is None:
            self.connection.send(encode(message, list(frames)))

    def doing(self) -> Page | None:
        """Return the last status page of its session's client, and ask for the next.

        None: there was none since observation began.
        """
        now = time.monotonic()
        if self._asked is None:
            if now - self._told > _STALE_SECONDS:
                self._page = None
            self._asked = now
            self.say(Watched())
        page = self._page
        return page and replace(page, age=page.age + now - self._told)

    @property
    def unheard(self) -> float:
        """Seconds for which the client of its session has not answered for its status."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    def tell(self, frames: Sequence[Frame]) -> None:
        """Keep the client's status page.

        Raises:
            ProtocolError: the page makes no sense.
        """
        if self.session is None or len(frames) != 1 or len(frames[0]) > 2 * CAPACITY:
            raise ProtocolError("a status page of nobody's")
        page = decoded(frames[0], Page)
        decoded(page.message, ClientPage)
        self._page, self._told, self._asked = page, time.monotonic(), None

    def fail(self, error: PoolError) -> None:
        """Send an error."""
        self.say(Failed.of(error))
