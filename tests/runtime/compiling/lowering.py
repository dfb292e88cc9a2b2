"""Checks that a lowered group computes what its members compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lazygt.graph import Graph, Param
from lazygt.graph.fusion import NUMBERS, REDUCTIONS, is_fusible, is_pointwise, pure_form
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.executors.kernel_group import KernelGroup, Members, packed
from lazygt.runtime.plan import Plan
from tests.passes.overloads import graphs, inputs_for, that
from tests.passes.tools import CPU, same_bits

POINTWISE = that(is_pointwise)

ORDERS = ("gt", "ge", "lt", "le", "eq", "ne")

#: Reductions whose arguments the exhaustive test can't draw are in the drawn programs.
UNDRAWN = {"aten.logsumexp.default"}

DRAWN = [*POINTWISE, *(op for op in sorted(REDUCTIONS - UNDRAWN) if op.endswith("default"))]

#: Not those that write bools to a given tensor: a run-time number needs tensors of one dtype.
TAKES_NUMBERS = [
    op
    for op in POINTWISE
    if pure_form(op)[0] in NUMBERS and not op.endswith(tuple(f"{c}.Scalar_out" for c in ORDERS))
]


def lowered(group: KernelGroup, operands: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
    """Results of the lowered group: the fresh ones, then the operands that it writes."""
    mine = [operand.clone() for operand in operands]
    tensors = packed([float(number) for number in numbers], CPU)
    made = Members(group.body, group.writes, group.fresh)(*mine, *tensors)
    written = {operand for operand, _ in group.writes}
    for place, (one, other) in enumerate(zip(mine, operands, strict=True)):
        assert place in written or same_bits(one, other), f"operand {place} is not written"
    return [*made, *(mine[operand] for operand, _ in group.writes)]


def one_by_one(
    group: KernelGroup, operands: Sequence[Tensor], numbers: Sequence[Any]
) -> list[Tensor]:
    outcome = EagerExecutor(Plan.build(group.body), CPU).run(
        [operand.clone() for operand in operands], tuple(numbers)
    )
    assert not outcome.failures, outcome.failures
    return outcome.outputs  # type: ignore[return-value]


def agree(group: KernelGroup, operands: Sequence[Tensor], numbers: Sequence[Any] = ()) -> None:
    """Assert that both are equal: bit for bit unless a run-time number has become a tensor."""
    found, wanted = (run(group, operands, numbers) for run in (lowered, one_by_one))
    for one, other in zip(found, wanted, strict=True):
        if numbers:
            torch.testing.assert_close(one, other, equal_nan=True)
        else:
            assert same_bits(one, other), f"{one} instead of {other}\n{group.body}"


def group_of(body: Graph) -> KernelGroup:
    """The members as a group that writes nothing: every output is a new tensor."""
    return KernelGroup(body, (), len(body.outputs), flat=False)


def is_lowered_to_the_same_arithmetic(op: str) -> None:
    """Of every member; called by tests/passes/test_every_op.py."""
    tried = 0
    for graph in graphs(op):
        if is_fusible(graph.nodes[0], graph.values):
            agree(group_of(graph), inputs_for(graph))
            tried += 1
    assert tried, "no dtype and shape was tried"


def with_numbers(graph: Graph) -> Iterator[Graph]:
    """The graph with a run-time number in each place in turn where one may stand."""
    (node,) = graph.nodes
    for place in NUMBERS[pure_form(node.op)[0]]:
        args, kwargs = node.args, node.kwargs
        if isinstance(place, str):
            kwargs = (*(item for item in kwargs if item[0] != place), (place, Param(0)))
        else:
            args = (*args[:place], Param(0), *args[place + 1 :])
        for kind in ("float", "int"):
            yield replace(graph, params=(kind,), nodes=(replace(node, args=args, kwargs=kwargs),))


def a_number_as_a_tensor_is_the_number(op: str, dtype: torch.dtype, number: float) -> None:
    """Of every member that takes one; called by tests/passes/test_every_op.py."""
    tried = 0
    for drawn in graphs(op, (dtype,)):
        for graph in with_numbers(drawn):
            node, values = graph.nodes[0], set(graph.nodes[0].refs())
            if not is_fusible(node, graph.values) or len(values) < len(graph.inputs):
                continue  # the number stands for a tensor that fixed the shape
            given = int(number) if graph.params == ("int",) else number
            agree(group_of(graph), inputs_for(graph), (given,))
            tried += 1
    assert tried or _first_tensor_only(op), "nothing was tried"


def _first_tensor_only(op: str) -> bool:
    """Whether a number can only take the place of the second tensor."""
    return NUMBERS[pure_form(op)[0]] == (1,) and pure_form(op)[0].endswith(".Tensor")
