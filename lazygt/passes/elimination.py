"""One run of variable elimination over cost tables; ``solver`` says what for."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.passes.tables import Factor, Scope, Table, Tables


@dataclass(frozen=True, slots=True)
class Eliminated:
    """Choices for every variable.

    Attributes:
        bound: no choices cost less; what these cost when nothing was relaxed.
        relaxed: the variables conditioned on, in that order.
    """

    choices: list[int]
    bound: float
    relaxed: tuple[int, ...]


class _Argmin(NamedTuple):
    """A variable that was eliminated: its best choice for each joint choice of its neighbours."""

    variable: int
    neighbours: Scope
    best: npt.NDArray[np.intp]


class _Conditioned(NamedTuple):
    """A variable that was relaxed, and the factors that named it then."""

    variable: int
    factors: list[int]


class Elimination:
    """Eliminates every variable of a problem, once.

    Args:
        sizes: the number of choices of each variable.
        cap: the most entries of a sum; a variable is relaxed where it would have more.
        fixed: variables whose choice is made already.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Collection[Factor],
        cap: int,
        fixed: Mapping[int, int] | None = None,
    ) -> None:
        self.width = self.entries = 0
        self._sizes, self._cap = sizes, cap
        self._bound = 0.0
        self._tables = Tables()
        self._scopes: list[Scope] = []
        self._table_of: list[int] = []
        self._choices = [0] * len(sizes)
        self._free = [size > 1 for size in sizes]
        for v, choice in (fixed or {}).items():
            self._free[v], self._choices[v] = False, choice
        self._naming: list[dict[int, None]] = [{} for _ in sizes]
        self._near: list[set[int]] = [set() for _ in sizes]
        self._entries = [0] * len(sizes)
        self._waiting: list[tuple[int, int]] = []
        for scope, table in factors:
            self._take(scope, self._tables.number(table))

    @property
    def computed(self) -> int:
        """Table entries that were computed, not found again."""
        return self._tables.computed

    def run(self) -> Eliminated:
        """Choose for every variable; at a bound of infinity the choices mean nothing."""
        steps: list[_Argmin | _Conditioned] = []
        for v, free in enumerate(self._free):
            if free:
                self._queue(v)
        while self._waiting:
            entries, v = heapq.heappop(self._waiting)
            if not self._free[v] or entries != self._entries[v]:
                continue
            while self._near[v] and self._entries[v] > self._cap:
                hub = max(self._near[v], key=lambda u: (len(self._near[u]), -u))
                steps.append(_Conditioned(hub, self._relax(hub)))
            steps.append(self._eliminate(v))
        for step in reversed(steps):
            self._choices[step.variable] = self._choice(step)
        relaxed = tuple([step.variable for step in steps if isinstance(step, _Conditioned)])
        return Eliminated(self._choices, self._bound, relaxed)

    def _choice(self, step: _Argmin | _Conditioned) -> int:
        """The best choice for a variable when all that went later have theirs."""
        if isinstance(step, _Argmin):
            return step.best.item(*[self._choices[u] for u in step.neighbours])
        return int(self._costs(step.variable, step.factors).argmin())

    def _costs(self, v: int, factors: Iterable[int]) -> Table:
        """What each choice of ``v`` costs, by these factors, with all others chosen."""
        total = np.zeros(self._sizes[v])
        for factor in factors:
            scope = self._scopes[factor]
            index = [self._choices[u] for u in scope if u != v]
            total += self._tables.along(self._table_of[factor], scope.index(v), index)
        return total

    def _queue(self, v: int) -> None:
        """Put a variable in its place among those that wait: by the entries of its sum."""
        entries = self._sizes[v]
        for u in self._near[v]:
            entries *= self._sizes[u]
        if entries != self._entries[v]:
            self._entries[v] = entries
            heapq.heappush(self._waiting, (entries, v))

    def _eliminate(self, v: int) -> _Argmin:
        neighbours = tuple(sorted(self._near[v]))
        place = {u: axis for axis, u in enumerate((v, *neighbours))}
        parts = tuple([
            (self._table_of[factor], tuple([place[u] for u in self._scopes[factor]]))
            for factor in self._naming[v]
        ])  # fmt: skip
        shape = tuple([self._sizes[u] for u in place])
        made = self._tables.summed(parts, shape)
        self._drop(v)
        self.width = max(self.width, len(neighbours))
        self.entries += made.entries
        self._bound += made.shift
        if made.table is not None:
            self._add(neighbours, made.table)
        for u in neighbours:
            self._queue(u)
        return _Argmin(v, neighbours, made.best)

    def _relax(self, v: int) -> list[int]:
        """Minimise each factor over ``v`` on its own; returns those factors."""
        factors = list(self._naming[v])
        self._drop(v)
        for factor in factors:
            scope = self._scopes[factor]
            axis = scope.index(v)
            rest = scope[:axis] + scope[axis + 1 :]
            self._add(rest, self._tables.least(self._table_of[factor], axis))
        for u in self._near[v]:
            self._queue(u)
        return factors

    def _drop(self, v: int) -> None:
        """Take a variable and its factors out."""
        self._free[v] = False
        for factor in self._naming[v]:
            for u in self._scopes[factor]:
                if u != v:
                    del self._naming[u][factor]
        for u in self._near[v]:
            self._near[u].discard(v)

    def _take(self, scope: Scope, table: int) -> None:
        """Add a factor of the problem, without the variables that are chosen already."""
        free = self._free
        if not all(map(free.__getitem__, scope)):
            where = tuple([None if free[v] else self._choices[v] for v in scope])
            scope = tuple([v for v in scope if free[v]])
            table = self._tables.part(table, where)
        self._add(scope, table)

    def _add(self, scope: Scope, table: int) -> None:
        if not scope:
            self._bound += self._tables.value(table)
            return
        factor = len(self._scopes)
        self._scopes.append(scope)
        self._table_of.append(table)
        for v in scope:
            self._naming[v][factor] = None
        if len(scope) == 2:
            a, b = scope
            self._near[a].add(b)
            self._near[b].add(a)
        elif len(scope) > 2:
            for v in scope:
                self._near[v].update(scope)
                self._near[v].discard(v)
