"""What was used lately, bounded by number and by memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping that forgets what was not used for longest; never what was kept last.

    Args:
        most: so many are kept, at most.
        most_bytes: so many bytes, as told, of all of them together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        #: says that what is kept under a key was used
        self.touch = self._kept.move_to_end
        #: of all that is kept
        self.nbytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def items(self) -> Iterator[tuple[K, V]]:
        """Least recently used first; this is no use."""
        return ((key, value) for key, (value, _) in self._kept.items())

    def get(self, key: K) -> V | None:
        """What is kept under a key, which counts as used now; None if there is nothing."""
        value = self._kept.get(key)
        if value is None:
            return None
        self._kept.move_to_end(key)
        return value[0]

    def keep(self, key: K, value: V, nbytes: int) -> list[tuple[K, V]]:
        """Keep something of so many bytes; what is forgotten for it."""
        self.drop(key)
        self._kept[key] = value, nbytes
        self.nbytes += nbytes
        forgotten = []
        while len(self) > 1 and (len(self) > self._most or self.nbytes > self._most_bytes):
            forgotten.append(self.oldest())
        return forgotten

    def oldest(self) -> tuple[K, V]:
        """Forget what was not used for longest, and return it."""
        key, (value, nbytes) = self._kept.popitem(last=False)
        self.nbytes -= nbytes
        return key, value

    def drop(self, key: K) -> None:
        """Forget what is kept under a key, if anything is."""
        _, nbytes = self._kept.pop(key, (None, 0))
        self.nbytes -= nbytes

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.nbytes = 0
