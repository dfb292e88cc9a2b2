"""Stretches of a plan that become CUDA graphs: attention whose dropout its backward repeats.

In a capture the seeds lie on the GPU, outside of one on the host, and the backward reads them where
it would have put them itself.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lazygt
from lazygt.runtime.executors.segments import split_into_segments
from lazygt.runtime.plan import Plan

FORWARD = "aten._scaled_dot_product_efficient_attention.default"
BACKWARD = "aten._scaled_dot_product_efficient_attention_backward.default"


def attends(x: torch.Tensor, dropout: float) -> torch.Tensor:
    x = x.sin().exp().tanh().abs()
    return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout).cos().neg().exp().sin().sum()


def recorded(dropout: float, reads_loss: bool) -> list[Plan]:
    """The plans of a training step on a GPU; in two where the loss is read before the backward."""
    with lazygt.session(launcher="dry", device="cuda", compile="off") as s:
        x = torch.randn(1, 2, 8, 8, requires_grad=True)
        s.flush()
        loss = attends(x, dropout)
        if reads_loss:
            loss.item()
        loss.backward()
        s.flush()
        return list(s.plans())[1:]


def captured(plan: Plan, *apart: int) -> set[str]:
    """The ops that are in some graph."""
    nodes = plan.steps.graph.nodes
    stretches = [each for each in split_into_segments(plan.steps, apart, ()) if each.captured]
    assert stretches, "nothing else keeps the plan from being captured"
    return {node.op for each in stretches for node in nodes[each.first : each.end]}


def test_a_forward_and_its_backward_in_one_graph() -> None:
    (plan,) = recorded(0.5, reads_loss=False)
    assert {FORWARD, BACKWARD} <= captured(plan)


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_a_backward_in_another_plan(dropout: float) -> None:
    forward, backward = recorded(dropout, reads_loss=True)
    assert (FORWARD in captured(forward)) == (dropout == 0.0)
    assert (BACKWARD in captured(backward)) == (dropout == 0.0)


def test_a_backward_in_another_graph_of_the_plan() -> None:
    (plan,) = recorded(0.5, reads_loss=False)
    ops = [node.op for node in plan.steps.graph.nodes]
    between = ops.index(FORWARD) + 2
    assert between < ops.index(BACKWARD)
    assert {FORWARD, BACKWARD}.isdisjoint(captured(plan, between))
