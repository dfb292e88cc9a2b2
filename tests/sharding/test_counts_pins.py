"""What follows from fixed and from storage in units: through views, casts and optimizers."""

from __future__ import annotations

from collections import Counter

import torch
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.mesh import FSDPUnit, Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import ALL_GATHER, Placement, Replicate, Shard
from lazygt.graph.text import parse_graph
from lazygt.passes.base import view_source
from lazygt.passes.sharding.axis import shard
from tests.sharding.counting import Block, planned

R, S = Replicate(), Shard
UNIT = FSDPUnit("rest", "data", 25 << 20)


def moved(text: str, *inputs: Sharding) -> Counter[tuple[str, int]]:
    """(kind, bytes) of the collectives of a program on four ranks of one axis."""
    graph = parse_graph(f"graph {{\n{text.strip()}\n}}")
    made = shard(graph, Mesh.parse("data=4"), inputs)
    return Counter((c.kind, c.nbytes) for c in communications(made.graphs[0]))


def fixed(label: Placement) -> Sharding:
    return Sharding((label,), True)


def stored(label: Placement) -> Sharding:
    return Sharding((label,), False, UNIT)


#: Many rows, a small weight: to gather the weight is far less than to gather what it makes.
LINEAR = """
  %0: f32[65536, 64] = input
  %1: f32[64, 64] = input
  %2: f32[64, 64]@(1, 64) = aten.t.default(%1)
  %3: f32[65536, 64] = aten.mm.default(%0, %2)
  return %3
"""


def test_a_pin_holds_behind_a_view() -> None:
    rows = Sharding((S(0),))
    assert moved(LINEAR, rows, Sharding((S(0),))) == Counter({("all_gather", 64 * 64 * 4): 1})
    assert moved(LINEAR, rows, fixed(S(0))) == Counter({("all_gather", 65536 * 64 * 4): 1})


def test_sharding_unsupported_by_op_is_gathered() -> None:
    text = """
      %0: f32[64, 64] = input
      %1: f32[64, 64] = aten.linalg_matrix_exp.default(%0)
      return %1
    """
    assert moved(text, fixed(S(0))) == Counter({("all_gather", 64 * 64 * 4): 1})


def test_a_whole_bias_counts_once_in_a_partial_sum() -> None:
    text = """
      %0: f32[65536, 64] = input
      %1: f32[64, 64] = input
      %2: f32[64] = input
      %3: f32[65536, 64] = aten.addmm.default(%2, %0, %1)
      return %3
    """
    found = moved(text, Sharding((S(0),)), fixed(S(0)), fixed(R))
    nbytes = 65536 * 64 * 4  # and not the few of the weight, although they would do
    assert found == Counter({("all_to_all", nbytes // 4): 1, ("all_reduce", nbytes): 1})


def test_a_stored_weight_is_cast_in_blocks_and_gathered_in_its_new_type() -> None:
    text = """
      %0: bf16[512, 64] = input
      %1: f32[64, 64] = input
      %2: bf16[64, 64] = aten._to_copy.default(%1, dtype=torch.bfloat16)
      %3: bf16[64, 64]@(1, 64) = aten.t.default(%2)
      %4: bf16[512, 64] = aten.mm.default(%0, %3)
      return %4
    """
    assert moved(text, Sharding((S(0),)), stored(S(0))) == Counter({("all_gather", 64 * 64 * 2): 1})


def test_elementwise_ops_on_stored_weight_run_on_blocks() -> None:
    text = """
      %0: f32[64, 64] = input
      %1: f32[64, 64] = input
      $0: float = param
      %2: f32[64, 64] = aten.zeros_like.default(%0)
      %3: f32[64, 64] = aten.add.Tensor(%1, %0, alpha=$0)
      %4: f32[64, 64] = aten.add_.Tensor(%2, %3) writes %2
      %5: f32[64, 64] = aten.add_.Tensor(%0, %4) writes %0
      return %4, %5
    """
    assert moved(text, stored(S(0)), Sharding((S(0),))) == Counter()


def test_a_stored_weight_is_whole_in_every_op_that_computes_with_it() -> None:
    """Though blocks of columns would do, and would gather nothing."""
    text = """
      %0: f32[512, 64] = input
      %1: f32[64, 64] = input
      %2: f32[512, 64] = aten.mm.default(%0, %1)
      return %2
    """
    assert moved(text, Sharding((R,)), stored(S(1))) == Counter({("all_gather", 64 * 64 * 4): 1})
    assert moved(text, Sharding((R,)), Sharding((S(1),))) == Counter()


def test_gathered_weights_are_gone_before_the_backward_gathers_them_again() -> None:
    def loss(model: torch.nn.Module) -> torch.Tensor:
        x = lazygt.distribute(torch.zeros(8, 64, 256), {"data": TorchShard(0)})
        return model(x).square().mean()

    _, graph = planned({"data": 4}, lambda: lazygt.fully_shard(Block(256, 16)), loss)
    gathers = gathered(graph)
    again = {value: places for value, places in gathers.items() if len(places) == 2}
    assert len(again) == 4 + 4  # the four matrices; weights and biases of the norms
    for (_, last), (second, _) in again.values():
        assert last < second


def gathered(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """For each input the gathers of it: where they stand, and where they or views are last read."""
    sources: dict[int, int] = {}
    found: dict[int, tuple[int, list[int]]] = {}
    for number, (node, results) in enumerate(graph.numbered()):
        for value in node.refs():
            if value in sources:
                found[sources[value]][1].append(number)
        below = view_source(node)
        if node.op == ALL_GATHER and node.args[0].index < len(graph.inputs):
            found[results[0]] = node.args[0].index, [number]
            sources[results[0]] = results[0]
        elif below in sources:
            sources.update(dict.fromkeys(results, sources[below]))
    made: dict[int, list[tuple[int, int]]] = {}
    for source, places in found.values():
        made.setdefault(source, []).append((places[0], places[-1]))
    return made
