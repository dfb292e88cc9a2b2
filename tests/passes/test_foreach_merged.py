"""foreach: the same op on many small tensors becomes one node; no dependence is crossed."""

from __future__ import annotations

import pytest
import torch

from lazygt.passes.foreach import SMALL, Foreach
from tests.passes.tools import check_numbers, graph_of, keeps, same_numbers

FOREACH = Foreach()
#: Elements of the smallest large tensor.
MORE = SMALL // 4 + 1


def inputs(*shapes: str) -> str:
    """Rows for f32 inputs of these shapes."""
    return "\n".join(f"%{n}: f32[{shape}] = input" for n, shape in enumerate(shapes))


def rows_of(call: str, first: int = 4, count: int = 4, meta: str = "f32[3]") -> str:
    """A row for each of ``count`` inputs: ``%n`` stands for the input."""
    return "\n".join(f"%{first + n}: {meta} = {call.replace('%n', f'%{n}')}" for n in range(count))


def returning(*values: int) -> str:
    return "return " + ", ".join(f"%{value}" for value in values)


FOUR = inputs(*["3"] * 4)


def test_a_step_of_an_optimizer_is_a_few_nodes() -> None:
    # %0 ──mul──> %4 ──sqrt──> %8          4 chains            2 nodes, one a level
    # %1 ──mul──> %5 ──sqrt──> %9     in the order in which
    # %2 ──mul──> %6 ──sqrt──> %10    a loop over parameters
    # %3 ──mul──> %7 ──sqrt──> %11          has them
    chains = "\n".join(
        f"%{4 + 2 * n}: f32[3] = aten.mul.Tensor(%{n}, $0)\n"
        f"%{5 + 2 * n}: f32[3] = aten.sqrt.default(%{4 + 2 * n})"
        for n in range(4)
    )
    check_numbers(
        FOREACH,
        f"{FOUR}\n$0: float = param\n{chains}\n{returning(5, 7, 9, 11)}",
        f"{FOUR}\n$0: float = param\n"
        "%4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3] = "
        "aten._foreach_mul.ScalarList([%0, %1, %2, %3], [$0, $0, $0, $0])\n"
        "%8: f32[3], %9: f32[3], %10: f32[3], %11: f32[3] = "
        f"aten._foreach_sqrt.default([%4, %5, %6, %7])\n{returning(8, 9, 10, 11)}",
    )


def test_shared_keyword_is_kept_once() -> None:
    check_numbers(
        FOREACH,
        f"{FOUR}\n{rows_of('aten.add.Tensor(%n, %0, alpha=2)')}\n{returning(4, 5, 6, 7)}",
        f"{FOUR}\n%4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3] = "
        "aten._foreach_add.List([%0, %1, %2, %3], [%0, %0, %0, %0], alpha=2)\n"
        f"{returning(4, 5, 6, 7)}",
    )


def test_omitted_value_counts_as_one() -> None:
    # two nodes with a value and two without
    with_value = "aten.addcmul.default(%n, %0, %1, value=$0)"
    without = "aten.addcmul.default(%n, %0, %1)"
    rows = [rows_of(with_value).splitlines()[n] if n % 2 else rows_of(without).splitlines()[n]
            for n in range(4)]  # fmt: skip
    check_numbers(
        FOREACH,
        f"{FOUR}\n$0: float = param\n" + "\n".join([*rows, returning(4, 5, 6, 7)]),
        f"{FOUR}\n$0: float = param\n%4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3] = "
        "aten._foreach_addcmul.ScalarList([%0, %1, %2, %3], [%0, %0, %0, %0], [%1, %1, %1, %1], "
        f"[1, $0, 1, $0])\n{returning(4, 5, 6, 7)}",
    )


def test_two_dtypes_make_two_nodes() -> None:
    metas = ["f32[3]", "f64[3]"] * 4
    before = [f"%{n}: {meta} = input" for n, meta in enumerate(metas)]
    before += [f"%{8 + n}: {meta} = aten.exp.default(%{n})" for n, meta in enumerate(metas)]
    made = FOREACH.run(graph_of("\n".join([*before, returning(*range(8, 16))])))
    assert [node.op for node in made.nodes] == ["aten._foreach_exp.default"] * 2
    same_numbers(graph_of("\n".join([*before, returning(*range(8, 16))])), made)


