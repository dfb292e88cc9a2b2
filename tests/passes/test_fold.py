"""fold: each rule with the graph before and after. What must not fold: ``test_fold_leaves.py``."""

from __future__ import annotations

import pytest

from lazygt.passes.fold import Fold
from tests.passes.tools import check, check_numbers

FOLD = Fold()


def test_double_transpose_is_folded() -> None:
    # %0 ──t──> %1 ──t──> %2 ──exp──>       %0 ──exp──>, and %1 is dead
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[3, 2]@(1, 3) = aten.t.default(%0)
        %2: f32[2, 3] = aten.t.default(%1)
        %3: f32[2, 3] = aten.exp.default(%2)
        return %3
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[3, 2]@(1, 3) = aten.t.default(%0)
        %2: f32[2, 3] = aten.exp.default(%0)
        return %2
        """,
    )


def test_a_write_through_a_view_of_all() -> None:
    # %0 ──exp──> %1 ──t, t──> %3 ──add_──> %4 ──write_back──> %4 itself
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[3, 2]@(1, 3) = aten.t.default(%1)
        %3: f32[2, 3] = aten.t.default(%2)
        %4: f32[2, 3] = aten.add_.Tensor(%3, %0) writes %3
        %5: f32[2, 3] = lazygt.write_back(%1, %4, [['aten.t.default', 0, [None], [], 0], \
['aten.t.default', 0, [None], [], 0]])
        return %5
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[3, 2]@(1, 3) = aten.t.default(%1)
        %3: f32[2, 3] = aten.t.default(%2)
        %4: f32[2, 3] = aten.add_.Tensor(%3, %0) writes %3
        return %4
        """,
    )


def test_a_longer_way_round_of_views() -> None:
    # %0 ──view──> %1 ──unsqueeze──> %2 ──squeeze──> %3 = %1 ──view──> %4 = %0
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[6] = aten.view.default(%0, [6])
        %2: f32[1, 6] = aten.unsqueeze.default(%1, 0)
        %3: f32[6] = aten.squeeze.dim(%2, 0)
        %4: f32[2, 3] = aten.view.default(%3, [2, 3])
        return %3, %4
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[6] = aten.view.default(%0, [6])
        %2: f32[1, 6] = aten.unsqueeze.default(%1, 0)
        return %1, %0
        """,
    )


def test_views_between_the_products_of_two_linear_layers() -> None:
    # %0 ──view──> %3 ──mm──> %4 ──view──> %5 ──view──> %6 = %4 ──mm──> %7 ──view──> %8
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3, 4] = input
        %1: f32[4, 5] = input
        %2: f32[5, 4] = input
        %3: f32[6, 4] = aten.view.default(%0, [6, 4])
        %4: f32[6, 5] = aten.mm.default(%3, %1)
        %5: f32[2, 3, 5] = aten.view.default(%4, [2, 3, 5])
        %6: f32[6, 5] = aten.view.default(%5, [6, 5])
        %7: f32[6, 4] = aten.mm.default(%6, %2)
        %8: f32[2, 3, 4] = aten.view.default(%7, [2, 3, 4])
        return %8
        """,
        """
        %0: f32[2, 3, 4] = input
        %1: f32[4, 5] = input
        %2: f32[5, 4] = input
        %3: f32[6, 4] = aten.view.default(%0, [6, 4])
        %4: f32[6, 5] = aten.mm.default(%3, %1)
        %5: f32[2, 3, 5] = aten.view.default(%4, [2, 3, 5])
        %6: f32[6, 4] = aten.mm.default(%4, %2)
        %7: f32[2, 3, 4] = aten.view.default(%6, [2, 3, 4])
        return %7
        """,
    )


def test_bits_seen_as_another_dtype_and_back() -> None:
    check_numbers(
        FOLD,
        """
        %0: f32[4] = input
        %1: i32[4] = aten.view.dtype(%0, torch.int32)
        %2: f32[4] = aten.view.dtype(%1, torch.float32)
        return %2
        """,
        """
        %0: f32[4] = input
        %1: i32[4] = aten.view.dtype(%0, torch.int32)
        return %0
        """,
    )


