"""Random programs with random placements: the numbers, shapes and dtypes of eager torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph import Graph
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import Placement, StridedShard
from lazygt.passes.sharding.choose.catalogue import strided_strategies
from lazygt.passes.sharding.lower.partition import Choice, partition
from lazygt.passes.sharding.marks import without_places
from lazygt.passes.sharding.rules import Strategy, strategies_of
from tests.passes.sharding.rules.blocks import blocks, joined
from tests.passes.sharding.rules.lockstep import AXIS, lockstep
from tests.sharding.random_programs import Tensor, recorded, stored_at_random
from tests.sharding.steps import PROGRAMS, SHAPES, Step, accepted, results, start
from tests.sharding.world import run_sharded

pytestmark = pytest.mark.timeout(600)

MESHES = ("a=2", "a=4", "a=2,b=2")


def eager(program: Sequence[Step], sizes: Sequence[int]) -> list[Tensor]:
    state = start(sizes, "cpu")
    for step in program:
        step.run(state)
    return results(state)


def assert_equal(made: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def check(mesh: str, program: Sequence[Step], sizes: Sequence[int], seed: int) -> None:
    ranks, draw = Mesh.parse(mesh), random.Random(seed)
    graph, inputs, params, places = recorded(program, sizes, ranks.names)
    stored = [stored_at_random(t, ranks, draw) for t in inputs]
    made = run_sharded(graph, ranks, stored, inputs, params)
    expected = eager(program, sizes)
    assert_equal([made[place] for place in places.values()], [expected[n] for n in places])


def any_rows(graph: Graph, parts: int, draw: random.Random) -> list[Strategy]:
    """A row for each node, those that take what was made interleaved among them."""
    metas, chosen = graph.values, []
    made: dict[int, Placement] = {}
    for node, values in graph.numbered():
        rows = strategies_of(node, metas, parts)
        have = [made.get(value) for value in node.refs()]
        more = [
            row
            for place, label in enumerate(have)
            if isinstance(label, StridedShard)
            for row in strided_strategies(node, metas, parts, rows, place, label)
        ]
        chosen.append(draw.choice(more if more and draw.random() < 0.7 else rows))
        made.update(zip(values, chosen[-1].outputs, strict=True))
    return chosen


def check_rows(parts: int, program: Sequence[Step], sizes: Sequence[int], seed: int) -> None:
    """With any of its rows for every op, whatever it costs."""
    draw = random.Random(seed)
    graph, inputs, params, places = recorded(program, sizes, [AXIS])
    graph = without_places(graph)
    rows = any_rows(graph, parts, draw)
    labels = [stored_at_random(t, Mesh((AXIS,), (parts,)), draw).placements[0] for t in inputs]
    made = [partition(graph, Choice(rows, {}, labels), AXIS, parts, rank) for rank in range(parts)]
    cut = [blocks(t, label, parts) for t, label in zip(inputs, labels, strict=True)]
    mine = [[pieces[rank] for pieces in cut] for rank in range(parts)]
    got = lockstep([local.graph for local in made], mine, params)
    expected = eager(program, sizes)
    for n, place in places.items():
        pieces = [values[place] for values in got]
        whole = joined(pieces, made[0].outputs[place], tuple(expected[n].shape), parts)
        assert_equal([whole], [expected[n]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [2, 4])
@given(program=PROGRAMS, sizes=SHAPES, seed=st.integers(0, 1000))
def test_any_rows_make_the_program(
    parts: int, program: list[Step], sizes: tuple[int, ...], seed: int
) -> None:
    check_rows(parts, accepted(program, sizes), sizes, seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
@given(program=PROGRAMS, sizes=SHAPES, seed=st.integers(0, 1000))
def test_a_program_on_a_mesh_is_the_program(
    mesh: str, program: list[Step], sizes: tuple[int, ...], seed: int
) -> None:
    check(mesh, accepted(program, sizes), sizes, seed)


PROGRAMS_A_SESSION = 12


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
def test_random_programs_on_workers_match_eager(mesh: str) -> None:
    seen: list[tuple[list[Step], tuple[int, ...]]] = []

    @settings(
        max_examples=PROGRAMS_A_SESSION, derandomize=True, database=None, phases=[Phase.generate]
    )
    @given(program=PROGRAMS, sizes=SHAPES)
    def draw(program: list[Step], sizes: tuple[int, ...]) -> None:
        seen.append((accepted(program, sizes), sizes))

    draw()
    assert sum(step.name == "place" for program, _ in seen for step in program) > 4
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)) as s:
        axes = len(s.mesh.names)
        for program, sizes in seen:
            state = start(sizes, "lazygt")
            state.tensors = [placed(t, n, axes) for n, t in enumerate(state.tensors)]
            for step in program:
                step.run(state)
            made = [t.cpu() for t in results(state)]
            assert_equal(made, eager(program, sizes))


def placed(t: Tensor, number: int, axes: int) -> Tensor:
    """Stored in blocks along dims that depend on its number; what learns is a leaf again."""
    labels = [TorchReplicate(), *map(TorchShard, range(t.dim()))]
    where = [labels[(number + axis) % len(labels)] for axis in range(axes)]
    made = lazygt.distribute(t.detach(), where)
    return made.requires_grad_() if t.requires_grad else made
