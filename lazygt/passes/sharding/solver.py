"""Min-sum by variable elimination: many variables with few choices each.

A problem is a sum of cost tables (factors), each over few variables. A variable is eliminated by
adding up the tables that name it and minimising over it, which leaves one table over its
neighbours. The variable with the smallest sum goes first (ties by number, so that equal problems
are solved alike everywhere). Tables are kept once by content, so that the elimination of the tenth
identical layer is a dictionary look-up.

Where a table would grow past a cap, the neighbour with the most neighbours is *conditioned on*: its
tables are relaxed (minimised over it one by one, which keeps a lower bound), its choice is made at
the end, and the rest is solved anew, exactly, for that choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.passes.sharding.placement_cost import NONE, CostTables, Scope, Summed, Table

# -- one run of variable elimination: every variable once, then all choices backwards --------------
# All tables of one pair of variables are one sum, and so are those of one variable alone. So a
# query on the tables has a short key: the number of a variable's own table, and of the table with
# each neighbour, in the order of the neighbours.


@dataclass(frozen=True, slots=True)
class Eliminated:
    """Choices for every variable.

    Attributes:
        bound: no choices cost less; the cost of these when nothing was relaxed.
        relaxed: the variables conditioned on, in that order.
    """

    choices: list[int]
    bound: float
    relaxed: tuple[int, ...]


#: A variable that was eliminated, its neighbours, and its best choice for each of their choices.
_Argmin = tuple[int, Sequence[int], npt.NDArray[np.intp]]


class _Conditioned(NamedTuple):
    """Relaxed variable, with the factors that named it then, by table."""

    variable: int
    factors: list[tuple[Scope, int]]


class Elimination:
    """Elimination of every variable of a problem, once.

    Args:
        sizes: the number of choices of each variable.
        cap: the most entries of a sum; a variable is relaxed where it would have more.
        fixed: variables with a choice that is made already.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Collection[tuple[Scope, Table]],
        cap: int,
        fixed: Mapping[int, int] | None = None,
    ) -> None:
        self.width = self.entries = 0
        self._sizes, self._cap = sizes, cap
        self._bound = 0.0
        self._tables = CostTables()
        self._choices = [0] * len(sizes)
        self._free = [size > 1 for size in sizes]
        for v, choice in (fixed or {}).items():
            self._free[v], self._choices[v] = False, choice
        #: of each variable the table that names it alone
        self._own = [NONE] * len(sizes)
        #: of each variable its neighbours, with the table of the two; its own axis is the first
        self._pairs: list[dict[int, int]] = [{} for _ in sizes]
        #: of each variable the larger factors that name it
        self._larger: list[dict[int, None]] = [{} for _ in sizes]
        self._scopes: list[Scope] = []
        self._table_of: list[int] = []
        #: of each variable the entries of its sum, and those that it waits with
        self._entries, self._queued = list(sizes), [0] * len(sizes)
        #: entries and variable of each sum, as one number
        self._waiting: list[int] = []
        self._bits = len(sizes).bit_length()
        self._take(factors)

    @property
    def computed(self) -> int:
        """Number of table entries that were computed, not found again."""
        return self._tables.computed

    def run(self) -> Eliminated:
        """Choose for every variable; at a bound of infinity the choices mean nothing."""
        steps: list[_Argmin | _Conditioned] = []
        self._queue([v for v, free in enumerate(self._free) if free])
        waiting, free, current = self._waiting, self._free, self._entries
        bits, mask = self._bits, (1 << self._bits) - 1
        while waiting:
            first = heapq.heappop(waiting)
            v = first & mask
            if not free[v] or first >> bits != current[v]:
                continue
            while current[v] > self._cap and self._pairs[v]:
                hub = max(self._pairs[v], key=lambda u: (len(self._pairs[u]), -u))
                steps.append(_Conditioned(hub, self._relax(hub)))
            steps.append(self._eliminate(v))
        choices = self._choices
        choice = choices.__getitem__
        for step in reversed(steps):
            if isinstance(step, _Conditioned):
                choices[step.variable] = int(self._costs(*step).argmin())
            else:
                v, neighbours, best = step
                choices[v] = best.item(*map(choice, neighbours))
        relaxed = tuple([step.variable for step in steps if isinstance(step, _Conditioned)])
        return Eliminated(choices, self._bound, relaxed)

    def _costs(self, v: int, factors: Collection[tuple[Scope, int]]) -> Table:
        """Return the cost of each choice of ``v`` by these factors, with all others chosen."""
        total = np.zeros(self._sizes[v])
        for scope, table in factors:
            index = [self._choices[u] for u in scope if u != v]
            total += self._tables.along(table, scope.index(v), index)
        return total

    def _queue(self, variables: Collection[int]) -> None:
        """Put variables in the queue, by the entries of their sums."""
        queued, bits = self._queued, self._bits
        for v in variables:
            entries = self._entries[v]
            if entries != queued[v]:
                queued[v] = entries
                heapq.heappush(self._waiting, entries << bits | v)

    def _eliminate(self, v: int) -> _Argmin:
        pairs, tables = self._pairs[v], self._tables
        neighbours = sorted(pairs)
        key = self._own[v], *[pairs[u] for u in neighbours]
        if self._scopes and (self._larger[v] or NONE in key[1:]):
            table, shift, best = self._summed_with_larger(v, neighbours, key)
        else:
            table, shift, best = tables.summed(key)
        self._drop(v)
        self.width = max(self.width, len(neighbours))
        self.entries += self._entries[v]
        self._bound += shift
        if table != NONE:
            self._add(neighbours, table)
        self._queue(neighbours)
        return v, neighbours, best

    def _summed_with_larger(
        self, v: int, neighbours: Sequence[int], key: tuple[int, ...]
    ) -> Summed:
        place = {u: axis for axis, u in enumerate((v, *neighbours))}
        larger = tuple([
            (self._table_of[factor], tuple([place[u] for u in self._scopes[factor]]))
            for factor in self._larger[v]
        ])  # fmt: skip
        return self._tables.summed(key, tuple([self._sizes[u] for u in place]), larger)

    def _relax(self, v: int) -> list[tuple[Scope, int]]:
        """Minimise each factor over ``v`` on its own; return those factors."""
        factors = [((v,), self._own[v]), *[((v, u), table) for u, table in self._pairs[v].items()]]
        factors = [(scope, table) for scope, table in factors if table != NONE]
        factors += [(self._scopes[factor], self._table_of[factor]) for factor in self._larger[v]]
        self._drop(v)
        for scope, table in factors:
            axis = scope.index(v)
            self._add(scope[:axis] + scope[axis + 1 :], self._tables.least(table, axis))
        self._queue(self._pairs[v])
        return factors

    def _drop(self, v: int) -> None:
        """Take a variable and its factors out."""
        self._free[v] = False
        for factor in self._larger[v]:
            for u in self._scopes[factor]:
                if u != v:
                    del self._larger[u][factor]
        pairs, entries, size = self._pairs, self._entries, self._sizes[v]
        for u in pairs[v]:
            del pairs[u][v]
            entries[u] //= size

    def _take(self, factors: Collection[tuple[Scope, Table]]) -> None:
        """Add the factors of the problem, without the variables that are chosen already."""
        number_of, is_free = self._tables.number, self._free.__getitem__
        for scope, table in factors:
            number = number_of(table)
            if not all(map(is_free, scope)):
                where = tuple([None if is_free(v) else self._choices[v] for v in scope])
                scope = tuple(filter(is_free, scope))
                number = self._tables.part(number, where)
            self._add(scope, number)

    def _add(self, scope: Sequence[int], table: int) -> None:
        tables = self._tables
        if len(scope) == 1:
            (v,) = scope
            self._own[v] = tables.plus(self._own[v], table)
        elif len(scope) == 2:
            a, b = scope
            of_a = self._pairs[a]
            if b in of_a:
                table = tables.plus(of_a[b], table)
            else:
                self._entries[a] *= self._sizes[b]
                self._entries[b] *= self._sizes[a]
            of_a[b], self._pairs[b][a] = table, tables.turned(table)
        elif scope:
            self._add_larger(tuple(scope), table)
        else:
            self._bound += tables.value(table)

    def _add_larger(self, scope: Scope, table: int) -> None:
        factor = len(self._scopes)
        self._scopes.append(scope)
        self._table_of.append(table)
        for v in scope:
            self._larger[v][factor] = None
            for u in scope:
                if u != v and u not in self._pairs[v]:
                    self._pairs[v][u] = NONE
                    self._entries[v] *= self._sizes[u]


