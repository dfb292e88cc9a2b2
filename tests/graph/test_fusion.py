"""Which nodes may be members of a fused node, and the functional ops that stand for them."""

from __future__ import annotations

import pytest
import torch

from lazygt.graph import Graph, Param, Ref
from lazygt.graph.fusion import (
    NORMALIZATIONS,
    NUMBERS,
    is_fusible,
    pure_form,
)
from lazygt.graph.meta import contiguous_stride, intern
from lazygt.graph.node import Arg, Node
from lazygt.graph.ops import overload
from lazygt.graph.text import parse_graph
from tests.graph.pointwise import POINTWISE


def member(row: str, inputs: str = "f32[2, 3]") -> bool:
    """Whether the only node of a graph is a member; ``%0`` and ``%1`` are inputs of a meta."""
    text = f"graph {{\n%0: {inputs} = input\n%1: {inputs} = input\n$0: float = param\n{row}\n}}"
    graph = parse_graph(text)
    (node,) = graph.nodes
    return is_fusible(node, graph.values)


def test_table_of_pointwise_ops_is_large() -> None:
    assert len(POINTWISE) > 500


@pytest.mark.parametrize(
    ("op", "pure"),
    [
        ("aten.add_.Tensor", ("aten.add.Tensor", "")),
        ("aten.add.out", ("aten.add.Tensor", "out")),
        ("aten.pow_.Scalar", ("aten.pow.Tensor_Scalar", "")),
        ("aten.float_power_.Scalar", ("aten.float_power.Tensor_Scalar", "")),
        ("aten.pow.Tensor_Scalar_out", ("aten.pow.Tensor_Scalar", "out")),
        ("aten.tanh_backward.grad_input", ("aten.tanh_backward.default", "grad_input")),
        ("aten.exp.default", ("aten.exp.default", "")),
    ],
)
def test_functional_forms(op: str, pure: tuple[str, str]) -> None:
    assert pure_form(op) == pure


@pytest.mark.parametrize(
    "row",
    [
        "%2: f32[2, 3] = aten.add.Tensor(%0, %1)",
        "%2: f32[2, 3] = aten.add_.Tensor(%0, %1) writes %0",
        "%2: f32[2, 3] = aten.add.out(%0, %0, out=%1) writes %1",
        "%2: f32[2, 3] = aten.mul.Tensor(%0, $0)",
        "%2: f32[2, 3] = aten.pow.Tensor_Scalar(%0, 2)",
        "%2: f32[2, 3] = aten.add.out(%0, %0, alpha=$0, out=%1) writes %1",
        "%2: f64[2, 3] = aten._to_copy.default(%0, dtype=torch.float64)",
        "%2: f32[2, 3] = aten.copy_.default(%0, %1) writes %0",
        "%2: b8[2, 3] = aten.gt.Scalar(%0, $0)",
        "%2: f32[2] = aten.sum.dim_IntList(%0, [1])",
        "%2: f32[] = aten.linalg_vector_norm.default(%0)",
        "%2: f32[2] = aten.var.correction(%0, [1], correction=$0)",
        "%2: f32[2, 3] = aten._softmax.default(%0, 1, False)",
        "%2: f32[2, 3], %3: f32[2, 1], %4: f32[2, 1]"
        " = aten.native_layer_norm.default(%0, [3], None, None, $0)",
        "%2: f32[2, 3], %3: f32[0], %4: f32[0]"
        " = aten.native_batch_norm.default(%0, None, None, None, None, True, $0, $0)",
    ],
)
def test_fusible_nodes(row: str) -> None:
    assert member(row)


@pytest.mark.parametrize(
    "row",
    [
        "%2: f32[2, 3] = aten.rand_like.default(%0)",
        "%2: f32[2, 3] = aten.bernoulli.p(%0, 0.5)",
        "%2: f32[2, 3] = aten.clone.default(%0)",
        "%2: f32[2, 3] = aten.zeros_like.default(%0)",
        "%2: f32[3, 2]@(1, 3) = aten.t.default(%0)",
        "%2: f32[2, 3] = aten.cumsum.default(%0, 1)",
        "%2: f32[2, 3], %3: f32[2, 3] = aten._foreach_exp.default([%0, %1])",
        "%2: f32[2, 3] = aten._to_copy.default(%0, memory_format=torch.contiguous_format)",
        "%2: c64[2, 3] = aten._to_copy.default(%0, dtype=torch.complex64)",
        # a run-time number where no tensor may stand, or where the arithmetic would be another
        "%2: f32[2, 3] = aten.clamp.default(%0, $0)",
        "%2: f32[2, 3] = aten.leaky_relu.default(%0, $0)",
        "%2: f32[2, 3] = aten.pow.Tensor_Scalar(%0, $0)",
        "%2: f32[2, 3] = aten.div.Tensor_mode(%0, $0, rounding_mode='floor')",
        "%2: f32[] = aten.linalg_vector_norm.default(%0, $0)",
        "%2: f32[2] = aten.sum.IntList_out(%0, [1], out=%1) writes %1",
    ],
)
def test_unfusible_nodes(row: str) -> None:
    assert not member(row)


@pytest.mark.parametrize(
    "meta", ["c64[2, 3]", "f32[0, 3]", "c64[2, 3]~conj", "f32[2, 3]~neg", "f8_e4m3fn[2, 3]"]
)
def test_tensors_that_are_left_to_torch(meta: str) -> None:
    meta = meta.replace("f8_e4m3fn", "float8_e4m3fn")
    assert not member(f"%2: {meta} = aten.neg.default(%0)", inputs=meta)


@pytest.mark.parametrize("meta", ["f16[2, 3]", "bf16[2, 3]", "i64[2, 3]", "b8[2, 3]"])
def test_run_time_numbers_need_exact_tensors(meta: str) -> None:
    row = f"%2: {meta} = aten.mul.Tensor(%0, {{}})"
    assert member(row.format("2"), inputs=meta)
    assert not member(row.format("$0"), inputs=meta)


def test_run_time_numbers_need_one_dtype() -> None:
    single, double = (intern((3,), (1,), of) for of in (torch.float32, torch.float64))
    node = Node("aten.add.Tensor", (Ref(0), Ref(1)), (("alpha", Param(0)),), fresh=(double,))
    assert is_fusible(node, (double, double, double))
    assert not is_fusible(node, (single, double, double))


@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - NORMALIZATIONS))
def test_every_place_of_a_number_is_one_of_the_op(name: str) -> None:
    meta = intern((2,), contiguous_stride((2,)), torch.float32)
    schema = overload(name)._schema.arguments
    for place in NUMBERS[name]:
        tensors = [a for a in schema if str(a.type) == "Tensor"]
        args: list[Arg] = [Ref(n) for n in range(len(tensors))]
        kwargs: tuple[tuple[str, Arg], ...] = ()
        if isinstance(place, str):
            assert place in {a.name for a in schema}
            kwargs = ((place, Param(0)),)
        else:
            args[place:] = [Param(0)]
        metas = (meta,) * len(tensors)
        node = Node(name, tuple(args), kwargs, fresh=(meta,))
        graph = Graph(metas, ("float",), (node,), (len(metas),))
        assert is_fusible(node, graph.values)
