"""Published values of a pool: named tensors that outlive the sessions that computed them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lazygt.errors import PoolError, ProtocolError
from lazygt.graph.meta import TensorMeta

PIECE_BYTES = 16 << 20

Rows = tuple[tuple[str, TensorMeta], ...]


@dataclass(slots=True)
class PublishedValue:
    """Published tensor, or tensors by name, as consecutive bytes."""

    name: str
    client: str
    rows: Rows  # name and meta of each tensor; see ``requests.Publish``
    shared: bool  # True if other clients may fetch it
    data: bytearray = field(default_factory=bytearray)  # the bytes received so far

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(meta.nbytes for _, meta in self.rows)

    def add(self, piece: memoryview) -> bool:
        """Append the next bytes; return whether the value is complete.

        Raises:
            ProtocolError: the value has fewer bytes.
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

    def store(self, value: PublishedValue) -> None:
        """Store a value, replacing the client's own value of that name."""
        self._values[value.client, value.name] = value

    def nbytes(self, client: str, without: str | None = None) -> int:
        """Return the bytes that a client has published.

        Args:
            without: name of a value to leave out, which is about to be replaced.
        """
        values = self._values.values()
        return sum(v.nbytes for v in values if v.client == client and v.name != without)

    def count(self, client: str, without: str) -> int:
        """Count the values that a client has published under other names than ``without``."""
        return sum(owner == client and name != without for owner, name in self._values)

    def by_client(self) -> dict[str, int]:
        """Return the published bytes of each client."""
        return {client: self.nbytes(client) for client, _ in self._values}

    def seen_by(self, client: str) -> list[PublishedValue]:
        """List the values that a client may fetch: its own, and the shared ones of others."""
        return [v for v in self._values.values() if v.client == client or v.shared]

    def of(self, client: str, name: str) -> PublishedValue:
        """Return a value by its name: the client's own, or one shared by another client.

        Raises:
            PoolError: no value of that name may be fetched, or several other clients share one.
        """
        if (client, name) in self._values:
            return self._values[client, name]
        shared = [value for value in self.seen_by(client) if value.name == name]
        if not shared:
            names = sorted({value.name for value in self.seen_by(client)})
            available = f"there are {', '.join(map(repr, names))}" if names else "there is none yet"
            raise PoolError(f"nothing is published as {name!r} for this key: {available}")
        if len(shared) > 1:
            owners = ", ".join(value.client for value in shared)
            raise PoolError(f"{name!r} is shared by several keys ({owners}): use another name")
        return shared[0]

    def forget(self, client: str, name: str) -> None:
        """Remove a client's own value.

        Raises:
            PoolError: the client has no value of that name.
        """
        if self._values.pop((client, name), None) is None:
            raise PoolError(f"this key has published nothing as {name!r}")
