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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lazygt.passes.sharding.cost_tables import Scope, Table
from lazygt.passes.sharding.elimination import Elimination

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