def test_writes_of_many_tensors_are_one_write() -> None:
    rows = "\n".join(f"%{4 + n}: f32[3] = aten.mul_.Tensor(%{n}, $0) writes %{n}" for n in range(4))
    check_numbers(
        FOREACH,
        f"{FOUR}\n$0: float = param\n{rows}\n{returning(4, 5, 6, 7)}",
        f"{FOUR}\n$0: float = param\n%4: f32[3], %5: f32[3], %6: f32[3], %7: f32[3] = "
        "aten._foreach_mul_.ScalarList([%0, %1, %2, %3], [$0, $0, $0, $0]) writes %0, %1, %2, %3\n"
        f"{returning(4, 5, 6, 7)}",
    )


def test_a_read_before_a_write_stays_before_it() -> None:
    # %0..%3 are read, then written: both merge, the reads stay first, and all writes in place
    reads = rows_of("aten.exp.default(%n)")
    writes = "\n".join(f"%{8 + n}: f32[3] = aten.neg_.default(%{n}) writes %{n}" for n in range(4))
    graph = graph_of(f"{FOUR}\n{reads}\n{writes}\n{returning(*range(4, 12))}")
    made = FOREACH.run(graph)
    assert [node.op for node in made.nodes] == [
        "aten._foreach_exp.default",
        "aten._foreach_neg_.default",
    ]
    same_numbers(graph, made)


def test_each_node_keeps_the_line_of_its_first() -> None:
    rows = [f"{row}  # train.py:{n}" for n, row in
            enumerate(rows_of("aten.exp.default(%n)").splitlines())]  # fmt: skip
    made = FOREACH.run(graph_of("\n".join([FOUR, *rows, returning(4, 5, 6, 7)])))
    assert made.lines == ("train.py:0",)
    assert made.origins == (0,)


# -- what must not change ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        rows_of("aten.exp.default(%n)", count=3),
        rows_of("aten.add.Tensor(%n, $0, alpha=2)"),  # the horizontal op takes no alpha
        rows_of("aten.add.Tensor(%n, %0, alpha=$0)"),  # may differ from node to node
        rows_of("aten.erf.default(%n)"),
        rows_of("aten.rand_like.default(%n)"),
        rows_of("aten.sum.default(%n)", meta="f32[]"),
        rows_of("aten.div.Tensor_mode(%n, %0, rounding_mode='floor')"),
    ],
)
def test_nodes_that_are_not_merged(rows: str) -> None:
    values = range(4, 4 + len(rows.splitlines()))
    keeps(FOREACH, f"{FOUR}\n$0: float = param\n{rows}\n{returning(*values)}")


def test_different_keywords_do_not_meet() -> None:
    rows = rows_of("aten.add.Tensor(%n, %0, alpha=2)", count=2)
    others = rows_of("aten.add.Tensor(%n, %0, alpha=3)", first=6, count=2)
    keeps(FOREACH, f"{FOUR}\n{rows}\n{others}\n{returning(4, 5, 6, 7)}")


def test_a_chain_is_not_merged() -> None:
    # %0 ──exp──> %1 ──exp──> %2 ──exp──> %3 ──exp──> %4
    rows = "\n".join(f"%{n + 1}: f32[3] = aten.exp.default(%{n})" for n in range(4))
    keeps(FOREACH, f"%0: f32[3] = input\n{rows}\nreturn %4")


def test_nothing_is_merged_across_a_node_in_between() -> None:
    # %0, %1 ──exp──> ──erf──> ──exp──> : two and two of a level are too few
    keeps(
        FOREACH,
        """
        %0: f32[3] = input
        %1: f32[3] = input
        %2: f32[3] = aten.exp.default(%0)
        %3: f32[3] = aten.exp.default(%1)
        %4: f32[3] = aten.erf.default(%2)
        %5: f32[3] = aten.erf.default(%3)
        %6: f32[3] = aten.exp.default(%4)
        %7: f32[3] = aten.exp.default(%5)
        return %6, %7
        """,
    )


def test_large_tensors_are_not_merged() -> None:
    rows = rows_of("aten.exp.default(%n)", meta=f"f32[{MORE}]")
    keeps(FOREACH, f"{inputs(*[str(MORE)] * 4)}\n{rows}\n{returning(4, 5, 6, 7)}")


