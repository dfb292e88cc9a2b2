"""Requests for published values: publish, fetch, list and forget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lazygt.errors import OverQuota, PoolError, ProtocolError
from lazygt.pool.messages import Fetch, Forget, Listed, Names, Ok, Piece, Publish, Value
from lazygt.pool.published import PublishedValue, PublishedValues
from lazygt.pool.rules import Rules
from lazygt.pool.visitor import Visitor
from lazygt.runtime.launch.mailbox import Frame
from lazygt.runtime.wire import Part

#: Limits of one client.
_MOST_NAMES, _LONGEST_NAME = 1000, 256
#: Limit of the requested values that one connection has not received yet.
_MOST_FETCHES = 16
#: Limit of the sent bytes that a client has not read yet.
_AHEAD_BYTES = 64 << 20


class Publishing:
    """Handler of clients' requests to publish and fetch values.

    Args:
        held: returns the bytes that the sessions of a client hold.
        visitors: returns all connected clients.

    Attributes:
        values: the published values.
    """

    def __init__(
        self, rules: Rules, held: Callable[[str], int], visitors: Callable[[], list[Visitor]]
    ) -> None:
        self.values = PublishedValues()
        self._rules, self._held, self._visitors = rules, held, visitors

    def act(self, visitor: Visitor, message: Part, rest: list[memoryview]) -> None:
        """Act on a request.

        Raises:
            PoolError: the request is refused.
            ProtocolError: the request makes no sense.
        """
        match message:
            case Publish():
                self._publish(visitor, message)
            case Piece():
                self._take_piece(visitor, rest)
            case Fetch(name):
                self._send(visitor, name)
            case Names():
                seen = self.values.seen_by(visitor.client)
                visitor.say(Listed(tuple((v.name, v.nbytes, v.client, v.shared) for v in seen)))
            case Forget(name):
                self.values.forget(visitor.client, name)
                visitor.say(Ok())

    def _publish(self, visitor: Visitor, told: Publish) -> None:
        value = PublishedValue(told.name, visitor.client, told.rows, told.shared)
        visitor.publishing = None
        if len(told.name) > _LONGEST_NAME:
            raise PoolError(f"a name of {len(told.name)} characters: {_LONGEST_NAME} at most")
        if self.values.count(visitor.client, without=told.name) >= _MOST_NAMES:
            raise PoolError(f"{_MOST_NAMES} values are published with this key: forget some")
        limit = self._rules.of(visitor.client).memory
        if limit is not None:
            coming = [v.publishing for v in self._visitors() if v.client == visitor.client]
            used = self._held(visitor.client)
            used += self.values.nbytes(visitor.client, without=told.name)
            used += sum(other.nbytes for other in coming if other is not None)
            if used + value.nbytes > limit:
                raise OverQuota("memory", value.nbytes, used, limit)
        visitor.publishing = value
        visitor.say(Ok())
        self._finish(visitor)

    def _take_piece(self, visitor: Visitor, rest: list[memoryview]) -> None:
        if visitor.publishing is None or len(rest) != 1:
            raise ProtocolError("a piece of nothing")
        visitor.publishing.add(rest[0])
        self._finish(visitor)

    def _finish(self, visitor: Visitor) -> None:
        value = visitor.publishing
        if value is not None and len(value.data) == value.nbytes:
            self.values.keep(value)
            visitor.publishing = None
            visitor.say(Ok())

    def _send(self, visitor: Visitor, name: str) -> None:
        if len(visitor.sending) >= _MOST_FETCHES:
            raise PoolError(f"{_MOST_FETCHES} values are on their way already: read them first")
        visitor.sending.append(_messages(self.values.of(visitor.client, name)))

    def go_on(self, visitor: Visitor) -> None:
        """Send requested values as fast as the client reads them."""
        while visitor.sending and visitor.connection.pending < _AHEAD_BYTES:
            message = next(visitor.sending[0], None)
            if message is None:
                visitor.sending.popleft()
            else:
                visitor.say(*message)


def _messages(value: PublishedValue) -> Iterator[tuple[Part, list[Frame]]]:
    yield Value(value.rows), []
    for piece in value.pieces():
        yield Piece(), [piece]