def test_a_view_of_a_view_is_a_view_of_the_whole() -> None:
    # %0 ──view──> %1 ──view──> %2          %0 ──view──> %2, and %1 is dead
    check_numbers(
        FOLD,
        """
        %0: f32[2, 6] = input
        %1: f32[12] = aten.view.default(%0, [12])
        %2: f32[3, 4] = aten._unsafe_view.default(%1, [-1, 4])
        return %2
        """,
        """
        %0: f32[2, 6] = input
        %1: f32[12] = aten.view.default(%0, [12])
        %2: f32[3, 4] = aten._unsafe_view.default(%0, [-1, 4])
        return %2
        """,
    )


ONE_OP = """
%0: {meta} = input
%1: {meta} = {op}
return %1
"""
INPUT = "%0: {meta} = input\nreturn %0"


@pytest.mark.parametrize(
    ("meta", "op"),
    [
        ("i64[4]", "aten.add.Tensor(%0, 0)"),
        ("i64[4]", "aten.add.Tensor(%0, 0, alpha=1)"),
        ("i64[4]", "aten.add.Tensor(0, %0)"),
        ("i64[4]", "aten.sub.Tensor(%0, 0)"),
        ("i64[4]", "aten.mul.Tensor(%0, 1)"),
        ("u8[4]", "aten.mul.Tensor(1, %0)"),
        ("b8[4]", "aten.add.Tensor(%0, False)"),
        ("b8[4]", "aten.mul.Tensor(%0, True)"),
        ("f32[4]", "aten.add.Tensor(%0, -0.0)"),
        ("f32[4]", "aten.sub.Tensor(%0, 0.0)"),
        ("f64[4]", "aten.mul.Tensor(1.0, %0)"),
        ("f32[2, 3]@(1, 2)", "aten.div.Tensor(%0, 1.0)"),
        ("f32[4]", "aten.clone.default(%0)"),
        ("c64[4]", "aten.clone.default(%0)"),
        ("f32[4]", "aten._to_copy.default(%0, dtype=torch.float32, device=device)"),
        ("f32[4]", "aten.detach.default(%0)"),
        ("f32[4]", "aten.lift_fresh.default(%0)"),
    ],
)
def test_a_neutral_op_is_its_operand(meta: str, op: str) -> None:
    check_numbers(FOLD, ONE_OP.format(meta=meta, op=op), INPUT.format(meta=meta))


def test_a_neutral_tensor_is_neutral() -> None:
    # %0 ─────────────mul──> %2             the gradient that a backward pass starts from
    #  └──new_ones──> %1 ┘
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[3] = aten.new_ones.default(%0, [3])
        %2: f32[2, 3] = aten.mul.Tensor(%0, %1)
        return %2
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[3] = aten.new_ones.default(%0, [3])
        return %0
        """,
    )


def test_view_of_ones_is_folded_to_ones() -> None:
    check_numbers(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[] = aten.ones.default([], device=device)
        %2: f32[2, 3]@(0, 0) = aten.expand.default(%1, [2, 3])
        %3: f32[2, 3] = aten.mul.Tensor(%2, %0)
        return %3
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[] = aten.ones.default([], device=device)
        %2: f32[2, 3]@(0, 0) = aten.expand.default(%1, [2, 3])
        return %0
        """,
    )


@pytest.mark.parametrize("meta", ["f32[4]", "i8[4]", "c64[4]", "u8[4]"])
def test_double_negation_is_folded(meta: str) -> None:
    check_numbers(
        FOLD,
        f"""
        %0: {meta} = input
        %1: {meta} = aten.neg.default(%0)
        %2: {meta} = aten.neg.default(%1)
        %3: {meta} = aten.neg.default(%2)
        return %2, %3
        """,
        f"""
        %0: {meta} = input
        %1: {meta} = aten.neg.default(%0)
        %2: {meta} = aten.neg.default(%0)
        return %0, %2
        """,
    )


CAST = "aten._to_copy.default(%{0}, dtype=torch.{1})"


