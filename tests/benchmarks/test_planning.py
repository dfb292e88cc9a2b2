"""Planning for 1,024 ranks: what is done grows with the program, and not with the ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import planning
from lazygt.graph.node import Graph
from lazygt.runtime.plan import Plan
from tests.support.timeouts import DEEP

pytestmark = pytest.mark.timeout(120)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_1024_ranks_have_the_plans_of_four(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    init = Plan.__init__

    def counted(self: Plan, *args: object, **kwargs: object) -> None:
        counts["plans"] += 1
        init(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Plan, "__init__", counted)
    done = []
    for mesh in ("data=16,model=8,stage=4", planning.MESH):
        counts.clear()
        figures = planning.measured(4, microbatches, mesh)
        assert figures.classes == 4
        assert figures.json_bytes < planning.JSON_BYTES
        done.append((figures.nodes, figures.planned, dict(counts)))
    assert done[0] == done[1]


def test_a_prediction_lists_the_values_of_a_graph_as_often_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would be quadratic in the nodes."""
    listed: list[int] = []
    values = Graph.values.fget  # type: ignore[attr-defined]
    predict = planning.predict
    within = [False]

    def counted(self: Graph) -> object:
        listed[-1] += within[0] and len(self.nodes) > 100
        return values(self)

    def predicted(*args: object) -> object:
        within[0] = True
        try:
            return predict(*args)  # type: ignore[arg-type]
        finally:
            within[0] = False

    monkeypatch.setattr(Graph, "values", property(counted))
    monkeypatch.setattr(planning, "predict", predicted)
    for layers in (4, 8) if DEEP else (3, 6):
        listed.append(0)
        planning.measured(layers, 1, "data=2,model=2,stage=2")
    assert listed[0] == listed[1] > 0
