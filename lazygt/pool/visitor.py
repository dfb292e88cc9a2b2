"""Who is at the other end of a pool's connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazygt.errors import PoolError
from lazygt.pool.messages import Failed
from lazygt.pool.published import PublishedValue
from lazygt.runtime.cluster.connection import Connection
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.wire import Part, encode


@dataclass(slots=True)
class Visitor:
    """Somebody with an allowed key.

    Attributes:
        session: that it has asked for.
        publishing: a value of which bytes are still to come.
        lost: nobody is there at the moment.
    """

    connection: Connection
    session: str | None = None
    publishing: PublishedValue | None = None
    lost: bool = False

    @property
    def client(self) -> str:
        """The name of its key."""
        return self.connection.peer

    def say(self, message: Part, frames: Sequence[Frame] = ()) -> None:
        """Send a message, if somebody is there."""
        if self.connection.closed is None:
            self.connection.send(encode(message, list(frames)))

    def fail(self, error: PoolError) -> None:
        """Say what has gone wrong."""
        self.say(Failed.of(error))
