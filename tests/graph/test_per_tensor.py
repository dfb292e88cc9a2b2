"""What horizontal ops compute for one tensor, and several such lanes abreast."""

from __future__ import annotations

import pytest

from lazygt.graph.per_tensor import join_slices, lane_count, lanes_of, merge_slices, vectors
from tests.passes.tools import difference, graph_of, same_numbers

TWO = """
    %0: f32[3] = input
    %1: f32[5, 2] = input
    %2: f32[3] = input
    %3: f32[5, 2] = input
    $0: float = param
    $1: float = param
    $2: float = param
    %4: f32[3], %5: f32[5, 2] = aten._foreach_mul_.Scalar([%0, %1], $0) writes %0, %1
    %6: f32[3], %7: f32[5, 2] = aten._foreach_sqrt.default([%2, %3])
    %8: f32[3], %9: f32[5, 2] = aten._foreach_addcdiv_.ScalarList([%4, %5], [%2, %3], [%6, %7], [$1, $2]) writes %4, %5
    return %7, %8, %9
"""  # noqa: E501


def test_lanes_are_the_same_program_on_one_tensor_each() -> None:
    lanes = lanes_of(graph_of(TWO))
    assert lanes is not None
    wanted = graph_of(
        """
        %0: f32[3] = input
        %1: f32[3] = input
        $0: float = param
        $1: float = param
        %2: f32[3] = aten.mul_.Tensor(%0, $0) writes %0
        %3: f32[3] = aten.sqrt.default(%1)
        %4: f32[3] = aten.addcdiv_.default(%2, %1, %3, value=$1) writes %2
        return %3, %4
        """
    )
    assert str(lanes.lane) == str(wanted), difference(str(wanted), str(lanes.lane))
    assert lanes.operands == ((0, 2), (1, 3))
    assert lanes.params == ((0, 1), (0, 2))  # the factor is shared
    assert lanes.outputs == ((1, 0), (0, 1), (1, 1))
    assert lanes.length == (3 + 10) // 2


def test_lanes_abreast_are_the_lanes_and_may_be_horizontal_again() -> None:
    lanes = lanes_of(graph_of(TWO))
    assert lanes is not None
    three = vectors(join_slices(lanes.lane, 3, 7), [1, 8, 9])
    assert [len(three.inputs), len(three.params), len(three.nodes)] == [6, 6, 9]
    assert [meta.shape for meta in three.inputs] == [(1,), (1,), (8,), (8,), (9,), (9,)]
    wide = merge_slices(three, 3)
    assert [node.op for node in wide.nodes] == [
        "aten._foreach_mul_.ScalarList",
        "aten._foreach_sqrt.default",
        "aten._foreach_addcdiv_.ScalarList",
    ]
    same_numbers(three, wide)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[$1, $2]", "[$1, 0.5]"),  # a number that is known, for one of them
        ("%3: f32[5, 2] = input", "%3: f64[5, 2] = input"),
        ("%3: f32[5, 2] = input", "%3: f32[5, 2]@(1, 5) = input"),
        ("[%4, %5], [%2, %3]", "[%4, %5], [%2, %7]"),
        ("[%4, %5], [%2, %3]", "[%4, %5], [%2, %2]"),
    ],
)
def test_differing_rows_have_no_lanes(old: str, new: str) -> None:
    assert old in TWO
    assert lanes_of(graph_of(TWO.replace(old, new))) is None


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ("%2: f32[3], %3: f32[3] = aten._foreach_exp.default([%0, %1])", 2),
        ("%2: f32[], %3: f32[] = aten._foreach_norm.Scalar([%0, %1], 2)", 0),
        ("%2: f32[3] = aten.exp.default(%0)", 0),
    ],
)
def test_lane_count_of_node(row: str, count: int) -> None:
    graph = graph_of(f"%0: f32[3] = input\n%1: f32[3] = input\n{row}\nreturn %2")
    assert lane_count(graph.nodes[0]) == count
