"""Graphs: the text, the rules, and which writes may happen in place.

b0 ──slice──> v1 ──add_──> v2          b0 is read again: the write needs a copy
                                       b0 is not: it happens in place
"""

from __future__ import annotations

import struct

import pytest
import torch

import lazygt
from lazygt.errors import GraphError
from lazygt.graph import Graph, Node, Param, Ref, TensorMeta, parse_graph
from lazygt.graph.alias import WRITE_BACK, analyse
from lazygt.graph.meta import contiguous_stride, dtype_of, intern
from lazygt.graph.node import verify
from lazygt.runtime.graph_codec import decode_graph, encode_graph


def meta(*shape: int) -> TensorMeta:
    return intern(shape, contiguous_stride(shape), torch.float32)


GOLDEN = """\
graph {
  %0: f32[4] = input
  %1: f32[2, 3]@(1, 2) = input
  $0: float = param
  %2: f32[4] = aten.mul.Tensor(%0, $0)  # train.py:12
  %3: f32[4] = aten.add_.Tensor(%2, %0, alpha=1) writes %2  # train.py:13
  %4: f32[2, 3], %5: i64[] = aten.made_up.default([%1, %3], None, float('inf'), 'x', torch.int64)
  return %3, %5
}"""


def test_text_is_canonical() -> None:
    graph = parse_graph(GOLDEN)
    assert str(graph) == GOLDEN.replace("x', torch.int64)", "x', torch.int64)")
    assert graph.nodes[1] == Node(
        "aten.add_.Tensor", (Ref(2), Ref(0)), (("alpha", 1),), (), (2,), (meta(4),)
    )
    assert graph.nodes[0].args == (Ref(0), Param(0))


def test_text_of_recorded_graph() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(2, 2)
        s.flush()
        (x[0] + 1.5).sum().item()
        graph = s.last_plan.graph
    text = "\n".join(line.split("  # ")[0] for line in str(graph).splitlines())
    assert text == (
        "graph {\n"
        "  %0: f32[2, 2] = input\n"
        "  $0: float = param\n"
        "  %1: f32[2] = aten.select.int(%0, 0, 0)\n"
        "  %2: f32[2] = aten.add.Tensor(%1, $0)\n"
        "  %3: f32[] = aten.sum.default(%2)\n"
        "  return %3\n"
        "}"
    )


@pytest.mark.parametrize("line", ["  %0 = ", "  %0: q9[3] = input", "  %0: f32[3] = op(%0"])
def test_unreadable_text_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_graph(f"graph {{\n{line}\n  return\n}}")


def test_meta_is_one_object_however_its_defaults_are_given() -> None:
    short = intern((2, 3), (3, 1), torch.float32)
    assert short is intern((2, 3), (3, 1), torch.float32, 0, False, False)
    assert short is intern((2, 3), stride=(3, 1), dtype=torch.float32, neg=False)


def test_dtypes_have_names() -> None:
    assert dtype_of("bf16") is torch.bfloat16
    with pytest.raises(ValueError, match="not a torch dtype"):
        dtype_of("nn")


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        (Node("aten.exp.default", (Ref(3),), (), (meta(4),)), "reads %3"),
        (Node("aten.mul.Tensor", (Ref(0), Param(1)), (), (meta(4),)), r"uses \$1 of 0"),
        (Node("aten.add_.Tensor", (Ref(0), Ref(0)), (), (), (0,)), "without a new version"),
    ],
)
def test_the_verifier_names_the_node_and_the_rule(node: Node, rule: str) -> None:
    with pytest.raises(GraphError, match=rf"node 0 \({node.op}\) .*{rule}"):
        verify(Graph((meta(4),), (), (node,), ()))


SLICE = ("aten.slice.Tensor", 0, (None, 0, 0, 2), (), 0)


def written_through_a_view(*outputs: int) -> Graph:
    """b0 -> v1 = b0[0:2]; v2 = v1.add_(1); b3 = write_back(b0, v2)."""
    return Graph(
        (meta(4),),
        ("int",),
        (
            Node("aten.slice.Tensor", (Ref(0), 0, 0, 2), (), (meta(2),)),
            Node("aten.add_.Tensor", (Ref(1), Param(0)), (), (), (1,), (meta(2),)),
            Node(WRITE_BACK, (Ref(0), Ref(2), (SLICE,)), (), (meta(4),)),
        ),
        outputs,
    )


def test_a_write_through_a_view_happens_in_place() -> None:
    writes = analyse(written_through_a_view(3))
    assert writes.modes == ((), ("in place",), ("done",))
    assert writes.overwritten_inputs == (0,)


def test_write_through_view_copies_if_old_base_is_read() -> None:
    writes = analyse(written_through_a_view(0, 3))
    assert writes.modes[1] == ("copy",)
    assert writes.overwritten_inputs == ()


def test_write_through_view_copies_if_old_view_is_read() -> None:
    writes = analyse(written_through_a_view(1, 3))
    assert writes.modes[1] == ("copy",)


def test_outputs_that_share_memory_are_copied_out() -> None:
    node = Node("aten._unsafe_view.default", (Ref(0), (2, 2)), (), (meta(2, 2),))
    assert analyse(Graph((meta(4),), (), (node,), (1,))).copied_outputs == (0,)


NANS = [struct.unpack(">d", bits.to_bytes(8))[0] for bits in (0xFFF8 << 48, 0x7FF9234560000000)]
ALIKE = [0, 0.0, -0.0, False, 1, 1.0, True, complex(0, -0.0), complex(-0.0, 0), float("nan"),
         *NANS, complex(-0.0, NANS[1]), 2**63]  # fmt: skip


def _filled(number: complex) -> Graph:
    node = Node("aten.full.default", ((4,), number), (("value", (number,)),), (meta(4),))
    return Graph((), (), (node,), (0,))


@pytest.mark.parametrize("number", ALIKE)
def test_graphs_differ_in_types_and_bits_of_numbers(number: complex) -> None:
    graph = _filled(number)
    equal = [other for other in ALIKE if _filled(other) == graph]
    assert len(equal) == 1
    assert equal[0] is number
    assert [str(_filled(other)) for other in ALIKE].count(str(graph)) == 1
    assert parse_graph(str(graph)) == graph
    assert decode_graph(encode_graph(graph)) == graph
