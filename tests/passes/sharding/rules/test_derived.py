"""Strategies that follow from torch's decompositions: what the ranks run, and what has none."""

from __future__ import annotations

import pytest
import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Param
from lazygt.graph.placement import Partial, Replicate, Shard
from lazygt.passes.sharding.rules.decompose import alone, decomposition
from lazygt.passes.sharding.rules.strategy import Strategy
from tests.passes.sharding.rules.harness import Case

R, S = Replicate(), Shard
LAYER_NORM = "native_layer_norm.default"


def layer_norm(rows: int = 6) -> Case:
    weight = torch.randn(8)
    return Case(LAYER_NORM, torch.randn(rows, 8), [8], weight, weight.clone(), Param(0),
                params=[1e-5])  # fmt: skip


def cut(case: Case, dim: int, parts: int) -> Strategy:
    """The strategy that has the first operand in blocks of ``dim``."""
    (found,) = [each for each in case.strategies(parts) if each.inputs[0] == S(dim)]
    return found


def ops(graph: Graph) -> list[str]:
    return [node.op.removeprefix("aten.") for node in graph.nodes]


def test_a_batch_in_blocks_runs_the_kernel() -> None:
    case = layer_norm()
    graphs, _ = case.local(2, cut(case, 0, 2))
    assert [ops(graph) for graph in graphs] == [[LAYER_NORM]] * 2


def test_a_kernel_that_computes_wider_leaves_sums_as_narrow_as_its_results() -> None:
    value, weight = torch.randn(6, 8).bfloat16(), torch.randn(8).bfloat16()
    _, mean, rstd = torch.ops.aten.native_layer_norm(value, [8], weight, weight, 1e-5)
    case = Case("native_layer_norm_backward.default", value, value.clone(), [8], mean, rstd, weight,
                weight.clone(), [True, True, True])  # fmt: skip
    strategy = cut(case, 0, 2)
    assert strategy.outputs == (S(0), Partial("sum"), Partial("sum"))
    graphs, _ = case.local(2, strategy)
    assert [ops(graph) for graph in graphs] == [["native_layer_norm_backward.default"]] * 2
    assert {meta.dtype for graph in graphs for meta in graph.nodes[0].fresh if meta} == {
        torch.bfloat16
    }


def test_a_normalised_dim_in_blocks_is_taken_apart_and_reduced_twice() -> None:
    case = layer_norm()
    strategy = cut(case, 1, 2)
    assert strategy.inputs == (S(1), S(0), S(0))
    assert [each.kind for each in strategy.comm] == ["all_reduce", "all_reduce"]
    graphs, _ = case.local(2, strategy)
    for graph in graphs:
        assert LAYER_NORM not in ops(graph)
        assert Param(0) in [arg for node in graph.nodes for arg in node.args]
    case.check(2, strategy)


def test_a_rank_without_elements_runs_no_kernel_that_may_refuse_them() -> None:
    case = layer_norm(rows=5)  # blocks of 2, 2, 1 and 0
    graphs, _ = case.local(4, cut(case, 0, 4))
    assert [LAYER_NORM in ops(graph) for graph in graphs] == [True, True, True, False]


def test_arguments_that_are_sizes_become_those_of_the_block() -> None:
    value, weight = torch.randn(4, 6, 2, 2), torch.randn(6)
    case = Case("native_group_norm.default", value, weight, weight.clone(), 4, 6, 4, 3, 1e-5)
    graphs, _ = case.local(2, cut(case, 0, 2))
    for graph in graphs:
        (node,) = graph.nodes
        assert node.args[3:7] == (2, 6, 4, 3)


def test_an_operand_that_is_not_read_lies_as_one_of_its_shape() -> None:
    value, weight = torch.randn(6, 8), torch.randn(8)
    _, mean, rstd = torch.ops.aten.native_layer_norm(value, [8], weight, weight, 1e-5)
    case = Case("native_layer_norm_backward.default", value, value.clone(), [8], mean, rstd, weight,
                weight.clone(), [True, True, True])  # fmt: skip
    assert cut(case, 1, 2).inputs == (S(1), S(1), R, R, S(0), S(0))


def test_the_gradient_of_a_mean_may_be_partial() -> None:
    value = torch.randn(6, 8)
    case = Case("mse_loss_backward.default", torch.randn(()), value, value + 1, 1)
    partial = [each for each in case.strategies(2) if each.inputs[0] == Partial("sum")]
    assert [str(each) for each in partial] == ["(P(sum), R, R) -> (P(sum))"]


@pytest.mark.parametrize("kind", ["calculated", "compared"])
def test_a_run_time_number_may_be_calculated_with_but_not_compared(kind: str) -> None:
    value = torch.randn(6, 8)
    if kind == "calculated":  # the variance is divided by the count less the correction
        case = Case("var.correction", value, [0], correction=Param(0), params=[0.5])
    else:  # the decomposition asks whether the order is 0
        case = Case("linalg_vector_norm.default", value, Param(0), [0], params=[2.0])
    metas = tuple(TensorMeta.of(t) for t in case.tensors)
    assert (decomposition(alone(case.node), metas) is not None) == (kind == "calculated")
