"""What clients ask of published values: that one is kept, told, named or forgotten."""

from __future__ import annotations

from collections.abc import Callable

from lazygt.errors import OverQuota, ProtocolError
from lazygt.pool.messages import Fetch, Forget, Listed, Names, Ok, Piece, Publish, Value
from lazygt.pool.published import PublishedValue, PublishedValues
from lazygt.pool.rules import Rules
from lazygt.pool.visitor import Visitor
from lazygt.runtime.wire import Part


class Publishing:
    """Takes values from clients, and gives them out.

    Args:
        held: bytes that the sessions of a client hold.
        visitors: all that are there.

    Attributes:
        values: what is published.
    """

    def __init__(
        self, rules: Rules, held: Callable[[str], int], visitors: Callable[[], list[Visitor]]
    ) -> None:
        self.values = PublishedValues()
        self._rules, self._held, self._visitors = rules, held, visitors

    def act(self, visitor: Visitor, message: Part, rest: list[memoryview]) -> bool:
        """Do what is asked; whether it is about published values at all.

        Raises:
            PoolError: it can't be had.
            ProtocolError: it makes no sense.
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
            case _:
                return False
        return True

    def _publish(self, visitor: Visitor, told: Publish) -> None:
        value = PublishedValue(told.name, visitor.client, told.rows, told.shared)
        visitor.publishing = None
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
        value = self.values.of(visitor.client, name)
        visitor.say(Value(value.rows))
        for piece in value.pieces():
            visitor.say(Piece(), [piece])