def test_an_old_version_is_read_before_the_new_one_is_made() -> None:
    # %0 ──add_──> %5       a horizontal op would add the new %0 to %1
    #  └───┐
    # %1 ─add_──> %6
    keeps(
        FOREACH,
        """
        %0: f32[3] = input
        %1: f32[3] = input
        %2: f32[3] = input
        %3: f32[3] = input
        %4: f32[3] = input
        %5: f32[3] = aten.add_.Tensor(%0, %4) writes %0
        %6: f32[3] = aten.add_.Tensor(%1, %0) writes %1
        %7: f32[3] = aten.add_.Tensor(%2, %4) writes %2
        %8: f32[3] = aten.add_.Tensor(%3, %4) writes %3
        return %5, %6, %7, %8
        """,
    )


def test_writes_to_one_memory_stay_apart() -> None:
    # four rows of one matrix: each write goes back into the matrix before the next
    text = ["%0: f32[4, 3] = input"]
    base, last = 0, 0
    for row in range(4):
        view, new, back = last + 1, last + 2, last + 3
        text += [
            f"%{view}: f32[3]{f'+{3 * row}' if row else ''} = aten.select.int(%{base}, 0, {row})",
            f"%{new}: f32[3]{f'+{3 * row}' if row else ''} = aten.exp_.default(%{view}) "
            f"writes %{view}",
            f"%{back}: f32[4, 3] = lazygt.write_back(%{base}, %{new}, "
            f"[['aten.select.int', 0, [None, 0, {row}], [], 0]])",
        ]
        base = last = back
    keeps(FOREACH, "\n".join([*text, f"return %{base}"]))


def test_draws_keep_their_order() -> None:
    # a draw between the nodes that merge: those behind it move, the draws do not
    text = [FOUR]
    for n in range(4):
        draw = "rand" if n % 2 else "randn"
        text += [
            f"%{4 + 2 * n}: f32[3] = aten.exp.default(%{n})",
            f"%{5 + 2 * n}: f32[3] = aten.{draw}_like.default(%{n})",
        ]
    graph = graph_of("\n".join([*text, returning(*range(4, 12))]))
    made = FOREACH.run(graph)
    draws = [node.op for node in made.nodes if "rand" in node.op]
    assert draws == ["aten.randn_like.default", "aten.rand_like.default"] * 2
    assert len(made.nodes) == 5
    same_numbers(graph, made)


def test_a_draw_that_has_to_wait_holds_back_the_next() -> None:
    # the first draw reads %4, which moves down to %9; the second needs nothing, and comes after it
    text = f"""{FOUR}
%4: f32[3] = aten.sigmoid.default(%0)
%5: f32[3] = aten.bernoulli.default(%4)
%6: f32[3] = aten.rand_like.default(%0)
%7: f32[3] = aten.sigmoid.default(%1)
%8: f32[3] = aten.sigmoid.default(%2)
%9: f32[3] = aten.sigmoid.default(%3)
{returning(*range(5, 10))}"""
    graph = graph_of(text)
    made = FOREACH.run(graph)
    assert [node.op for node in made.nodes] == [
        "aten._foreach_sigmoid.default",
        "aten.bernoulli.default",
        "aten.rand_like.default",
    ]
    ordinary = [torch.linspace(-1, 1, 3) for _ in graph.inputs]
    same_numbers(graph, made, ordinary)


def test_operands_of_different_dtypes_do_not_meet() -> None:
    # all four results are f32
    rows = rows_of("aten.mul.Tensor(%n, %0)", first=5)
    mixed = rows.replace("%2, %0", "%2, %4").replace("%3, %0", "%3, %4")
    keeps(FOREACH, f"{FOUR}\n%4: i64[3] = input\n{mixed}\n{returning(5, 6, 7, 8)}")


def test_a_group_keeps_nothing_large_waiting() -> None:
    # the first of the four is what %5 is made with, which would wait for the last
    large = [
        "%4: f32[3] = aten.cos.default(%0)",
        "%5: f32[9000, 3]@(0, 1) = aten.expand.default(%4, [9000, 3])",
        "%6: f32[9000, 3] = aten.exp.default(%5)",
    ]
    others = [f"%{7 + n}: f32[3] = aten.cos.default(%{1 + n})" for n in range(3)]
    keeps(FOREACH, "\n".join([FOUR, *large, *others, returning(6, 7, 8, 9)]))
