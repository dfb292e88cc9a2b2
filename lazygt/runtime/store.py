"""The values that a worker holds, by id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lazygt.runtime.messages import Failure


@dataclass(slots=True)
class Failed:
    """Stands where a value would be, had its op not failed."""

    failure: Failure


Value = torch.Tensor | Failed


class Store:
    """id -> value. Values in the client's upload arena are *borrowed*: never written in place."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._borrowed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: int) -> bool:
        return key in self._values

    def put(self, key: int, value: Value, borrowed: int | None = None) -> None:
        """Keep a value; ``borrowed`` is the arena offset to give back when it is freed."""
        self._values[key] = value
        if borrowed is not None:
            self._borrowed[key] = borrowed

    def get(self, key: int) -> Value:
        """The value; a Failed one when the id is unknown."""
        value = self._values.get(key)
        if value is None:
            return Failed(Failure(-1, "KeyError", f"the worker holds no value {key}"))
        return value

    def made_since(self, first: int) -> list[int]:
        """The ids from ``first`` on."""
        return [key for key in self._values if key >= first]

    def is_borrowed(self, key: int) -> bool:
        """Whether the value's memory belongs to the client."""
        return key in self._borrowed

    def free(self, key: int) -> int | None:
        """Forget a value; returns the arena offset that is free again, if it was borrowed."""
        self._values.pop(key, None)
        return self._borrowed.pop(key, None)