# -- min-sum by variable elimination: many variables with few choices each -------------------------

#: Entries of the largest table: 3 MiB.
TABLE_CAP = 400_000
#: The local search after conditioning ends when a sweep changes nothing, which it does early.
_SWEEPS = 20


class Infeasible(ValueError):
    """Problem in which no choices have a finite cost."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Minimisation of a sum of factors over ``0 <= choice < sizes[v]`` of each variable ``v``.

    Whole numbers below 2**53 as costs make every sum, and so the solution, exact.
    """

    sizes: Sequence[int]
    factors: Sequence[tuple[Scope, Table]]


@dataclass(frozen=True, slots=True)
class Solution:
    """Choices, and their quality.

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
        """Part of the cost, from 0 to 1, that a better solution could save at most."""
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def solve(problem: Problem, cap: int = TABLE_CAP) -> Solution:
    """Return the cheapest choices; where the cap forbids it, good ones and a lower bound.

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
    """Return the cost of these choices."""
    return float(sum(table.item(*[choices[v] for v in scope]) for scope, table in problem.factors))


def _check(problem: Problem) -> None:
    sizes = problem.sizes
    if min(sizes, default=1) < 1:
        raise ValueError(f"variable {sizes.index(min(sizes))} has no choices")
    size_of = sizes.__getitem__
    for number, (scope, table) in enumerate(problem.factors):
        shape = tuple(map(size_of, scope))
        if table.shape != shape or (len(scope) > 1 and len({*scope}) < len(scope)):
            raise ValueError(
                f"factor {number} has a table of shape {table.shape} for the variables {scope}, "
                f"which have {[*shape]} choices"
            )


def _improved(problem: Problem, choices: Sequence[int]) -> list[int]:
    """Change one variable at a time for as long as that saves something (coordinate descent)."""
    touching: list[list[tuple[Scope, Table]]] = [[] for _ in problem.sizes]
    for scope, table in problem.factors:
        for v in scope:
            touching[v].append((scope, table))
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


def _costs(
    v: int, size: int, factors: Iterable[tuple[Scope, Table]], choices: Sequence[int]
) -> Table:
    """Return the cost of each choice of one variable while all others stay."""
    total = np.zeros(size)
    for scope, table in factors:
        total += table[tuple([slice(None) if u == v else choices[u] for u in scope])]
    return total
