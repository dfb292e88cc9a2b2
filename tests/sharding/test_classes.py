"""Ranks that run the same are planned once: each has the plan that it would get alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.passes import overlap, pipeline
from lazygt.passes.base import same
from lazygt.passes.sharding import axis, programs
from lazygt.passes.sharding.lower import partition as local_programs
from lazygt.runtime.plan import Plan
from tests.sharding.random_programs import recorded as recorded_at_random
from tests.sharding.random_programs import stored_at_random
from tests.sharding.staged import MLP, StagedGPT, recorded
from tests.sharding.steps import PROGRAMS, SHAPES, ShardStep, Step, accepted

pytestmark = pytest.mark.timeout(300)

Change = Callable[[Graph], Any]


_choices = axis._choices


def choices_of_each(
    along: axis._Axis, graphs: Sequence[Graph], wanted: Any, exchange_replicated: bool = False
) -> Any:
    """Choose as ``axis`` does, but ask a graph equal to the first what the first is asked.

    Others are asked for the first one's outputs, for which there may be a better choice.
    """
    choices, local = _choices(along, graphs, wanted, exchange_replicated)
    for number, graph in enumerate(graphs):
        if same(graph, graphs[0]):
            choices[number] = along.choice(graph, wanted, exchange_replicated)
    return choices, local


@contextmanager
def every_rank_alone() -> Iterator[None]:
    """Nothing that is made for one rank is used for another."""

    def partitioned(self: Any, graph: Graph, choice: Any, wanted: Any, _: Any) -> list[Any]:
        return [self.local(graph, choice, wanted, index) for index in range(self.axis_size)]

    def by_rank(change: Change, graphs: Sequence[Graph]) -> list[Any]:
        return [change(graph) for graph in graphs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axis._Axis, "partitioned", partitioned)
        patch.setattr(axis, "_choices", choices_of_each)
        for module in (axis, programs, overlap, pipeline):
            for name, instead in (("by_class", by_rank), ("classes", list), ("classified", list)):
                patch.setattr(module, name, instead, raising=False)
        yield


def plans(graph: Graph, mesh: Mesh, stored: Sequence[Sharding]) -> list[tuple[Any, ...]]:
    """What each rank is sent, and what is told of it."""
    graphs = programs.programs(graph, mesh, stored).graphs
    rows = [(Plan(graph, mesh=mesh), graph.lines, graph.origins) for graph in graphs]
    return [(plan.template.encoded, plan.sizes, *more) for plan, *more in rows]


def agree(graph: Graph, mesh: Mesh, stored: Sequence[Sharding]) -> None:
    by_class = plans(graph, mesh, stored)
    with every_rank_alone():
        alone = plans(graph, mesh, stored)
    assert len(alone) == mesh.world_size
    assert by_class == alone


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (MLP, "data=2,pipe=4"),
        (MLP, "pipe=2,data=2,more=2"),
        pytest.param(StagedGPT, "data=2,pipe=4", marks=pytest.mark.slow),
    ],
)
def test_a_step_in_stages(make: Callable[[], Any], mesh: str) -> None:
    program = recorded(make, mesh, 2)
    agree(program.graph, program.mesh, program.stored)


#: A program whose inner axes have a better choice once its outputs are known.
OUTPUTS_DECIDE = [
    ShardStep("relu", 5, 0, 0.5), ShardStep("sum", 3, 5, 2.0), ShardStep("relu", 0, 3, 2.0),
    ShardStep("index_add", 1, 2, 2.0), ShardStep("embedding", 3, 2, 3.0),
    ShardStep("sort", 1, 5, 2.0), ShardStep("merge_last", 7, 6, 0.5),
    ShardStep("prod", 1, 2, 0.0), ShardStep("cross_entropy", 4, 7, 0.5),
    ShardStep("layer_norm", 7, 7, -1.0), ShardStep("block_", 4, 4, 2.0),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["a=8", "a=2,b=2,c=2"])
@settings(max_examples=settings().max_examples // 4)
@given(program=PROGRAMS, sizes=SHAPES, seed=st.integers(0, 1000))
@example(program=OUTPUTS_DECIDE, sizes=(5, 5, 7), seed=206)
def test_random_program_agrees_over_rank_classes(
    mesh: str, program: list[Step], sizes: tuple[int, ...], seed: int
) -> None:
    """With blocks of unequal sizes, too, where not all ranks are alike."""
    ranks, draw = Mesh.parse(mesh), random.Random(seed)
    graph, inputs, _, _ = recorded_at_random(accepted(program, sizes), sizes, ranks.names)
    agree(graph, ranks, [stored_at_random(t, ranks, draw) for t in inputs])


def test_planning_work_is_independent_of_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    program = recorded(MLP, "data=2,pipe=4", 1)
    for module, name in (
        (axis, "solve"), (axis, "partition"), (local_programs, "Builder"),
        (overlap, "launched"), (pipeline, "split"), (programs, "run_passes"),
    ):  # fmt: skip
        counted(module, name)
    done = []
    for mesh in ("data=2,pipe=4", "data=8,pipe=4"):
        counts.clear()
        graphs = programs.programs(program.graph, Mesh.parse(mesh), program.stored).graphs
        assert len({id(graph) for graph in graphs}) == 4
        done.append(dict(counts))
    assert done[0] == done[1]
    assert done[0]["partition"] == done[0]["solve"] == 1  # axes but that of the stages
    assert done[0]["split"] == 1
    assert done[0]["launched"] == 4
