"""fold: what looks like one of its rules and is not. Each rule in ``test_fold.py`` has its twin."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.passes.fold import Fold
from tests.passes.tools import graph_of, keeps, same_numbers

FOLD = Fold()


@pytest.mark.parametrize(
    ("meta", "made", "op", "why"),
    [
        ("f32[4]", "f32[4]", "aten.add.Tensor(%0, 0)", "-0.0 + 0 is 0.0"),
        ("f32[4]", "f32[4]", "aten.add.Tensor(%0, 0.0)", "-0.0 + 0.0 is 0.0"),
        ("f32[4]", "f32[4]", "aten.sub.Tensor(%0, -0.0)", "-0.0 - -0.0 is 0.0"),
        ("f32[4]", "f32[4]", "aten.sub.Tensor(0.0, %0)", "that is a negation"),
        ("f32[4]", "f32[4]", "aten.div.Tensor(1, %0)", "that is a reciprocal"),
        ("f32[4]", "f32[4]", "aten.mul.Tensor(%0, 0)", "0 * inf is NaN"),
        ("i64[4]", "i64[4]", "aten.mul.Tensor(%0, 0)", "right, but not a rule"),
        ("f32[4]", "f32[4]", "aten.mul.Tensor(%0, 1.0000001)", "nearly one"),
        ("i64[4]", "f32[4]", "aten.div.Tensor(%0, 1)", "a division of whole numbers is a float"),
        ("b8[4]", "i64[4]", "aten.mul.Tensor(%0, 1)", "a bool times an int is an int"),
        ("i64[4]", "f32[4]", "aten.mul.Tensor(%0, 1.0)", "an int times a float is a float"),
        ("c64[4]", "c64[4]", "aten.add.Tensor(%0, -0.0)", "-0.0j + 0.0j is 0.0j"),
        ("c64[4]", "c64[4]", "aten.mul.Tensor(%0, 1)", "complex products mix their parts"),
        ("f32[2, 3]@(1, 2)", "f32[2, 3]",
         "aten.clone.default(%0, memory_format=torch.contiguous_format)", "it makes other strides"),
        ("f32[4]", "f64[4]", "aten._to_copy.default(%0, dtype=torch.float64)", "another dtype"),
        ("f32[4]~neg", "f32[4]", "aten.add.Tensor(%0, -0.0)", "the lazy bit is gone"),
        ("f32[4]", "f32[4]", "aten.neg.default(%0)", "once"),
    ],
)  # fmt: skip
def test_an_op_that_is_not_neutral(meta: str, made: str, op: str, why: str) -> None:
    text = f"%0: {meta} = input\n%1: {made} = {op}\nreturn %1"
    keeps(FOLD, text)
    same_numbers(graph_of(text), graph_of(text))  # the op really makes what the text says


def test_numbers_of_the_run_are_no_constants() -> None:
    keeps(
        FOLD,
        """
        %0: i64[4] = input
        $0: int = param
        %1: i64[4] = aten.mul.Tensor(%0, $0)
        %2: i64[4] = aten.add.Tensor(%1, 0, alpha=$0)
        return %2
        """,
    )


def test_neutral_numbers_that_make_a_larger_tensor() -> None:
    keeps(
        FOLD,
        """
        %0: f32[3] = input
        %1: f32[2, 3] = aten.ones.default([2, 3], device=device)
        %2: f32[2, 3] = aten.mul.Tensor(%0, %1)
        return %2
        """,
    )


def test_minus_zero_is_nothing_to_a_sum_of_floats_only() -> None:
    keeps(
        FOLD,
        """
        %0: c64[4] = input
        %1: f32[4] = input
        %2: f32[4] = aten.full.default([4], -0.0, device=device)
        %3: c64[4] = aten.add.Tensor(%0, %2)
        %4: f32[4] = aten.sub.Tensor(%1, %2)
        return %3, %4
        """,
    )


@pytest.mark.parametrize(
    ("start", "between", "via", "end", "back"),
    [
        ("f64", "f32", "float32", "f64", "float64"),
        ("f32", "f16", "float16", "f32", "float32"),
        ("f16", "bf16", "bfloat16", "f16", "float16"),
        ("i64", "f64", "float64", "i64", "int64"),
        ("i8", "u8", "uint8", "i16", "int16"),
        ("i16", "f32", "float32", "i16", "int16"),
        ("f32", "b8", "bool", "f32", "float32"),
        # a float out of range: what comes out hangs on the route
        ("f16", "f32", "float32", "uint32", "uint32"),
        ("f32", "f64", "float64", "i32", "int32"),
        # a NaN: kernels that round to 16 bits give it other bits, each of them its own
        ("f16", "f32", "float32", "f16", "float16"),
        ("bf16", "f64", "float64", "bf16", "bfloat16"),
        ("f16", "f32", "float32", "bf16", "bfloat16"),
        ("f32", "f64", "float64", "f16", "float16"),
    ],
)
def test_a_cast_that_loses_something(
    start: str, between: str, via: str, end: str, back: str
) -> None:
    keeps(
        FOLD,
        f"""
        %0: {start}[4] = input
        %1: {between}[4] = aten._to_copy.default(%0, dtype=torch.{via})
        %2: {end}[4] = aten._to_copy.default(%1, dtype=torch.{back})
        return %2
        """,
    )


def test_a_cast_in_between_that_moves_the_elements() -> None:
    keeps(
        FOLD,
        """
        %0: f32[2, 3]@(1, 2) = input
        %1: f64[2, 3] = \
