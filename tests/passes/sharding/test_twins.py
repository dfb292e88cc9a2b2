"""What ranks have reduced once they do not reduce again."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazygt
from lazygt.passes.sharding.programs import reduced_once
from tests.passes.tools import graph_of
from tests.sharding.counting import Block, planned


def reductions(text: str, *texts: str, backward: tuple[int, ...] = ()) -> list[int]:
    """How many reductions each rank's program has left."""
    made = reduced_once([graph_of(each) for each in (text, *texts)], backward)
    return [sum(node.op == "lazygt.all_reduce" for node in graph.nodes) for graph in made]


TWICE = """
    %0: f32[4096, 2048] = input
    %1: f32[2048] = aten.sum.dim_IntList(%0, [0])
    %2: f32[2048] = lazygt.all_reduce(%1, 'sum', 'x')
    %3: f32[2048] = aten.tanh.default(%2)
    %4: f32[2048] = aten.sum.dim_IntList(%0, [0])
    %5: f32[2048] = lazygt.all_reduce(%4, 'sum', 'x')
    %6: f32[2048] = aten.add.Tensor(%3, %5)
    return %6
    """


def test_a_twin_is_the_earlier_one_and_nothing_is_computed_for_it() -> None:
    (made,) = reduced_once([graph_of(TWICE)])
    assert made == graph_of("""
        %0: f32[4096, 2048] = input
        %1: f32[2048] = aten.sum.dim_IntList(%0, [0])
        %2: f32[2048] = lazygt.all_reduce(%1, 'sum', 'x')
        %3: f32[2048] = aten.tanh.default(%2)
        %4: f32[2048] = aten.add.Tensor(%3, %2)
        return %4
        """)


def test_twins_reduce_the_same_in_the_same_way() -> None:
    other_axis = TWICE.replace("(%4, 'sum', 'x')", "(%4, 'sum', 'y')")
    other_op = TWICE.replace("(%4, 'sum', 'x')", "(%4, 'max', 'x')")
    other_value = TWICE.replace(
        "%4: f32[2048] = aten.sum.dim_IntList", "%4: f32[2048] = aten.amax.default"
    )
    assert [reductions(text) for text in (other_axis, other_op, other_value)] == [[2], [2], [2]]


def test_reduction_redundant_on_some_ranks_only_is_kept() -> None:
    """As numbers that one rank adds, and others take as 0."""
    numbers = """
        %0: f32[2048] = input
        %1: f32[2048] = aten.add.Tensor(%0, 1.0)
        %2: f32[2048] = lazygt.all_reduce(%1, 'sum', 'x')
        %3: f32[2048] = aten.tanh.default(%2)
        %4: f32[2048] = aten.add.Tensor(%0, 2.0)
        %5: f32[2048] = lazygt.all_reduce(%4, 'sum', 'x')
        %6: f32[2048] = aten.add.Tensor(%3, %5)
        return %6
        """
    zeros = numbers.replace("1.0", "0.0").replace("2.0", "0.0")
    assert reductions(zeros) == [1]
    assert reductions(numbers, zeros) == [2, 2]


def test_matmul_recomputed_in_backward_is_reduced_again() -> None:
    products = TWICE.replace("f32[4096, 2048] = input", "f32[2048, 2048] = input").replace(
        "f32[2048] = aten.sum.dim_IntList(%0, [0])", "f32[2048, 2048] = aten.mm.default(%0, %0)"
    )
    products = products.replace(" f32[2048] =", " f32[2048, 2048] =")
    assert reductions(products) == [1]
    assert reductions(products, backward=(3, 4)) == [2]
    assert reductions(TWICE, backward=(3, 4)) == [1]  # of a sum it is


def test_checkpoints_reduce_their_activations_again() -> None:
    """Megatron's block: two sums forward, two backward, and the first of the forward again."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return y

    def place() -> nn.Module:
        column, row = lazygt.ColwiseParallel(), lazygt.RowwiseParallel()
        table = {"attn.qkv": column, "attn.out": row, "mlp.0": column, "mlp.2": row}
        plan = {f"block.{name}": style for name, style in table.items()}
        return lazygt.parallelize_module(Checkpointed(), None, plan)

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(8, 32, 64, requires_grad=True)).square().mean()

    counts, _ = planned({"model": 4}, place, loss)
    assert sum(counts.values()) == 5
