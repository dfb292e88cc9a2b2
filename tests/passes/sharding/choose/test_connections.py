"""Chains of a graph, and how many tables connect its variables."""

from __future__ import annotations

from lazygt.graph.liveness import def_use
from lazygt.graph.placement import Replicate
from tests.passes.sharding.placements import question_of
from tests.passes.tools import graph_of

TWICE = """
    %0: f32[8, 8] = input
    %1: f32[8, 8] = aten.mm.default(%0, %0)
    %2: f32[8, 8], %3: i64[8, 8] = aten.sort.default(%1)
    %4: f32[8, 8] = aten.add.Tensor(%2, %1)
    return %4
    """


def test_def_use_chains_list_makers_and_users() -> None:
    chains = def_use(graph_of(TWICE))
    assert chains.producers == [None, (0, 0), (1, 0), (1, 1), (2, 0)]
    assert chains.users == [{0: (0, 1)}, {1: (0,), 2: (1,)}, {2: (0,)}, {}, {}]
    assert [refs for _, refs, _ in chains.nodes] == [(0, 0), (1,), (2, 1)]


def test_a_pair_of_variables_has_one_table() -> None:
    """A chain of ten ops is nine tables: a node's own time is in the table with its user."""
    lines = [f"%{n + 1}: f32[512, 512] = aten.relu.default(%{n})" for n in range(10)]
    graph = graph_of("\n".join(["%0: f32[512, 512] = input", *lines, "return %10"]))
    problem = question_of(graph, explore=True, outputs=[[Replicate()]]).problem
    scopes = [scope for scope, _ in problem.factors]
    assert [scope for scope in scopes if len(scope) == 2] == [(n, n + 1) for n in range(9)]
    # what costs the same in any case, and how the last result is wanted
    assert [scope for scope in scopes if len(scope) < 2] == [(), (9,)]
