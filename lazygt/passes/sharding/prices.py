"""Tables of what it costs to make the labels that are wanted of those that there are."""

from __future__ import annotations

import math

import numpy as np

from lazygt.graph.label import Label, Replicated
from lazygt.passes.sharding.cost import Machine, reshard_seconds, ticks
from lazygt.passes.tables import Table

#: Labels of one value that are there together, or wanted together.
Labels = tuple[Label, ...]
#: What each choice of a variable has, or wants, of a value.
Options = tuple[Labels, ...]


class Prices:
    """Costs in ticks on one axis; equal tables are one array.

    Args:
        parts: the ranks of the axis.
    """

    def __init__(self, machine: Machine, parts: int) -> None:
        self._machine, self._parts = machine, parts
        self._moves: dict[tuple[Label, Label, int], float] = {}
        self._lines: dict[tuple[Labels, Labels, int], float] = {}
        self._options: dict[Options, Options] = {}
        self._tables: dict[tuple[int, int, int], Table | None] = {}
        self._copies: dict[tuple[int, int], Table | None] = {}

    def options(self, options: Options) -> Options:
        """The one object that stands for all equal options, as ``table`` takes them."""
        return self._options.setdefault(options, options)

    def move(self, source: Label, target: Label, nbytes: int) -> float:
        """To give a value of ``nbytes`` another label."""
        key = source, target, nbytes
        found = self._moves.get(key)
        if found is None:
            took = reshard_seconds(self._machine, source, target, nbytes, self._parts)
            found = self._moves[key] = ticks(took)
        return found

    def make(self, have: Labels, want: Labels, nbytes: int) -> float:
        """To make all the labels that are wanted of those at hand, by way of one more if better."""
        key = have, want, nbytes
        found = self._lines.get(key)
        if found is None:
            found = self._each(have, want, nbytes)
            if len(want) > 1 or math.isinf(found):  # the same op takes several, or none leads there
                for way in (Replicated(), *want):
                    first = self._each(have, (way,), nbytes)
                    found = min(found, first + self._each((*have, way), want, nbytes))
            self._lines[key] = found
        return found

    def _each(self, have: Labels, want: Labels, nbytes: int) -> float:
        return sum(min(self.move(source, target, nbytes) for source in have) for target in want)

    def table(self, have: Options, want: Options, nbytes: int) -> Table | None:
        """One row a choice of what there is, one column a choice of what is wanted.

        None where nothing costs anything.
        """
        key = id(have), id(want), nbytes
        if key not in self._tables:
            made = np.array([[self.make(h, w, nbytes) for w in want] for h in have])
            self._tables[key] = made if made.any() else None
        return self._tables[key]

    def copies(self, have: Options, nbytes: int) -> Table | None:
        """For each choice, to make the labels after its first one; None where nothing costs."""
        key = id(have), nbytes
        if key not in self._copies:
            made = np.array([self.make(h[:1], h[1:], nbytes) for h in have], dtype=float)
            self._copies[key] = made if made.any() else None
        return self._copies[key]
