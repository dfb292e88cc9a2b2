"""Min-sum variable elimination (bucket elimination) for many variables with few choices each.

A problem is a sum of cost tables (factors), each over few variables. Eliminating a variable adds up
the tables over it and minimises the sum over it, which leaves one table over its neighbours. The
variable with the smallest sum goes first (ties by number, so that equal problems have equal
solutions). Tables are interned by content, so that the elimination of the tenth identical layer is
a dictionary look-up.

Where a table would grow past a cap, the neighbour with the most neighbours is *conditioned on*: its
tables are relaxed (each is minimised over it separately, as in mini-bucket elimination, which gives
a lower bound), its choice is made at the end, and the other variables are then solved exactly for
that choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# -- cost tables, interned by content, with cached results -----------------------------------------

Table = npt.NDArray[np.float64]
Scope = tuple[int, ...]


class Factor(NamedTuple):
    """Costs of the joint choices of some variables."""

    scope: Scope  # the variables, each once
    #: costs, with one axis for each variable of the scope, in order; infinity forbids a choice.
    #: Equal tables should be one array, which makes their comparison fast.
    table: Table


#: Number of the absent table, in which all costs are 0.
NONE = -1


class Summed(NamedTuple):
    """Sum of tables, minimised over its first variable."""

    table: int  # number of the table of minima minus ``shift``; NONE where all minima are equal
    shift: float  # the smallest minimum
    best: npt.NDArray[np.intp]  # the first choice (argmin) that attains each minimum


class CostTables:
    """Interned tables: one number for each content, with cached results of operations.

    Attributes:
        computed: number of table entries of the sums that were computed, not found in the cache.
    """

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._of_array: dict[int, int] = {}
        self._slices: dict[tuple[object, ...], int] = {}
        self._transposes: dict[int, int] = {NONE: NONE}
        self._pair_sums: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[object, ...], Summed] = {}
        self.computed = 0

    def number(self, table: Table) -> int:
        """Intern a table that outlives this object; return its number."""
        number = self._of_array.get(id(table))
        if number is None:
            number = self._of_array[id(table)] = self._intern(table)
        return number

    def sliced(self, table: int, indices: tuple[int | None, ...]) -> int:
        """Return the number of a slice of a table.

        Args:
            indices: for each axis an index, or None to retain the axis.
        """
        key = ("part", table, indices)
        if key not in self._slices:
            index = tuple(slice(None) if index is None else index for index in indices)
            self._slices[key] = self._intern(self._tables[table][index])
        return self._slices[key]

    def minima(self, table: int, axis: int) -> int:
        """Return the number of the table of minima over one axis."""
        key = ("least", table, axis)
        if key not in self._slices:
            self._slices[key] = self._intern(self._tables[table].min(axis=axis))
        return self._slices[key]

    def transposed(self, table: int) -> int:
        """Return the number of the transpose of a table of two axes."""
        number = self._transposes.get(table)
        if number is None:
            number = self._transposes[table] = self._intern(self._tables[table].T)
            self._transposes[number] = table
        return number

    def add(self, a: int, b: int) -> int:
        """Return the number of the sum of two tables with the same axes."""
        if a == NONE:
            return b
        number = self._pair_sums.get((a, b))
        if number is None:
            number = self._pair_sums[a, b] = self._intern(self._tables[a] + self._tables[b])
        return number

    def value(self, table: int) -> float:
        """Return the only entry of a table without axes."""
        return self._tables[table].item()

    def table(self, number: int) -> Table:
        """Return a table by its number."""
        return self._tables[number]

    def summed(
        self, tables: tuple[int, ...], shape: Scope = (), larger: tuple[tuple[int, Scope], ...] = ()
    ) -> Summed:
        """Add tables up and minimise the sum over axis 0.

        Args:
            tables: the table of axis 0 alone, then the table of axis 0 and each other axis.
            shape: of the sum, where the tables do not determine it.
            larger: (table, for each of its axes the axis of the sum).
        """
        key = (tables, shape, larger) if shape else tables
        summed = self._sums.get(key)
        if summed is None:
            summed = self._sums[key] = self._sum(tables, shape, larger)
        return summed

    def _sum(
        self, tables: tuple[int, ...], shape: Scope, larger: Iterable[tuple[int, Scope]]
    ) -> Summed:
        """Compute ``summed``: broadcast each table to the shape of the sum, add, minimise."""
        terms = [(tables[0], (0,)), *[(t, (0, axis)) for axis, t in enumerate(tables[1:], 1)]]
        terms = [(number, axes) for number, axes in terms if number != NONE]
        if not shape:
            sizes = [self._tables[number].shape for number, _ in terms] or [(1,)]
            shape = sizes[0][0], *[size[1] for size in sizes if len(size) > 1]
        total = np.zeros(shape)
        for number, axes in (*terms, *larger):
            order = sorted(range(len(axes)), key=axes.__getitem__)
            broadcast_shape = [1] * len(shape)
            for axis in axes:
                broadcast_shape[axis] = shape[axis]
            total += self._tables[number].transpose(order).reshape(broadcast_shape)
        self.computed += total.size
        minima = total.min(axis=0)
        shift = float(minima.min())
        if math.isfinite(shift):
            minima = minima - shift
        is_constant = not minima.ndim or not minima.any()
        return Summed(NONE if is_constant else self._intern(minima), shift, total.argmin(axis=0))

    def _intern(self, table: Table) -> int:
        """Return the number of a table by its content."""
        key = table.shape, table.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return number


# -- one run of variable elimination ---------------------------------------------------------------
# Every variable is eliminated once, then choices are made in reverse order. All tables over one
# pair of variables are one sum, and so are those over one variable. So the cache key of an
# elimination is short: the number of the variable's own table, and of the table with each
# neighbour, in the order of the neighbours.


@dataclass(frozen=True, slots=True)
class Eliminated:
    """Choices for every variable."""

    choices: list[int]
    bound: float  # lower bound of the cost; the exact cost if nothing was relaxed
    relaxed: tuple[int, ...]  # the variables conditioned on, in order


#: (eliminated variable, its neighbours, its best choice for each joint choice of theirs).
_Argmin = tuple[int, Sequence[int], npt.NDArray[np.intp]]


class _Conditioned(NamedTuple):
    """Relaxed variable, with the factors over it at that time, as (scope, table number)."""

    variable: int
    factors: list[tuple[Scope, int]]


class Elimination:
    """Elimination of every variable of a problem, once.

    Args:
        sizes: the number of choices of each variable.
        cap: most entries of a summed table; a neighbour is relaxed where there would be more.
        fixed: variable -> its choice, which is made already.

    Attributes:
        width: most neighbours of an eliminated variable (induced width).
        entries: number of entries of all summed tables.
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
        #: for each variable the number of the table over it alone
        self._unary_tables = [NONE] * len(sizes)
        #: for each variable: neighbour -> table over the two, with the variable's axis first
        self._pair_tables: list[dict[int, int]] = [{} for _ in sizes]
        #: for each variable the factors over it and two or more others
        self._larger_factors: list[dict[int, None]] = [{} for _ in sizes]
        self._scopes: list[Scope] = []
        self._table_of: list[int] = []
        #: for each variable the entries of its summed table, now and when it was last queued
        self._entries, self._queued = list(sizes), [0] * len(sizes)
        #: (entries << bits | variable): variables ordered by the entries of their summed tables
        self._heap: list[int] = []
        self._bits = len(sizes).bit_length()
        self._add_factors(factors)

    @property
    def computed(self) -> int:
        """Number of table entries that were computed, not found in the cache."""
        return self._tables.computed

    def run(self) -> Eliminated:
        """Choose for every variable; the choices are meaningless if the bound is infinite."""
        steps: list[_Argmin | _Conditioned] = []
        self._queue([v for v, free in enumerate(self._free) if free])
        waiting, free, current = self._heap, self._free, self._entries
        bits, mask = self._bits, (1 << self._bits) - 1
        while waiting:
            item = heapq.heappop(waiting)
            v = item & mask
            if not free[v] or item >> bits != current[v]:
                continue
            while current[v] > self._cap and self._pair_tables[v]:
                neighbour = max(self._pair_tables[v], key=lambda u: (len(self._pair_tables[u]), -u))
                steps.append(_Conditioned(neighbour, self._relax(neighbour)))
            steps.append(self._eliminate(v))
        choices = self._choices
        choice = choices.__getitem__
        for step in reversed(steps):
            if isinstance(step, _Conditioned):
                tables = [(scope, self._tables.table(number)) for scope, number in step.factors]
                v = step.variable
                choices[v] = int(_choice_costs(v, self._sizes[v], tables, choices).argmin())
            else:
                v, neighbours, best = step
                choices[v] = best.item(*map(choice, neighbours))
        relaxed = tuple([step.variable for step in steps if isinstance(step, _Conditioned)])
        return Eliminated(choices, self._bound, relaxed)

    def _queue(self, variables: Collection[int]) -> None:
        """Push variables to the heap, by the entries of their summed tables."""
        queued, bits = self._queued, self._bits
        for v in variables:
            entries = self._entries[v]
            if entries != queued[v]:
                queued[v] = entries
                heapq.heappush(self._heap, entries << bits | v)

    def _eliminate(self, v: int) -> _Argmin:
        """Eliminate a variable: sum the tables over it, minimise, and add the table of minima."""
        pairs, tables = self._pair_tables[v], self._tables
        neighbours = sorted(pairs)
        key = self._unary_tables[v], *[pairs[u] for u in neighbours]
        if self._scopes and (self._larger_factors[v] or NONE in key[1:]):
            table, shift, best = self._summed_with_larger(v, neighbours, key)
        else:
            table, shift, best = tables.summed(key)
        self._remove(v)
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
        """Return the minimised sum where some factors have more than two variables."""
        axis_of = {u: axis for axis, u in enumerate((v, *neighbours))}
        larger = tuple([
            (self._table_of[factor], tuple([axis_of[u] for u in self._scopes[factor]]))
            for factor in self._larger_factors[v]
        ])  # fmt: skip
        return self._tables.summed(key, tuple([self._sizes[u] for u in axis_of]), larger)

    def _relax(self, v: int) -> list[tuple[Scope, int]]:
        """Minimise each factor over ``v`` separately and remove ``v``; return the factors.

        A sum of minima is at most the minimum of the sum, so the rest of the problem has a lower
        bound of the cost as its optimum (mini-bucket elimination).
        """
        factors = [
            ((v,), self._unary_tables[v]),
            *[((v, u), table) for u, table in self._pair_tables[v].items()],
        ]
        factors = [(scope, table) for scope, table in factors if table != NONE]
        factors += [
            (self._scopes[factor], self._table_of[factor]) for factor in self._larger_factors[v]
        ]
        self._remove(v)
        for scope, table in factors:
            axis = scope.index(v)
            self._add(scope[:axis] + scope[axis + 1 :], self._tables.minima(table, axis))
        self._queue(self._pair_tables[v])
        return factors

    def _remove(self, v: int) -> None:
        """Remove a variable and its factors."""
        self._free[v] = False
        for factor in self._larger_factors[v]:
            for u in self._scopes[factor]:
                if u != v:
                    del self._larger_factors[u][factor]
        pairs, entries, size = self._pair_tables, self._entries, self._sizes[v]
        for u in pairs[v]:
            del pairs[u][v]
            entries[u] //= size

    def _add_factors(self, factors: Collection[tuple[Scope, Table]]) -> None:
        """Add the factors of the problem, restricted to the choices that are made already."""
        number_of, is_free = self._tables.number, self._free.__getitem__
        for scope, table in factors:
            number = number_of(table)
            if not all(map(is_free, scope)):
                indices = tuple([None if is_free(v) else self._choices[v] for v in scope])
                scope = tuple(filter(is_free, scope))
                number = self._tables.sliced(number, indices)
            self._add(scope, number)

    def _add(self, scope: Sequence[int], table: int) -> None:
        """Add a factor to the tables of its variables."""
        tables = self._tables
        if len(scope) == 1:
            (v,) = scope
            self._unary_tables[v] = tables.add(self._unary_tables[v], table)
        elif len(scope) == 2:
            a, b = scope
            neighbours_of_a = self._pair_tables[a]
            if b in neighbours_of_a:
                table = tables.add(neighbours_of_a[b], table)
            else:
                self._entries[a] *= self._sizes[b]
                self._entries[b] *= self._sizes[a]
            neighbours_of_a[b], self._pair_tables[b][a] = table, tables.transposed(table)
        elif scope:
            self._add_larger(tuple(scope), table)
        else:
            self._bound += tables.value(table)

    def _add_larger(self, scope: Scope, table: int) -> None:
        """Add a factor over three or more variables, which makes each two of them neighbours."""
        factor = len(self._scopes)
        self._scopes.append(scope)
        self._table_of.append(table)
        for v in scope:
            self._larger_factors[v][factor] = None
            for u in scope:
                if u != v and u not in self._pair_tables[v]:
                    self._pair_tables[v][u] = NONE
                    self._entries[v] *= self._sizes[u]


