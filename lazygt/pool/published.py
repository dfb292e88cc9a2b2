"""Published values of a pool: named, and independent of the sessions they come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lazygt.errors import PoolError, ProtocolError
from lazygt.graph.meta import TensorMeta

PIECE_BYTES = 16 << 20

Rows = tuple[tuple[str, TensorMeta], ...]


@dataclass(slots=True)
class PublishedValue:
    """A tensor, or tensors by name, as consecutive bytes.

    Attributes:
        rows: name and meta of each; see ``messages.Publish``.
        shared: True if other clients may fetch it.
        data: the bytes received so far.
    """

    name: str
    client: str
    rows: Rows
    shared: bool
    data: bytearray = field(default_factory=bytearray)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(meta.nbytes for _, meta in self.rows)

    def add(self, piece: memoryview) -> bool:
        """Append the next bytes; return whether these were the last.

        Raises:
            ProtocolError: there are more bytes than the value has.
        """
        if len(self.data) + len(piece) > self.nbytes:
            raise ProtocolError(f"more bytes than the {self.nbytes} of {self.name!r}")
        self.data += piece
        return len(self.data) == self.nbytes

    def pieces(self) -> Iterable[memoryview]:
        """Yield the bytes in pieces of at most `PIECE_BYTES`."""
        view = memoryview(self.data)
        for begin in range(0, len(view), PIECE_BYTES):
            yield view[begin : begin + PIECE_BYTES]


class PublishedValues:
    """All published values, by client and name."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], PublishedValue] = {}

    def all(self) -> list[PublishedValue]:
        """List the values of all clients."""
        return list(self._values.values())

    def keep(self, value: PublishedValue) -> None:
        """Keep a value; it replaces the client's own of that name."""
        self._values[value.client, value.name] = value

    def nbytes(self, client: str, without: str | None = None) -> int:
        """Return the bytes that a client has published.

        Args:
            without: name of a value to leave out, because it is about to be replaced.
        """
        values = self._values.values()
        return sum(v.nbytes for v in values if v.client == client and v.name != without)

    def count(self, client: str, without: str) -> int:
        """Count the values that a client has published under other names than ``without``."""
        return sum(whose == client and name != without for whose, name in self._values)

    def by_client(self) -> dict[str, int]:
        """Return the bytes that each client has published."""
        return {client: self.nbytes(client) for client, _ in self._values}

    def seen_by(self, client: str) -> list[PublishedValue]:
        """List the values that a client may fetch: its own, and the shared ones of others."""
        return [v for v in self._values.values() if v.client == client or v.shared]

    def of(self, client: str, name: str) -> PublishedValue:
        """Return a value by its name: the client's own, or one shared by another client.

        Raises:
            PoolError: there is none that this client may fetch; or several others share one.
        """
        if (client, name) in self._values:
            return self._values[client, name]
        theirs = [value for value in self.seen_by(client) if value.name == name]
        if not theirs:
            names = sorted({value.name for value in self.seen_by(client)})
            there = f"there are {', '.join(map(repr, names))}" if names else "there is none yet"
            raise PoolError(f"nothing is published as {name!r} for this key: {there}")
        if len(theirs) > 1:
            owners = ", ".join(value.client for value in theirs)
            raise PoolError(f"{name!r} is shared by several keys ({owners}): use another name")
        return theirs[0]

    def forget(self, client: str, name: str) -> None:
        """Remove a client's own value.

        Raises:
            PoolError: it has none of that name.
        """
        if self._values.pop((client, name), None) is None:
            raise PoolError(f"this key has published nothing as {name!r}")
