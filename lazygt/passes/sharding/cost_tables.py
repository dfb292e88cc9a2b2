"""Cost tables: kept once by content, and what was computed from them kept with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
Scope = tuple[int, ...]


class Factor(NamedTuple):
    """Costs of the joint choices of some variables.

    Attributes:
        scope: the variables, each once.
        table: one axis a variable of the scope, in its order; infinity forbids. That two factors
            are alike is seen at once where they share one array.
    """

    scope: Scope
    table: Table


class Summed(NamedTuple):
    """A sum of tables minimised over its first variable.

    Attributes:
        table: the number of the minima less ``shift``; None where they are all alike.
        shift: the least of the minima.
        best: the first choice that attains each minimum.
        entries: of the sum.
    """

    table: int | None
    shift: float
    best: npt.NDArray[np.intp]
    entries: int


class CostTables:
    """Tables by number, one number for each content, and what was computed from them."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._of_array: dict[int, int] = {}
        self._parts: dict[tuple[object, ...], int] = {}
        self._sums: dict[tuple[object, ...], Summed] = {}
        self.computed = 0

    def number(self, table: Table) -> int:
        """The number of a table that outlives this object."""
        number = self._of_array.get(id(table))
        if number is None:
            number = self._of_array[id(table)] = self._intern(table)
        return number

    def part(self, table: int, where: tuple[int | None, ...]) -> int:
        """The number of a slice: an index for each axis that goes, None for one that stays."""
        key = ("part", table, where)
        if key not in self._parts:
            index = tuple(slice(None) if at is None else at for at in where)
            self._parts[key] = self._intern(self._tables[table][index])
        return self._parts[key]

    def least(self, table: int, axis: int) -> int:
        """The number of the minima over one axis."""
        key = ("least", table, axis)
        if key not in self._parts:
            self._parts[key] = self._intern(self._tables[table].min(axis=axis))
        return self._parts[key]

    def value(self, table: int) -> float:
        """The only entry of a table without axes."""
        return self._tables[table].item()

    def along(self, table: int, axis: int, index: Sequence[int]) -> Table:
        """The entries along one axis, at ``index`` of the other ones."""
        at: list[int | slice] = list(index)
        at.insert(axis, slice(None))
        line: Table = self._tables[table][tuple(at)]
        return line

    def summed(self, parts: Sequence[tuple[int, Scope]], shape: Scope) -> Summed:
        """Tables added up and minimised over axis 0.

        Args:
            parts: (table, the axis of the sum that each of its axes is).
            shape: of the sum.
        """
        key = (shape, *parts)
        number = self._sums.get(key)
        if number is None:
            number = self._sums[key] = self._sum(parts, shape)
        return number

    def _sum(self, parts: Iterable[tuple[int, Scope]], shape: Scope) -> Summed:
        total = np.zeros(shape)
        for number, axes in parts:
            order = sorted(range(len(axes)), key=axes.__getitem__)
            spread = [1] * len(shape)
            for axis in axes:
                spread[axis] = shape[axis]
            total += self._tables[number].transpose(order).reshape(spread)
        self.computed += total.size
        least = total.min(axis=0)
        shift = float(least.min())
        if math.isfinite(shift):
            least = least - shift
        alike = not least.ndim or not least.any()
        number_or_none = None if alike else self._intern(least)
        return Summed(number_or_none, shift, total.argmin(axis=0), total.size)

    def _intern(self, table: Table) -> int:
        key = table.shape, table.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return number