aten._to_copy.default(%0, dtype=torch.float64, memory_format=torch.contiguous_format)
        %2: f32[2, 3] = aten._to_copy.default(%1, dtype=torch.float32)
        return %2
        """,
    )


def test_a_view_of_a_copy_is_no_view_of_its_source() -> None:
    # %0 ──t──> %1 ══copy══> %2 ──view──> %3: looks like %0, but its elements stand transposed
    keeps(
        FOLD,
        """
        %0: f32[2, 3] = input
        %1: f32[3, 2]@(1, 3) = aten.t.default(%0)
        %2: f32[6] = aten._reshape_copy.default(%1, [6])
        %3: f32[2, 3] = aten.view.default(%2, [2, 3])
        return %3
        """,
    )


@pytest.mark.parametrize(
    "view",
    [
        "%3: f32[3] = aten.select.int(%1, 0, 0)",
        "%3: f32[2, 3]+3 = aten.as_strided.default(%1, [2, 3], [3, 1], 3)",
        "%3: f32[2, 3]@(0, 1)+3 = aten.expand.default(%2, [2, 3])",
    ],
)
def test_views_that_show_something_else(view: str) -> None:
    keeps(
        FOLD,
        f"""
        %0: f32[6, 3] = input
        %1: f32[2, 3] = aten.slice.Tensor(%0, 0, 0, 2)
        %2: f32[3]+3 = aten.select.int(%1, 0, 1)
        {view}
        return %3
        """,
    )


def test_a_view_of_a_view_of_memory_with_gaps() -> None:
    # only of contiguous memory is a view of a view surely one view
    keeps(
        FOLD,
        """
        %0: f32[4, 3]@(6, 1) = input
        %1: f32[2, 2, 3]@(12, 6, 1) = aten.view.default(%0, [2, 2, 3])
        %2: f32[4, 1, 3]@(6, 3, 1) = aten.view.default(%1, [4, 1, 3])
        return %2
        """,
    )


# -- memory: what a copy stands there for ---------------------------------------------------------


def test_copy_of_value_written_later_is_kept() -> None:
    # %0 ──clone──> %1 ──> return           without the clone the write would need a copy
    #  └──add_──> %2 ──> return
    keeps(
        FOLD,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.clone.default(%0)
        %2: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        return %1, %2
        """,
    )


def test_a_copy_that_is_written_later() -> None:
    keeps(
        FOLD,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.clone.default(%0)
        %2: f32[4] = aten.add_.Tensor(%1, $0) writes %1
        return %2
        """,
    )


@pytest.mark.parametrize(
    "copy",
    [
        "aten.clone.default(%1)",
        "aten._to_copy.default(%1)",
        "aten.mul.Tensor(%1, 1)",
        "aten.neg.default(%2)",
    ],
)
def test_copy_of_view_written_later_is_kept(copy: str) -> None:
    # %0 ──select──> %1 ══copy══> %3 ──> return        a row saved before the update of a matrix:
    #  └──add_──> %4 ──> return                         reading %1 later would copy the matrix
    keeps(
        FOLD,
        f"""
        %0: f32[9, 3] = input
        $0: float = param
        %1: f32[3] = aten.select.int(%0, 0, 0)
        %2: f32[3] = aten.neg.default(%1)
        %3: f32[3] = {copy}
        %4: f32[9, 3] = aten.add_.Tensor(%0, $0) writes %0
        return %3, %4
        """,
    )


def test_a_copy_that_lets_larger_memory_go() -> None:
    # %0 ──exp──> %1 ──select──> %2 ══clone══> %3: nine rows need not live for one
    keeps(
        FOLD,
        """
        %0: f32[9, 3] = input
        %1: f32[9, 3] = aten.exp.default(%0)
        %2: f32[3] = aten.select.int(%1, 0, 0)
        %3: f32[3] = aten.clone.default(%2)
        return %3
        """,
    )


def test_a_constant_that_is_written() -> None:
    keeps(
        FOLD,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.ones_like.default(%0)
        %2: f32[4] = aten.add_.Tensor(%1, $0) writes %1
        %3: f32[4] = aten.mul.Tensor(%0, %2)
        return %3
        """,
    )


def test_a_nan_is_no_constant() -> None:
    keeps(
        FOLD,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.zeros_like.default(%0)
        %2: f32[4] = aten.div.Tensor(%1, %1)
        return %2
        """,
    )


# -- seen from a script ----------------------------------------------------------------------------


def test_an_op_without_a_kernel_fails_where_it_runs() -> None:
    """Constants of a dtype that torch cannot add: the worker says so, not the pass."""
    with lazygt.session(launcher="inline") as s:
        x = torch.empty(3, dtype=torch.float8_e5m2)
        s.flush()
        with pytest.raises(lazygt.ExecutionError, match="add_stub"):
            (torch.ones_like(x) + torch.ones_like(x)).float().tolist()
        assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_clone_of_an_input_is_a_tensor_of_its_own() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.arange(3.0)
        s.flush()
        y = x.clone()
        s.flush()
        y.add_(1)
        assert x.tolist() == [0.0, 1.0, 2.0]
        assert y.tolist() == [1.0, 2.0, 3.0]
