"""fuse: horizontal ops that feed each other tensor by tensor become one node."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.graph import Graph
from lazygt.graph.fusion import expand_fused
from lazygt.graph.node import FUSED
from lazygt.passes.fuse import MAX_HORIZONTAL, Fuse
from tests.passes.tools import difference, graph_of, keeps, same_numbers

FUSE = Fuse()


def chain(second: str, more: str = "", count: int = 8) -> str:
    """Two horizontal ops on so many tensors, and what else there is."""

    def some(first: int) -> str:
        return ", ".join(f"%{number}" for number in range(first, first + count))

    def made(first: int) -> str:
        return ", ".join(f"%{number}: f32[3]" for number in range(first, first + count))

    inputs = "\n".join(f"%{number}: f32[3] = input" for number in range(2 * count))
    first = f"{made(2 * count)} = aten._foreach_mul_.Scalar([{some(0)}], $0) writes {some(0)}"
    second = second.format(first=some(2 * count), other=some(count))
    last = 4 * count + bool(more)
    returned = ", ".join(f"%{number}" for number in range(2 * count, last))
    rows = [inputs, "$0: float = param", first, f"{made(3 * count)} = {second}", more]
    return "\n".join([*filter(None, rows), f"return {returned}"])


def groups(graph: Graph) -> list[list[str]]:
    made = FUSE.run(graph)
    opened = expand_fused(made)
    assert str(opened) == str(graph), difference(str(graph), str(opened))
    same_numbers(graph, made)
    return [
        [member.op for member in node.body.nodes] for node in made.nodes if node.body is not None
    ]


ADD = "aten._foreach_add_.List([{first}], [{other}]) writes {first}"


def test_horizontal_ops_are_one_node() -> None:
    assert groups(graph_of(chain(ADD))) == [
        ["aten._foreach_mul_.Scalar", "aten._foreach_add_.List"]
    ]


def test_an_op_on_one_of_the_tensors_is_none_of_them() -> None:
    more = "%32: f32[3] = aten.exp.default(%24)"
    assert groups(graph_of(chain(ADD, more))) == [
        ["aten._foreach_mul_.Scalar", "aten._foreach_add_.List"]
    ]


@pytest.mark.parametrize(
    "second",
    [
        # what one tensor becomes depends on another
        "aten._foreach_add.List([%17, %16, %18, %19, %20, %21, %22, %23], [{other}])",
        "aten._foreach_add.List([{first}], [%16, %16, %16, %16, %16, %16, %16, %16])",
        # no arithmetic on vectors, element by element
        "aten._foreach_pow.Scalar([{first}], $0)",
    ],
)
def test_chain_reading_another_tensor_is_not_fused(second: str) -> None:
    keeps(FUSE, chain(second))


def test_fewer_than_are_worth_a_call_stay_apart() -> None:
    keeps(FUSE, chain(ADD, count=3))


def test_a_group_of_many_ops_is_closed() -> None:
    rows = [f"%{n}: f32[3]" for n in range(8)]
    text = [f"{row} = input" for row in rows]
    for number in range(MAX_HORIZONTAL + 2):
        first = 8 * (number + 1)
        made = ", ".join(f"%{n}: f32[3]" for n in range(first, first + 8))
        taken = ", ".join(f"%{n}" for n in range(first - 8, first))
        text.append(f"{made} = aten._foreach_neg.default([{taken}])")
    text.append(f"return %{8 * (MAX_HORIZONTAL + 2)}")
    graph = graph_of("\n".join(text))
    assert [len(group) for group in groups(graph)] == [MAX_HORIZONTAL, 2]


@pytest.mark.parametrize(
    ("make", "members"),
    [
        (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01), 4),
        (lambda ps: torch.optim.Adam(ps, 0.1), 7),
        (lambda ps: torch.optim.AdamW(ps, 0.1), 8),
    ],
)
def test_an_optimizer_is_one_node(make: object, members: int) -> None:
    with lazygt.session(launcher="inline", compile="off") as s:
        sizes = [(4, 4), (4,), (4, 3), (3,), (3, 1), (1,), (7,), (9,), (11,), (13,)]
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        optimizer = make(parameters)  # type: ignore[operator]
        for _ in range(3):
            for p in parameters:
                p.grad = torch.ones_like(p)
            s.flush()
            optimizer.step()
            s.flush()
        assert s.last_plan is not None
        fused = [node for node in s.last_plan.graph.nodes if node.op == FUSED]
        assert [len(node.body.nodes) for node in fused if node.body is not None] == [members]
        assert not [node.op for node in s.last_plan.graph.nodes if "_foreach_" in node.op]
