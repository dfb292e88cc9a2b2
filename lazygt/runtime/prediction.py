"""Prediction: lists of ids that mostly repeat from run to run; only what is new in them is sent."""

from __future__ import annotations

from typing import Any

from lazygt.errors import ProtocolError


class Prediction:
    """A list of ids that mostly repeats from run to run, sent as what is surprising in it.

    Both sides keep the last list. An id is expected to stay, or, if it moved with the base
    between the last two runs (a parameter that every step makes anew), to move with it again.
    """

    __slots__ = ("base", "ids", "moving")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[int] = []
        self.moving: list[bool] = []

    def encode(self, ids: list[int], base: int) -> Any:
        """The update that makes the other side's list equal ``ids``; None when it is already."""
        guess = self._guess(base)
        if len(guess) != len(ids):
            update: Any = (0, tuple(ids))
        else:
            wrong = [
                x for i, (a, b) in enumerate(zip(ids, guess, strict=True)) if a != b for x in (i, a)
            ]
            update = (1, tuple(wrong)) if wrong else None
        self._learn(list(ids), base)
        return update

    def decode(self, update: Any, base: int) -> list[int]:
        """The list that the sender encoded.

        Raises:
            ProtocolError: when the update does not fit the list.
        """
        ids = self._guess(base)
        try:
            if update is not None:
                kind, values = update
                if any(not isinstance(v, int) for v in values):
                    raise ValueError("ids are integers")
                if kind == 0:
                    ids = list(values)
                else:
                    for i in range(0, len(values), 2):
                        ids[values[i]] = values[i + 1]
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"not an id update: {error}") from error
        self._learn(list(ids), base)
        return ids

    def _guess(self, base: int) -> list[int]:
        step = base - self.base
        return [i + step if moves else i for i, moves in zip(self.ids, self.moving, strict=True)]

    def _learn(self, ids: list[int], base: int) -> None:
        step = base - self.base
        if len(ids) == len(self.ids):
            self.moving = [a == b + step and step != 0 for a, b in zip(ids, self.ids, strict=True)]
        else:
            self.moving = [False] * len(ids)
        self.ids, self.base = ids, base