@pytest.mark.parametrize(
    ("narrow", "wide", "name", "back"),
    [
        ("f32", "f64", "float64", "float32"),
        ("i8", "i32", "int32", "int8"),
        ("u8", "i16", "int16", "uint8"),
        ("i32", "i64", "int64", "int32"),
    ],
)
def test_lossless_double_cast_is_folded(narrow: str, wide: str, name: str, back: str) -> None:
    # the input is the graph's value 0, and 0 is a value like any other
    check_numbers(
        FOLD,
        f"""
        %0: {narrow}[4] = input
        %1: {wide}[4] = {CAST.format(0, name)}
        %2: {narrow}[4] = {CAST.format(1, back)}
        return %1, %2
        """,
        f"""
        %0: {narrow}[4] = input
        %1: {wide}[4] = {CAST.format(0, name)}
        return %1, %0
        """,
    )


@pytest.mark.parametrize(
    ("start", "wide", "wide_name", "end", "end_name"),
    [
        ("f16", "f32", "float32", "f64", "float64"),
        ("bf16", "f32", "float32", "f64", "float64"),
        ("i8", "i16", "int16", "f16", "float16"),
        ("i32", "i64", "int64", "f32", "float32"),
        ("i32", "i64", "int64", "u8", "uint8"),
        ("i8", "i16", "int16", "b8", "bool"),
    ],
)
def test_a_cast_through_a_wider_dtype(
    start: str, wide: str, wide_name: str, end: str, end_name: str
) -> None:
    # %0 ──> wide ──> %2                    %0 ──> %2, and the wide one is dead
    check_numbers(
        FOLD,
        f"""
        %0: {start}[40] = input
        %1: {wide}[40] = {CAST.format(0, wide_name)}
        %2: {end}[40] = {CAST.format(1, end_name)}
        return %2
        """,
        f"""
        %0: {start}[40] = input
        %1: {wide}[40] = {CAST.format(0, wide_name)}
        %2: {end}[40] = {CAST.format(0, end_name)}
        return %2
        """,
    )


@pytest.mark.parametrize(
    ("op", "meta", "made", "number"),
    [
        ("aten.add.Tensor(%1, %1)", "f32[4]", "f32[4]", "2.0"),
        ("aten.sub.Tensor(%1, 1.5)", "f32[4]", "f32[4]", "-0.5"),
        ("aten.mul.Tensor(%1, 0.1)", "f32[4]", "f32[4]", "0.10000000149011612"),
        ("aten.div.Tensor(%1, 3)", "f16[4]", "f16[4]", "0.333251953125"),
        ("aten.div.Tensor(%1, 0.0)", "f32[4]", "f32[4]", "float('inf')"),
        ("aten.neg.default(%1)", "i64[4]", "i64[4]", "-1"),
        ("aten.neg.default(%1)", "u8[4]", "u8[4]", "255"),
        ("aten.add.Tensor(%1, %1)", "b8[4]", "b8[4]", "True"),
        ("aten.div.Tensor(%1, 2)", "i64[4]", "f32[4]", "0.5"),
    ],
)
def test_arithmetic_on_constants(op: str, meta: str, made: str, number: str) -> None:
    name = {"f32": "float32", "f16": "float16", "i64": "int64", "u8": "uint8", "b8": "bool"}
    dtype = name[made.partition("[")[0]]
    before = "%0: {0} = input\n%1: {0} = aten.ones_like.default(%0)\n%2: {1} = {2}\nreturn %2"
    full = f"aten.full.default([4], {number}, dtype=torch.{dtype}, device=device)"
    check_numbers(FOLD, before.format(meta, made, op), before.format(meta, made, full))


def test_a_sum_of_constants_is_neutral_in_its_turn() -> None:
    # 0 * -1 = -0.0, and only that is nothing to a float
    made = check(
        FOLD,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.zeros_like.default(%0)  # a.py:1
        %2: f32[4] = aten.neg.default(%1)  # a.py:2
        %3: f32[4] = aten.add.Tensor(%0, %2)  # a.py:3
        %4: f32[4] = aten.exp.default(%3)  # a.py:4
        return %4
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.zeros_like.default(%0)  # a.py:1
        %2: f32[4] = aten.full.default([4], -0.0, dtype=torch.float32, device=device)  # a.py:2
        %3: f32[4] = aten.exp.default(%0)  # a.py:4
        return %3
        """,
    )
    assert made.origins == (0, 1, 3)
