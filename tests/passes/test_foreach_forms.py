"""Every horizontal op, taken apart for large tensors and put together for small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lazygt.graph import Graph, Param, Ref
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import Arg, Node, verify
from lazygt.graph.ops import overload
from lazygt.graph.per_tensor import MERGE, SPLIT, ForeachForm
from lazygt.passes.foreach import SMALL, Foreach
from tests.passes.tools import same_numbers

FOREACH = Foreach()
#: Elements of the largest small tensor and the smallest large one.
FULL, MORE = SMALL // 4, SMALL // 4 + 1


def f32(*shape: int) -> TensorMeta:
    return intern(shape, contiguous_stride(shape), torch.float32)


def wide_graph(form: ForeachForm, sizes: list[int]) -> Graph:
    """One horizontal node on vectors of these sizes, with every argument that the form takes."""
    metas: list[TensorMeta] = []
    params: list[str] = []

    def tensors(*made: TensorMeta) -> tuple[Ref, ...]:
        metas.extend(made)
        return tuple(Ref(n) for n in range(len(metas) - len(made), len(metas)))

    def numbers(count: int) -> tuple[Param, ...]:
        params.extend(["float"] * count)
        return tuple(Param(n) for n in range(len(params) - count, len(params)))

    args: list[Arg] = []
    for argument in overload(form.wide)._schema.arguments[: len(form.arg_kinds)]:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            args.append(tensors(*map(f32, sizes)))
        elif kind == "List[number]":
            args.append(numbers(len(sizes)))
        else:
            args.append(tensors(f32())[0] if kind == "Tensor" else numbers(1)[0])
    made = [f32() if "norm" in form.wide else f32(size) for size in sizes]
    if form.wide.split(".")[1].endswith("_"):
        targets = tuple(range(len(sizes)))
        node = Node(form.wide, tuple(args), writes=targets, written=tuple(made))
    else:
        node = Node(form.wide, tuple(args), fresh=tuple(made))
    first = len(metas)
    outputs = tuple(range(first, first + len(sizes)))
    return Graph(tuple(metas), tuple(params), (node,), outputs)


def single_graph(graph: Graph, form: ForeachForm) -> Graph:
    """The same with one node a tensor."""
    (node,) = graph.nodes
    nodes = []
    for which in range(len(graph.outputs)):
        args, kwargs = form.narrow(node.args, which)
        one = slice(which, which + 1)
        nodes.append(
            Node(form.single, args, kwargs, node.fresh[one], node.writes[one], node.written[one])
        )
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("name", SPLIT)
def test_every_horizontal_op_is_taken_apart(name: str) -> None:
    # [large, full, large, full]: a node for each of the large ones, one for the small ones
    form = SPLIT[name]
    graph = wide_graph(form, [MORE, FULL, MORE, FULL])
    verify(graph)
    made = FOREACH.run(graph)
    verify(made)
    assert [node.op for node in made.nodes] == [form.single, form.single, form.wide]
    same_numbers(graph, made)


@pytest.mark.parametrize("name", SPLIT)
def test_one_small_tensor_is_a_single_node_too(name: str) -> None:
    form = SPLIT[name]
    graph = wide_graph(form, [MORE, 3])
    made = FOREACH.run(graph)
    assert made == single_graph(graph, form)
    same_numbers(graph, made)


@pytest.mark.parametrize("key", MERGE, ids=str)
def test_every_op_with_a_form_is_merged(key: tuple[str, bool]) -> None:
    form = MERGE[key]
    wanted = wide_graph(form, [3, 1, FULL, 5])
    graph = single_graph(wanted, form)
    verify(graph)
    made = FOREACH.run(graph)
    assert made == wanted, f"{made}\n{wanted}"
    same_numbers(graph, made)
