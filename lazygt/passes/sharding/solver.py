"""Min-sum by variable elimination: the cheapest choice for many variables with few choices each.

A problem is a sum of cost tables (factors), each over few variables. A variable is eliminated by
adding up the tables that name it and minimising over it, which leaves one table over its
neighbours. The variable with the smallest sum goes first (ties by number, so that equal problems
are solved alike everywhere). Tables are kept once by content, so that the elimination of the
tenth identical layer is a dictionary look-up.

Where a table would grow past a cap, the neighbour with the most neighbours is *conditioned on*:
its tables are relaxed (minimised over it one by one, which keeps a lower bound), its choice is
made at the end, and the rest is solved anew, exactly, for that choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.passes.sharding.cost_tables import CostTables, Factor, Scope, Table

# -- one run of variable elimination ---------------------------------------------------------------


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
        self._tables = CostTables()
        self._scopes: list[Scope] = []
        self._table_of: list[int] = []
        self._choices = [0] * len(sizes)
        self._free = [size > 1 for size in sizes]
        for v, choice in (fixed or {}).items():
            self._free[v], self._choices[v] = False, choice
        self._factors_of: list[dict[int, None]] = [{} for _ in sizes]
        self._neighbours: list[set[int]] = [set() for _ in sizes]
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
            while self._neighbours[v] and self._entries[v] > self._cap:
                hub = max(self._neighbours[v], key=lambda u: (len(self._neighbours[u]), -u))
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
        for u in self._neighbours[v]:
            entries *= self._sizes[u]
        if entries != self._entries[v]:
            self._entries[v] = entries
            heapq.heappush(self._waiting, (entries, v))

    def _eliminate(self, v: int) -> _Argmin:
        neighbours = tuple(sorted(self._neighbours[v]))
        place = {u: axis for axis, u in enumerate((v, *neighbours))}
        parts = tuple([
            (self._table_of[factor], tuple([place[u] for u in self._scopes[factor]]))
            for factor in self._factors_of[v]
        ])  # fmt: skip
        shape = tuple([self._sizes[u] for u in place])
        total = self._tables.summed(parts, shape)
        self._drop(v)
        self.width = max(self.width, len(neighbours))
        self.entries += total.entries
        self._bound += total.shift
        if total.table is not None:
            self._add(neighbours, total.table)
        for u in neighbours:
            self._queue(u)
        return _Argmin(v, neighbours, total.best)

    def _relax(self, v: int) -> list[int]:
        """Minimise each factor over ``v`` on its own; returns those factors."""
        factors = list(self._factors_of[v])
        self._drop(v)
        for factor in factors:
            scope = self._scopes[factor]
            axis = scope.index(v)
            rest = scope[:axis] + scope[axis + 1 :]
            self._add(rest, self._tables.least(self._table_of[factor], axis))
        for u in self._neighbours[v]:
            self._queue(u)
        return factors

    def _drop(self, v: int) -> None:
        """Take a variable and its factors out."""
        self._free[v] = False
        for factor in self._factors_of[v]:
            for u in self._scopes[factor]:
                if u != v:
                    del self._factors_of[u][factor]
        for u in self._neighbours[v]:
            self._neighbours[u].discard(v)

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
            self._factors_of[v][factor] = None
        if len(scope) == 2:
            a, b = scope
            self._neighbours[a].add(b)
            self._neighbours[b].add(a)
        elif len(scope) > 2:
            for v in scope:
                self._neighbours[v].update(scope)
                self._neighbours[v].discard(v)


# -- a problem, and its cheapest choice ------------------------------------------------------------

#: Entries of the largest table: 3 MiB.
TABLE_CAP = 400_000
#: The local search after conditioning ends when a sweep changes nothing, which it does early.
_SWEEPS = 20


class Infeasible(ValueError):
    """No choices have a finite cost."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose ``0 <= choice < sizes[v]`` for every variable ``v`` with the least sum of factors.

    Whole numbers below 2**53 as costs make every sum, and so the solution, exact.
    """

    sizes: Sequence[int]
    factors: Sequence[Factor]


@dataclass(frozen=True, slots=True)
class Solution:
    """What was chosen, and how good it is.

    Attributes:
        choices: one a variable.
        cost: the sum of the factors at the choices.
        bound: no choices cost less.
        exact: whether nothing was conditioned on; then cost is bound.
        width: the most neighbours that an eliminated variable had.
        entries: table entries of all eliminations together.
        computed: those of them that were computed, not found again.
        conditioned: the variables conditioned on, in that order.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    exact: bool
    width: int
    entries: int
    computed: int
    conditioned: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How much of the cost a better solution could save at most, from 0 to 1."""
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def solve(problem: Problem, cap: int = TABLE_CAP) -> Solution:
    """The cheapest choices; where the cap forbids to find them, good ones and a lower bound.

    Args:
        cap: the most entries a table may have while it is summed.

    Raises:
        Infeasible: no choices have a finite cost.
        ValueError: a factor does not fit its variables.
    """
    _check(problem)
    first = Elimination(problem.sizes, problem.factors, cap)
    eliminated = first.run()
    if math.isinf(eliminated.bound):
        raise Infeasible("every joint choice costs infinity: some factors contradict each other")
    choices, cost = eliminated.choices, eliminated.bound
    if eliminated.relaxed:
        fixed = {v: choices[v] for v in eliminated.relaxed}
        again = Elimination(problem.sizes, problem.factors, cap, fixed).run()
        better = min((choices, again.choices), key=lambda candidate: evaluate(problem, candidate))
        choices = _improved(problem, better)
        cost = evaluate(problem, choices)
    return Solution(
        choices=tuple(choices),
        cost=cost,
        bound=eliminated.bound,
        exact=not eliminated.relaxed,
        width=first.width,
        entries=first.entries,
        computed=first.computed,
        conditioned=eliminated.relaxed,
    )


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """The cost of these choices."""
    return float(
        sum(factor.table.item(*[choices[v] for v in factor.scope]) for factor in problem.factors)
    )


def _check(problem: Problem) -> None:
    sizes = problem.sizes
    if min(sizes, default=1) < 1:
        raise ValueError(f"variable {sizes.index(min(sizes))} has no choices")
    for number, (scope, table) in enumerate(problem.factors):
        if not _fits(scope, table.shape, sizes):
            raise ValueError(
                f"factor {number} has a table of shape {table.shape} for the variables {scope}, "
                f"which have {[sizes[v] for v in scope]} choices"
            )


def _fits(scope: Scope, shape: tuple[int, ...], sizes: Sequence[int]) -> bool:
    if len(scope) == 2:  # nearly all
        a, b = scope
        return a != b and shape == (sizes[a], sizes[b])
    return len(set(scope)) == len(scope) and shape == tuple([sizes[v] for v in scope])


def _improved(problem: Problem, choices: Sequence[int]) -> list[int]:
    """The choices after changing one variable at a time for as long as that saves something."""
    touching: list[list[Factor]] = [[] for _ in problem.sizes]
    for factor in problem.factors:
        for v in factor.scope:
            touching[v].append(factor)
    now = list(choices)
    for _ in range(_SWEEPS):
        changed = False
        for v, factors in enumerate(touching):
            costs = _costs(v, problem.sizes[v], factors, now)
            best = int(costs.argmin())
            if costs[best] < costs[now[v]]:
                now[v], changed = best, True
        if not changed:
            break
    return now


def _costs(v: int, size: int, factors: Iterable[Factor], choices: Sequence[int]) -> Table:
    """What each choice of one variable costs while all others stay."""
    total = np.zeros(size)
    for scope, table in factors:
        total += table[tuple([slice(None) if u == v else choices[u] for u in scope])]
    return total