# -- min-sum problems and their solution -----------------------------------------------------------

#: Entries of the largest table: 3 MiB.
TABLE_CAP = 400_000
#: Most sweeps of the local search after conditioning; most searches end after few.
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
    """Choices, and their quality."""

    choices: tuple[int, ...]  # one for each variable
    cost: float  # the sum of the factors at the choices
    bound: float  # lower bound of the cost of all choices
    exact: bool  # whether nothing was conditioned on; then cost equals bound
    width: int  # most neighbours of an eliminated variable (induced width)
    entries: int  # number of table entries of all eliminations
    computed: int  # number of these entries that were computed, not found in the cache
    conditioned: tuple[int, ...] = ()  # the variables conditioned on, in order

    @property
    def gap(self) -> float:
        """Relative optimality gap: (cost - bound) / cost, from 0 to 1."""
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


def solve(problem: Problem, cap: int = TABLE_CAP) -> Solution:
    """Return the cheapest choices; where the cap forbids that, good ones and a lower bound.

    Args:
        cap: most entries of a summed table.

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
        # the choices were for the relaxed problem: eliminate again with the relaxed variables fixed
        fixed = {v: choices[v] for v in eliminated.relaxed}
        again = Elimination(problem.sizes, problem.factors, cap, fixed).run()
        better = min((choices, again.choices), key=lambda candidate: evaluate(problem, candidate))
        choices = _coordinate_descent(problem, better)
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
    """Raise ValueError for a variable without choices, or a table of another shape than due."""
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


def _coordinate_descent(problem: Problem, choices: Sequence[int]) -> list[int]:
    """Improve choices by coordinate descent: change one variable at a time while that saves."""
    factors_of: list[list[tuple[Scope, Table]]] = [[] for _ in problem.sizes]
    for scope, table in problem.factors:
        for v in scope:
            factors_of[v].append((scope, table))
    current = list(choices)
    for _ in range(_SWEEPS):
        changed = False
        for v, factors in enumerate(factors_of):
            costs = _choice_costs(v, problem.sizes[v], factors, current)
            best = int(costs.argmin())
            if costs[best] < costs[current[v]]:
                current[v], changed = best, True
        if not changed:
            break
    return current


def _choice_costs(
    v: int, size: int, factors: Iterable[tuple[Scope, Table]], choices: Sequence[int]
) -> Table:
    """Return the cost of each choice of one variable, with all other choices fixed."""
    total = np.zeros(size)
    for scope, table in factors:
        total += table[tuple([slice(None) if u == v else choices[u] for u in scope])]
    return total
