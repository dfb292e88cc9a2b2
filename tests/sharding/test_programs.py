"""Training steps on many ranks in one process, their inputs cut at random: the numbers are those
of one device, and no rank waits for ever."""

from __future__ import annotations

import random

import pytest
import torch

from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.placement import COLLECTIVES, Replicate, Shard
from lazygt.graph.text import parse_graph
from lazygt.passes.sharding.axis import shard
from tests.sharding.models import Program, placed_at_random, program
from tests.sharding.world import run_sharded, run_whole

__all__ = ["program"]

MESHES = ["data=8", "data=2,model=4", "data=3,model=2", "a=2,b=2,c=2"]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("program", ["mlp", "gpt", "bilstm"], indirect=True)
def test_a_step_cut_at_random_is_the_step(program: Program, mesh: str, seed: int) -> None:
    ranks, draw = Mesh.parse(mesh), random.Random(seed)
    stored = [placed_at_random(t, ranks, draw) for t in program.inputs]
    expected = run_whole(*program)
    made = run_sharded(program.graph, ranks, stored, program.inputs, program.params)
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_new_tensor_that_is_drawn_whole_is_made_whole() -> None:
    drawn = parse_graph("""graph {
      %0: f32[8, 4] = input
      %1: f32[8, 4] = aten.empty_strided.default([8, 4], [4, 1], dtype=torch.float32, device=device)
      %2: f32[8, 4] = aten.normal_.default(%1) writes %1
      %3: f32[8, 4] = aten.add.Tensor(%2, %0)
      return %3
    }""")
    made = shard(drawn, Mesh.parse("data=2"), [Sharding((Shard(0),))])
    ops = [node.op for node in made.graphs[0].nodes]
    assert "aten.empty_strided.default" in ops
    assert COLLECTIVES.isdisjoint(ops)  # nothing is gathered that nobody has written
    assert made.outputs == (Sharding((Shard(0),)),)


#: A loss of values [sample, place, class]; its kernels take classes as the second dim, row-major.
PLACES = """graph {
  %0: f32[2, 3, 4] = input
  %1: i64[2, 1, 3] = input
  %2: f32[2, 4, 3]@(12, 1, 4) = aten.transpose.int(%0, 1, 2)
  %3: f32[2, 4, 3] = aten._log_softmax.default(%2, 1, False)
  %4: f32[2, 4, 1, 3] = aten.view.default(%3, [2, 4, 1, 3])
  %5: f32[], %6: f32[] = aten.nll_loss2d_forward.default(%4, %1, None, 2, -100)
  %7: f32[2, 4, 1, 3] = aten.nll_loss2d_backward.default(%5, %4, %1, None, 2, -100, %6)
  %8: f32[2, 4, 3] = aten.view.default(%7, [2, 4, 3])
  %9: f32[2, 4, 3] = aten._log_softmax_backward_data.default(%8, %3, 1, torch.float32)
  return %5, %9
}"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loss_of_classes_that_are_cut_and_not_the_last_dim(ranks: int) -> None:
    graph = parse_graph(PLACES)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 4), torch.randint(4, (2, 1, 3))]
    stored = [Sharding((Shard(2),), fixed=True), Sharding((Replicate(),))]
    made = run_sharded(graph, Mesh.parse(f"model={ranks}"), stored, inputs, [])
    for got, want in zip(made, run_whole(graph, inputs, []), strict=True):
        torch.testing.assert_close(got, want)


#: Pairs of what is normalised are seen as complex numbers, which asks for pairs side by side.
PAIRS = """graph {{
  %0: f32[2, 4, 3] = input
  %1: f32[2, 3, 4]@(12, 1, 3) = aten.transpose.int(%0, 1, 2)
  %2: f32[2, 3, 4], %3: f32[2, 3, 1]{more} = {call}
  %{0}: f32[2, 3, 2, 2] = aten.view.default(%2, [2, 3, 2, 2])
  %{1}: c64[2, 3, 2] = aten.view_as_complex.default(%{0})
  %{2}: c64[2, 3, 2] = aten.mul.Tensor(%{1}, %{1})
  return %{2}
}}"""
NORMS = {
    "layer": PAIRS.format(5, 6, 7, more=", %4: f32[2, 3, 1]",
                          call="aten.native_layer_norm.default(%1, [4], None, None, 1e-05)"),
    "rms": PAIRS.format(4, 5, 6, more="",
                        call="aten._fused_rms_norm.default(%1, [4], None, 1e-05)"),
}  # fmt: skip


@pytest.mark.parametrize("norm", NORMS)
def test_views_of_norm_along_sharded_dim_match_unsharded(norm: str) -> None:
    graph = parse_graph(NORMS[norm])
    torch.manual_seed(0)
    inputs, stored = [torch.randn(2, 4, 3)], [Sharding((Shard(1),), fixed=True)]
    made = run_sharded(graph, Mesh.parse("model=2"), stored, inputs, [])
    torch.testing.assert_close(made, run_whole(graph, inputs, []))
