"""Placements of programs that view two dims as one, of which the second is cut."""

from __future__ import annotations

import pytest

from lazygt.graph.placement import Shard, StridedShard
from lazygt.passes.sharding.choose.solver import solve
from lazygt.passes.sharding.marks import Annotation
from tests.passes.sharding.placements import collectives, question_of
from tests.passes.tools import graph_of

S = Shard

ROWS = """
    %0: f32[10, 64, 1024] = input
    %1: f32[1024, 1024] = input
    %2: f32[640, 1024] = aten.view.default(%0, [640, 1024])
    %3: f32[640, 1024] = aten.mm.default(%2, %1)
    %4: f32[640, 1024] = aten.gelu.default(%3)
    %5: f32[10, 64, 1024] = aten.view.default(%4, [10, 64, 1024])
    return %5
    """


def test_rows_of_a_view_stay_where_they_are() -> None:
    graph, annotations = graph_of(ROWS), {0: Annotation(S(1))}
    question = question_of(graph, annotations, outputs=[[S(1)]])
    solution = solve(question.problem)
    assert solution.exact
    assert collectives(graph, question, solution, annotations, [[S(1)]]) == []
    assert [str(row) for row in question.strategies(solution)] == [
        "(S(1)) -> (S(0/10))",
        "(S(0/10), R) -> (S(0/10))",
        "(S(0/10)) -> (S(0/10))",
        "(S(0/10)) -> (S(1))",
    ]


@pytest.mark.parametrize("explore", [False, True])
def test_no_row_is_interleaved_where_nothing_is_cut_so(explore: bool) -> None:
    question = question_of(graph_of(ROWS), {0: Annotation(S(2))}, explore=explore)
    placements = {
        placement
        for entry in question.entries
        for row in entry.strategies
        for placement in (*row.inputs, *row.outputs)
    }
    assert S(1) in placements
    assert not any(isinstance(placement, StridedShard) for placement in placements)
