"""Cost tables: kept once by content, along with results computed from them."""

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
        table: one axis a variable of the scope, in its order; infinity forbids. Factors that share
            one array are at once seen to be alike.
    """

    scope: Scope
    table: Table


#: Stands for no table: nothing costs anything.
NONE = -1


class Summed(NamedTuple):
    """Sum of tables, minimised over its first variable.

    Attributes:
        table: the number of the minima less ``shift``; NONE where they are all alike.
        shift: the least of the minima.
        best: the first choice that attains each minimum.
    """

    table: int
    shift: float
    best: npt.NDArray[np.intp]


class CostTables:
    """Tables by number, one number for each content, with results computed from them."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._of_array: dict[int, int] = {}
        self._parts: dict[tuple[object, ...], int] = {}
        self._turned: dict[int, int] = {NONE: NONE}
        self._both: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[object, ...], Summed] = {}
        self.computed = 0

    def number(self, table: Table) -> int:
        """Return the number of a table that outlives this object."""
        number = self._of_array.get(id(table))
        if number is None:
            number = self._of_array[id(table)] = self._intern(table)
        return number

    def part(self, table: int, where: tuple[int | None, ...]) -> int:
        """Return the number of a slice: an index for each axis that goes, None for the others."""
        key = ("part", table, where)
        if key not in self._parts:
            index = tuple(slice(None) if at is None else at for at in where)
            self._parts[key] = self._intern(self._tables[table][index])
        return self._parts[key]

    def least(self, table: int, axis: int) -> int:
        """Return the number of the minima over one axis."""
        key = ("least", table, axis)
        if key not in self._parts:
            self._parts[key] = self._intern(self._tables[table].min(axis=axis))
        return self._parts[key]

    def turned(self, table: int) -> int:
        """Return the number of the transpose of a table of two axes."""
        number = self._turned.get(table)
        if number is None:
            number = self._turned[table] = self._intern(self._tables[table].T)
            self._turned[number] = table
        return number

    def plus(self, a: int, b: int) -> int:
        """Return the number of the sum of two tables with the same axes."""
        if a == NONE:
            return b
        number = self._both.get((a, b))
        if number is None:
            number = self._both[a, b] = self._intern(self._tables[a] + self._tables[b])
        return number

    def value(self, table: int) -> float:
        """Return the only entry of a table without axes."""
        return self._tables[table].item()

    def along(self, table: int, axis: int, index: Sequence[int]) -> Table:
        """Return the entries along one axis, at ``index`` of the other ones."""
        at: list[int | slice] = list(index)
        at.insert(axis, slice(None))
        line: Table = self._tables[table][tuple(at)]
        return line

    def summed(
        self, tables: tuple[int, ...], shape: Scope = (), larger: tuple[tuple[int, Scope], ...] = ()
    ) -> Summed:
        """Add tables up and minimise the sum over axis 0.

        Args:
            tables: of axis 0 alone, then of axis 0 and each other one.
            shape: of the sum, where the tables don't tell.
            larger: (table, the axis of the sum that each of its axes is).
        """
        key = (tables, shape, larger) if shape else tables
        summed = self._sums.get(key)
        if summed is None:
            summed = self._sums[key] = self._sum(tables, shape, larger)
        return summed

    def _sum(
        self, tables: tuple[int, ...], shape: Scope, larger: Iterable[tuple[int, Scope]]
    ) -> Summed:
        parts = [(tables[0], (0,)), *[(t, (0, axis)) for axis, t in enumerate(tables[1:], 1)]]
        parts = [(number, axes) for number, axes in parts if number != NONE]
        if not shape:
            sizes = [self._tables[number].shape for number, _ in parts] or [(1,)]
            shape = sizes[0][0], *[size[1] for size in sizes if len(size) > 1]
        total = np.zeros(shape)
        for number, axes in (*parts, *larger):
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
        return Summed(NONE if alike else self._intern(least), shift, total.argmin(axis=0))

    def _intern(self, table: Table) -> int:
        key = table.shape, table.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return number
