"""The solver against brute force, and the cost of solving counted in table entries."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from lazygt.passes.sharding.choose.solver import Factor, Problem, Solution, evaluate, solve


def brute_force(problem: Problem) -> float:
    joint = itertools.product(*map(range, problem.sizes))
    return min(evaluate(problem, choices) for choices in joint)


def random_problem(seed: int, variables: int = 7, forbidden: float = 0.0) -> Problem:
    """Factors over one to three variables with whole-number costs."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, variables))]
    factors = []
    for _ in range(draw.randint(0, 2 * len(sizes))):
        scope = tuple(draw.sample(range(len(sizes)), draw.randint(1, min(3, len(sizes)))))
        shape = [sizes[v] for v in scope]
        costs = [math.inf if draw.random() < forbidden else draw.randint(0, 9)
                 for _ in range(math.prod(shape))]  # fmt: skip
        factors.append(Factor(scope, np.array(costs, dtype=float).reshape(shape)))
    return Problem(sizes, factors)


def ladder(rungs: int) -> Problem:
    """The same four-variable region again and again, coupled to the next one by two edges.

    0 ── 2 ── 0'
    │ x  │ x
    1 ── 3 ── 1'
    """
    draw = np.random.default_rng(0)
    edges = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 4), (3, 5)]
    tables = [draw.integers(0, 100, (5, 5)).astype(float) for _ in edges]
    factors = [
        Factor((4 * rung + a, 4 * rung + b), table)
        for rung in range(rungs)
        for (a, b), table in zip(edges, tables, strict=True)
        if 4 * rung + max(a, b) < 4 * rungs
    ]
    return Problem([5] * (4 * rungs), factors)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_equals_brute_force(first: int) -> None:
    for seed in range(first, first + 100):
        problem = random_problem(seed)
        found = solve(problem)
        assert found.exact
        assert found.cost == found.bound == evaluate(problem, found.choices)
        assert found.cost == brute_force(problem), f"seed {seed}: {problem}"


def test_forbidden_choices_are_not_made() -> None:
    feasible = 0
    for seed in range(300):
        problem = random_problem(seed, forbidden=0.3)
        least = brute_force(problem)
        if math.isinf(least):
            with pytest.raises(ValueError, match="contradict each other"):
                solve(problem)
        else:
            assert solve(problem).cost == least
            feasible += 1
    assert 50 < feasible < 300


@pytest.mark.parametrize("cap", [1, 4, 16, 64])
def test_under_a_cap_the_optimum_lies_between_bound_and_cost(cap: int) -> None:
    inexact = optimal = 0
    for seed in range(200):
        problem = random_problem(seed)
        found, least = solve(problem, cap=cap), brute_force(problem)
        assert found.bound <= least <= found.cost == evaluate(problem, found.choices)
        assert found.exact == (not found.conditioned)
        assert 0 <= found.gap <= 1
        if found.exact:
            assert found.cost == least
        else:
            inexact += 1
            optimal += found.cost == least
    assert inexact > (0 if cap == 64 else 40)
    assert optimal > 0.6 * inexact


def test_a_large_cap_changes_nothing() -> None:
    problem = ladder(6)
    assert solve(problem) == solve(problem, cap=10**9)


def test_equal_problems_are_solved_alike() -> None:
    for seed in range(50):
        ours, theirs = random_problem(seed), random_problem(seed)
        assert solve(ours) == solve(theirs)
        assert solve(ours, cap=4) == solve(theirs, cap=4)


def test_ties_go_to_the_first_choice() -> None:
    flat = Factor((0, 1), np.zeros((3, 3)))
    assert solve(Problem([3, 3, 2], [flat])).choices == (0, 0, 0)


def test_shared_arrays_and_equal_arrays_are_the_same() -> None:
    shared = ladder(5)
    copied = Problem(shared.sizes, [Factor(s, t.copy()) for s, t in shared.factors])
    assert solve(shared) == solve(copied)


def counts(rungs: int) -> Solution:
    found = solve(ladder(rungs))
    assert found.exact
    return found


def test_entries_grow_in_step_with_the_problem() -> None:
    small, large = counts(50), counts(500)
    assert small.width == large.width == 3
    assert large.entries < 10.5 * small.entries
    assert large.entries <= 4 * 500 * 5**4


def test_identical_regions_are_computed_once() -> None:
    small, large = counts(50), counts(500)
    assert large.computed == small.computed < small.entries
    assert large.cost - small.cost == pytest.approx(9 * small.cost, rel=0.2)


def test_trivial_problems_are_solved() -> None:
    empty = solve(Problem([], []))
    assert (empty.choices, empty.cost, empty.exact, empty.gap) == ((), 0.0, True, 0.0)
    only = solve(Problem([1, 1], [Factor((0, 1), np.array([[7.0]]))]))
    assert (only.choices, only.cost, only.entries) == ((0, 0), 7.0, 0)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem([2, 0], []), "variable 1 has no choices"),
        (Problem([2], [Factor((0,), np.zeros(3))]), "factor 0 has a table of shape"),
        (Problem([2], [Factor((0, 0), np.zeros((2, 2)))]), "factor 0 has a table of shape"),
    ],
)
def test_a_malformed_problem_is_refused(problem: Problem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(problem)
