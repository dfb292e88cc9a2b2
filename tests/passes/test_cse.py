"""cse: equal pure nodes become one; what draws, writes or is written never does."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.passes.cse import CommonSubexpressions
from tests.passes.tools import check, check_numbers, graph_of, keeps, same_numbers

CSE = CommonSubexpressions()


def test_a_twin_reads_the_first() -> None:
    # %0 ──exp──> %1 ──┐                %0 ──exp──> %1 ══mul══> %2
    #    └──exp──> %2 ─mul──> %3
    check_numbers(
        CSE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.exp.default(%0)
        %3: f32[4] = aten.mul.Tensor(%1, %2)
        return %3
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.mul.Tensor(%1, %1)
        return %2
        """,
    )


def test_twins_of_twins_meet_in_the_same_walk() -> None:
    # %0 ──exp──> %1 ──neg──> %3        once %2 is %1, %4 is %3
    #    └──exp──> %2 ──neg──> %4
    check_numbers(
        CSE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.exp.default(%0)
        %3: f32[4] = aten.neg.default(%1)
        %4: f32[4] = aten.neg.default(%2)
        %5: f32[4] = aten.add.Tensor(%3, %4)
        return %5
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%1)
        %3: f32[4] = aten.add.Tensor(%2, %2)
        return %3
        """,
    )


def test_every_result_of_a_twin_is_replaced() -> None:
    check_numbers(
        CSE,
        """
        %0: f32[2, 3] = input
        %1: f32[2], %2: i64[2] = aten.max.dim(%0, 1)
        %3: f32[2], %4: i64[2] = aten.max.dim(%0, 1)
        return %1, %4
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[2], %2: i64[2] = aten.max.dim(%0, 1)
        return %1, %2
        """,
    )


def test_two_outputs_may_become_one_value() -> None:
    # each output still gets memory of its own: `same_numbers` looks
    check_numbers(
        CSE,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.mul.Tensor(%0, $0)
        %2: f32[4] = aten.mul.Tensor(%0, $0)
        return %1, %2
        """,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.mul.Tensor(%0, $0)
        return %1, %1
        """,
    )


# -- what must not change -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("aten.add.Tensor(%0, 1)", "aten.add.Tensor(%0, 1.0)"),
        ("aten.add.Tensor(%0, 1)", "aten.add.Tensor(%0, True)"),
        ("aten.add.Tensor(%0, 0.0)", "aten.add.Tensor(%0, -0.0)"),
        ("aten.mul.Tensor(%0, $0)", "aten.mul.Tensor(%0, $1)"),
        ("aten.add.Tensor(%0, %1)", "aten.add.Tensor(%1, %0)"),
        ("aten.add.Tensor(%0, %1)", "aten.add.Tensor(%0, %1, alpha=1)"),
        ("aten.sum.dim_IntList(%0, [0])", "aten.sum.dim_IntList(%0, [0], True)"),
        ("aten.cat.default([%0, %1])", "aten.cat.default([%1, %0])"),
    ],
)
def test_other_arguments_make_another_node(one: str, other: str) -> None:
    meta = "f32[4]" if "cat" in one or "sum" in one else "f32[4, 4]"
    keeps(
        CSE,
        f"""
        %0: {meta} = input
        %1: {meta} = input
        $0: float = param
        $1: float = param
        %2: {meta} = {one}
        %3: {meta} = {other}
        return %2, %3
        """,
    )


@pytest.mark.parametrize(
    "op",
    [
        "aten.rand_like.default(%0)",
        "aten.bernoulli.p(%0, 0.5)",
        "aten.empty_like.default(%0)",
        "aten.new_empty.default(%0, [4])",
        "aten.empty_strided.default([4], [1], dtype=torch.float32, device=device)",
    ],
)
def test_draws_and_uninitialised_memory_are_never_merged(op: str) -> None:
    keeps(CSE, f"%0: f32[4] = input\n%1: f32[4] = {op}\n%2: f32[4] = {op}\nreturn %1, %2")


def test_two_reads_of_the_generator_are_two() -> None:
    keeps(
        CSE,
        """
        %0: u8[5056] = lazygt.get_rng_state(device)
        %1: f32[4] = aten.rand.default([4], device=device)
        %2: u8[5056] = lazygt.get_rng_state(device)
        return %0, %1, %2
        """,
    )


def test_a_write_between_two_equal_reads() -> None:
    # %0 ──exp──> %1        the second exp reads %2, what the write made of %0
    #  └──add_──> %2 ──exp──> %3
    keeps(
        CSE,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        %3: f32[4] = aten.exp.default(%2)
        return %1, %2, %3
        """,
    )


