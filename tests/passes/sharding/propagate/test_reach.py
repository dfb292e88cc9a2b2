"""The work-list of propagation, against visits of all nodes until nothing changes."""

from __future__ import annotations

import random

import pytest

from lazygt.graph.liveness import def_use
from lazygt.graph.placement import Replicate, Shard
from lazygt.passes.sharding.choose.catalogue import StrategyCatalogue
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.propagate.reach import Reach
from lazygt.passes.sharding.rules import strategies_of
from tests.passes.sharding.placements import GPU
from tests.passes.sharding.random_graphs import random_graph
from tests.passes.tools import graph_of

PARTS = 4


class ReachByFullRounds(Reach):
    """The same sources, with every node visited in every round."""

    def _run(self, next_round: set[int]) -> None:
        numbers = range(len(self._nodes)) if next_round else ()
        while sum(len(self._visit(number)) for number in numbers):
            pass


def reach_of(
    kind: type[Reach], text_or_seed: str | int, annotations: dict[int, Annotation], explore: bool
) -> Reach:
    if isinstance(text_or_seed, str):
        graph = graph_of(text_or_seed)
    else:
        graph = random_graph(random.Random(text_or_seed), 8)
    chains, metas = def_use(graph), graph.values
    catalogue = StrategyCatalogue(
        chains, metas, lambda node: strategies_of(node, metas, PARTS), PARTS, GPU
    )
    return kind(chains, metas, catalogue, annotations, explore)


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_work_list_reaches_the_fixpoint_of_full_rounds(seed: int, explore: bool) -> None:
    draw = random.Random(seed)
    placements = (Replicate(), Shard(0), Shard(1))
    kinds = ("given", "stored", "free", "fixed")
    annotations = {
        value: Annotation(draw.choice(placements), draw.choice(kinds)) for value in range(2)
    }
    queued, full = (
        reach_of(kind, seed, annotations, explore) for kind in (Reach, ReachByFullRounds)
    )
    assert queued.reached == full.reached
    assert queued.steps() == full.steps()


QKV = """
    %0: f32[8, 6] = input
    %1: f32[6, 24] = input
    %2: f32[8, 24] = aten.mm.default(%0, %1)
    %3: f32[8, 8], %4: f32[8, 8], %5: f32[8, 8] = aten.split.Tensor(%2, 8, 1)
    %6: f32[8, 8] = aten.add.Tensor(%3, %4)
    return %6, %5
"""


def test_packed_weight_is_a_source_of_interleaved_placements() -> None:
    reach = reach_of(Reach, QKV, {1: Annotation(Shard(1))}, explore=False)
    (interleaved,) = reach.bits.interleaved_in(reach.reached[1])
    assert (interleaved.dim, interleaved.outer) == (1, 3)
    for value in (3, 4, 5, 6):
        assert reach.reached[value] & reach.bits.shard_bit(Shard(1))


def test_packed_weight_that_no_annotation_shards_is_no_source() -> None:
    reach = reach_of(Reach, QKV, {0: Annotation(Shard(0))}, explore=False)
    assert not reach.bits.interleaved
    assert reach.reached[2] == reach.bits.shard_bit(Shard(0))
