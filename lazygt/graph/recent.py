"""LRU cache, bounded by number and by memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """LRU mapping; the entry that was added last is never evicted.

    Args:
        most: maximum number of entries.
        most_bytes: maximum bytes of all entries together, as passed to ``keep``.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._max_entries, self._max_bytes = most, most_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        #: marks the entry of a key as used
        self.touch = self._entries.move_to_end
        #: bytes of all entries
        self.nbytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries, least recently used first, without marking them as used."""
        return ((key, value) for key, (value, _) in self._entries.items())

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as used; None if there is none."""
        value = self._entries.get(key)
        if value is None:
            return None
        self._entries.move_to_end(key)
        return value[0]

    def keep(self, key: K, value: V, nbytes: int) -> list[tuple[K, V]]:
        """Add an entry of ``nbytes`` bytes, and return the evicted entries."""
        self.drop(key)
        self._entries[key] = value, nbytes
        self.nbytes += nbytes
        evicted = []
        while len(self) > 1 and (len(self) > self._max_entries or self.nbytes > self._max_bytes):
            evicted.append(self.pop_oldest())
        return evicted

    def pop_oldest(self) -> tuple[K, V]:
        """Remove and return the least recently used entry."""
        key, (value, nbytes) = self._entries.popitem(last=False)
        self.nbytes -= nbytes
        return key, value

    def drop(self, key: K) -> None:
        """Remove the entry of a key, if there is one."""
        _, nbytes = self._entries.pop(key, (None, 0))
        self.nbytes -= nbytes

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.nbytes = 0
