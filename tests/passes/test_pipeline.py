"""The passes together: their order, what each leaves to the next, and who is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lazygt
from lazygt.errors import GraphError
from lazygt.graph import Graph, Ref
from lazygt.graph.node import Node
from lazygt.passes import PIPELINE, run_passes
from lazygt.passes.base import rebuild, rows_of
from lazygt.passes.cse import CommonSubexpressions, DeadCode
from lazygt.passes.fold import Fold
from tests.passes.tools import difference, graph_of, same_numbers

TIDY = (Fold(), CommonSubexpressions(), DeadCode())

# %0 ──ones_like──> %1 ──mul──> %2 ──exp──> %3 ──┐      fold: %2 is %0
#  │                 %0 ─┘                       mul     cse:  then %4 is %3
#  └──exp──> %4 ────────────────────────────────┘        dce:  then nobody reads %1
WORK_FOR_ALL = """
    %0: f32[4] = input
    %1: f32[4] = aten.ones_like.default(%0)
    %2: f32[4] = aten.mul.Tensor(%1, %0)
    %3: f32[4] = aten.exp.default(%2)
    %4: f32[4] = aten.exp.default(%0)
    %5: f32[4] = aten.mul.Tensor(%3, %4)
    return %5
    """


class Broken:
    """Forgets a node, and leaves the numbers as they were."""

    name = "broken"

    def run(self, graph: Graph) -> Graph:
        return replace(graph, nodes=graph.nodes[:-1])


class Backwards:
    """Puts the last node first."""

    name = "backwards"

    def run(self, graph: Graph) -> Graph:
        rows = rows_of(graph)
        return rebuild(graph, [rows[-1], *rows[:-1]])


def test_the_first_three_tidy_up_for_the_rest() -> None:
    assert [one.name for one in PIPELINE[:3]] == [one.name for one in TIDY]
    assert len({one.name for one in PIPELINE}) == len(PIPELINE)


def test_each_pass_sees_result_of_previous_passes() -> None:
    stages: list[tuple[str, Graph]] = []
    graph = graph_of(WORK_FOR_ALL)
    made = run_passes(graph, TIDY, check=True, stages=stages)
    wanted = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = aten.exp.default(%0)
  %2: f32[4] = aten.mul.Tensor(%1, %1)
  return %2
}"""
    assert str(made) == wanted, difference(wanted, str(made))
    assert [(name, len(stage.nodes)) for name, stage in stages] == [
        ("fold", 4),
        ("cse", 3),
        ("dce", 2),
    ]
    assert stages[-1][1] is made
    same_numbers(graph, made)


def test_other_pass_orders_leave_nodes() -> None:
    fold, cse, dce = TIDY
    for order in ((cse, fold, dce), (dce, fold, cse)):
        assert len(run_passes(graph_of(WORK_FOR_ALL), order).nodes) > 2


def test_pipeline_without_changes_returns_same_graph() -> None:
    graph = graph_of("%0: f32[4] = input\n%1: f32[4] = aten.sum.default(%0)\nreturn %1")
    assert run_passes(graph, PIPELINE, check=True) is graph


def test_an_empty_graph_passes() -> None:
    graph = Graph((), (), (), ())
    assert run_passes(graph, PIPELINE, check=True) == graph


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((*TIDY, Broken()), r"after pass broken \(before it: fold, cse, dce\): output %2"),
        ((Broken(), *TIDY), r"after pass broken \(before it: no other pass\): output %5"),
        ((TIDY[0], Broken()), r"after pass broken \(before it: fold\): output %4"),
    ],
)
def test_the_verifier_names_the_pass_and_those_before_it(passes: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        run_passes(graph_of(WORK_FOR_ALL), passes, check=True)  # type: ignore[arg-type]


def test_verifier_names_pass_and_node() -> None:
    message = r"after pass backwards .*: node 0 \(aten.mul.Tensor\) reads %\d, which is not defined"
    with pytest.raises(GraphError, match=message):
        run_passes(graph_of(WORK_FOR_ALL), (Backwards(),), check=True)


def test_without_a_check_nothing_is_verified() -> None:
    made = run_passes(graph_of(WORK_FOR_ALL), (Broken(),))
    assert len(made.nodes) == 4


def test_a_wrong_pass_is_seen_by_the_numbers() -> None:
    """What no verifier sees: the graph is sound, but it computes something else."""

    class Wrong:
        name = "wrong"

        def run(self, graph: Graph) -> Graph:
            last = graph.nodes[-1]
            add = Node("aten.add.Tensor", last.args, last.kwargs, last.fresh)
            return replace(graph, nodes=(*graph.nodes[:-1], add))

    graph = graph_of(WORK_FOR_ALL)
    made = run_passes(graph, (Wrong(),), check=True)
    with pytest.raises(AssertionError, match="output 0"):
        same_numbers(graph, made)


def test_a_pass_that_swaps_two_draws_is_seen_by_the_numbers() -> None:
    text = "%0: f32[4] = input\n{0}\n{1}\nreturn %1, %2"
    rand, randn = "aten.rand_like.default(%0)", "aten.randn_like.default(%0)"
    graph = graph_of(text.format(f"%1: f32[4] = {rand}", f"%2: f32[4] = {randn}"))
    swapped = rebuild(graph, list(reversed(rows_of(graph))))
    with pytest.raises(AssertionError, match="output 0"):
        same_numbers(graph, swapped)


def test_lines_follow_their_nodes() -> None:
    rows = [row.strip() for row in WORK_FOR_ALL.strip().splitlines()]
    marked = [f"{row}  # a.py:{n}" if "aten" in row else row for n, row in enumerate(rows)]
    made = run_passes(graph_of("\n".join(marked)), TIDY)
    assert made.lines == ("a.py:3", "a.py:5")
    assert made.origins == (2, 4)
    assert made.nodes[1].args == (Ref(1), Ref(1))


def test_a_session_runs_the_pipeline_and_keeps_its_stages() -> None:
    with lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as s:
        x = torch.arange(4.0)
        s.flush()
        y = (torch.ones_like(x) * x).exp() * x.exp()
        s.flush()
        stages = s.stages(s.last_plan)
        assert [name for name, _ in stages] == ["recorded", *(one.name for one in PIPELINE)]
        assert len(stages[0][1].nodes) == 5
        assert len(dict(stages)["dce"].nodes) == 2
        assert stages[-1][1] == s.last_plan.graph
        assert y.tolist() == (x.cpu().exp() * x.cpu().exp()).tolist()
