"""Placements of a training step that was really recorded: what is chosen, and what choosing costs.

The counts are of the shapes that the benchmark records; nothing is run on workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from benchmarks import placement
from benchmarks.models import GPT
from benchmarks.placement import CASES, SIZE, Chosen, choose
from lazygt.graph.node import Graph
from lazygt.graph.placement import Shard
from tests.passes.sharding.placements import collectives

recorded = cache(placement.recorded)


#: The weights of one layer and those around: embeddings, the last norm, the head.
LAYER, AROUND = 12, 6


def chosen(layers: int, name: str) -> Chosen:
    graph: Graph = recorded(layers)
    for case, annotate, explore in CASES:
        if case == name:
            return choose(graph, annotate(graph), explore, 4)
    raise AssertionError(f"no case {name!r}")


def counted(layers: int, name: str) -> tuple[Counter[str], int]:
    """The collectives of a step by kind, and the bytes of all."""
    graph, found = recorded(layers), chosen(layers, name)
    annotate = next(annotate for case, annotate, _ in CASES if case == name)
    made = collectives(graph, found.question, found.solution, annotate(graph))
    return Counter(kind for kind, _ in made), sum(nbytes for _, nbytes in made)


def weight_bytes(layers: int) -> int:
    size = replace(SIZE, layers=layers)
    return sum(weight.nbytes for weight in GPT(size).parameters())


def test_data_parallel_reduces_every_gradient_once() -> None:
    kinds, nbytes = counted(2, "data parallel")
    loss = 1  # of the mean's denominator: the number of targets that count
    in_blocks = 1  # the embedding's table: nobody asked for its new value to be whole
    assert kinds == {
        "all_reduce": 2 * LAYER + AROUND - in_blocks + loss,
        "reduce_scatter": in_blocks,
    }
    assert nbytes == weight_bytes(2) + 4


def test_tensor_parallel_reduces_once_a_pair_of_weights_in_each_direction() -> None:
    kinds, nbytes = counted(2, "tensor parallel")
    activations = SIZE.batch * SIZE.length * SIZE.dim * 4
    assert kinds == {"all_reduce": 4}
    assert nbytes == 4 * activations


def test_fully_sharded_gathers_every_weight_and_scatters_every_gradient() -> None:
    kinds, _ = counted(2, "fully sharded")
    whole = 1  # the positions have fewer rows than what is stored in blocks
    stored = 2 * LAYER + AROUND - whole
    assert kinds == {"all_gather": stored, "reduce_scatter": stored, "all_reduce": whole + 1}


def test_a_recording_is_one_step() -> None:
    ops = [node.op for node in recorded(1).nodes]
    assert ops.count("aten.nll_loss_backward.default") == 1
    few, more = len(ops), len(recorded(2).nodes)
    assert 150 < more - few < 200


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_every_case_is_solved_exactly_and_each_layer_costs_the_same(name: str) -> None:
    two, four, eight = (chosen(layers, name).solution for layers in (2, 4, 8))
    assert two.exact
    assert four.exact
    assert eight.exact
    assert eight.width == four.width
    assert eight.entries - four.entries < 2.2 * (four.entries - two.entries)
    assert eight.computed < 1.2 * four.computed
    assert eight.cost - four.cost == pytest.approx(2 * (four.cost - two.cost), rel=0.01)


@pytest.mark.parametrize("name", ["data parallel", "fully sharded"])
def test_a_sharded_batch_divides_every_matmul(name: str) -> None:
    found = chosen(2, name)
    rows = zip(found.question.strategies(found.solution), found.question.entries, strict=True)
    heavy = [row for row, entry in rows if entry.is_heavy]
    assert len(heavy) > 20
    for row in heavy:
        assert any(isinstance(label, Shard) for label in (*row.inputs, *row.outputs)), str(row)
