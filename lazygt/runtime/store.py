"""Store of a worker's values, by id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from lazygt.runtime.messages import Failure


@dataclass(slots=True)
class Failed:
    """Placeholder of a value with a failed op."""

    failure: Failure


Value = torch.Tensor | Failed


class Store:
    """Map from id to value. Values in the client's upload arena are *borrowed*: read-only.

    Attributes:
        values: id -> value.
        borrowed: id -> arena offset, for borrowed values.
    """

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self.borrowed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, key: int) -> bool:
        return key in self.values

    def put(self, key: int, value: Value, borrowed: int | None = None) -> None:
        """Store a value; ``borrowed`` is the arena offset to release when it is freed."""
        self.values[key] = value
        if borrowed is not None:
            self.borrowed[key] = borrowed

    def put_from(self, first: int, values: Sequence[Value]) -> None:
        """Store values under consecutive ids from ``first`` on."""
        self.values.update(zip(range(first, first + len(values)), values, strict=True))

    def get_all(self, keys: Sequence[int]) -> list[Value]:
        """Return the values; an unknown id gives a Failed one."""
        values = list(map(self.values.get, keys))
        if type(None) in map(type, values):
            return [self.get(key) for key in keys]
        return cast(list[Value], values)

    def get(self, key: int) -> Value:
        """Return the value; a Failed one if the id is unknown."""
        value = self.values.get(key)
        if value is None:
            return Failed(Failure(-1, "KeyError", f"the worker holds no value {key}"))
        return value

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self.borrowed.clear()

    def ids_since(self, first: int) -> list[int]:
        """Return the stored ids from ``first`` on."""
        return [key for key in self.values if key >= first]

    def is_borrowed(self, key: int) -> bool:
        """Return whether the value's memory belongs to the client."""
        return key in self.borrowed

    def free(self, keys: Iterable[int]) -> list[int]:
        """Remove values; return the arena offsets of the borrowed ones, to release them."""
        values, borrowed = self.values, self.borrowed
        offsets = []
        for key in keys:
            values.pop(key, None)
            if key in borrowed:
                offsets.append(borrowed.pop(key))
        return offsets
