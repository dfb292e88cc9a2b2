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
        session: name of the client's session, if it has requested one.
        publishing: incomplete value that the client is uploading.
        lost: True while the connection is dead.
    """

    connection: Connection
    session: str | None = None
    publishing: PublishedValue | None = None
    lost: bool = False
    #: messages of requested published values
    sending: deque[Iterator[tuple[Part, list[Frame]]]] = field(default_factory=deque)
    #: last status page of the client, its time, and the time of an unanswered request for the next
    _page: Page | None = None
    _page_time: float = 0.0
    _requested_at: float | None = None

    @property
    def client(self) -> str:
        """Name of the client's key."""
        return self.connection.peer

    def send(self, message: Part, frames: Sequence[Frame] = ()) -> None:
        """Send a message, unless the connection has ended."""
        if self.connection.closed is None:
            self.connection.send(encode(message, list(frames)))

    def latest_page(self) -> Page | None:
        """Return the client's last status page, and request the next.

        None: no recent page has arrived.
        """
        now = time.monotonic()
        if self._requested_at is None:
            if now - self._page_time > _STALE_SECONDS:
                self._page = None
            self._requested_at = now
            self.send(Watched())
        page = self._page
        return page and replace(page, age=page.age + now - self._page_time)

    @property
    def unheard(self) -> float:
        """Seconds since the unanswered request for a status page; 0: none is pending."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def store_page(self, frames: Sequence[Frame]) -> None:
        """Store a received status page.

        Raises:
            ProtocolError: the page is malformed, or the client has no session.
        """
        if self.session is None or len(frames) != 1 or len(frames[0]) > 2 * CAPACITY:
            raise ProtocolError("a status page of nobody's")
        page = decoded(frames[0], Page)
        decoded(page.message, ClientPage)
        self._page, self._page_time, self._requested_at = page, time.monotonic(), None

    def fail(self, error: PoolError) -> None:
        """Send an error to the client."""
        self.send(Failed.of(error))