def test_equal_writes_are_two_writes() -> None:
    keeps(
        CSE,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        %2: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        return %1, %2
        """,
    )


@pytest.mark.parametrize("written", [1, 2])
def test_a_twin_that_is_written_stays(written: int) -> None:
    # %0 ──exp──> %1 ───────> return    merging would be right, but the write would need a copy
    #    └──exp──> %2 ──add_──> %3 ──> return
    read = 3 - written
    keeps(
        CSE,
        f"""
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.exp.default(%0)
        %3: f32[4] = aten.add_.Tensor(%{written}, $0) writes %{written}
        return %{read}, %3
        """,
    )


def test_node_written_through_view_is_not_merged() -> None:
    keeps(
        CSE,
        """
        %0: f32[2, 3] = input
        $0: float = param
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[2, 3] = aten.exp.default(%0)
        %3: f32[3] = aten.select.int(%2, 0, 0)
        %4: f32[3] = aten.add_.Tensor(%3, $0) writes %3
        %5: f32[2, 3] = lazygt.write_back(%2, %4, [['aten.select.int', 0, [None, 0, 0], [], 0]])
        return %1, %5
        """,
    )


RECOMPUTED = """
%0: f32[{size}] = input
%1: {dtype}[{size}] = {op}
%2: {dtype}[] = aten.sum.default(%1)
%3: {dtype}[{size}] = {op}
%4: {dtype}[{size}] = aten.mul.Tensor(%3, %2)
return %4
"""


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("aten.exp.default(%0)", "f32"),
        ("aten._to_copy.default(%0, dtype=torch.float64)", "f64"),
    ],
)
def test_recomputation_that_saves_memory_is_kept(op: str, dtype: str) -> None:
    # %1 dies at the sum; merging the twin would keep its megabytes alive until the mul
    keeps(CSE, RECOMPUTED.format(size=1 << 20, op=op, dtype=dtype))
    small = graph_of(RECOMPUTED.format(size=8, op=op, dtype=dtype))
    assert len(CSE.run(small).nodes) == len(small.nodes) - 1
    same_numbers(small, CSE.run(small))


def test_a_view_costs_no_memory_and_is_merged_at_any_size() -> None:
    text = RECOMPUTED.format(size=1 << 20, op="aten.view.default(%0, [1048576])", dtype="f32")
    made = CSE.run(graph_of(text))
    assert [node.op for node in made.nodes].count("aten.view.default") == 1


def test_fused_nodes_with_different_bodies_are_not_merged() -> None:
    # equal op and arguments, but other members
    keeps(
        CSE,
        """\
graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.fused(%0) {
    %0: f32[4] = input
    %1: f32[4] = aten.exp.default(%0)
    return %1
  }
  %2: f32[4] = lazygt.fused(%0) {
    %0: f32[4] = input
    %1: f32[4] = aten.neg.default(%0)
    return %1
  }
  return %1, %2
}""",
    )


def test_the_first_ones_line_stays() -> None:
    made = check(
        CSE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)  # train.py:1
        %2: f32[4] = aten.exp.default(%0)  # train.py:2
        %3: f32[4] = aten.neg.default(%2)  # train.py:3
        return %3
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)  # train.py:1
        %2: f32[4] = aten.neg.default(%1)  # train.py:3
        return %2
        """,
    )
    assert made.origins == (0, 2)


def test_merged_tensors_of_a_script_stay_two() -> None:
    """Seen from a script: a write to one of two equal results does not reach the other."""
    with lazygt.session(launcher="inline") as s:
        x = torch.arange(3.0)
        a, b = x * 2, x * 2
        s.flush()
        a.add_(1)
        assert b.tolist() == [0.0, 2.0, 4.0]
        assert a.tolist() == [1.0, 3.0, 5.0]
