"""fuse: what stays apart, because it would be wrong, too much, or not worth it."""

from __future__ import annotations

import pytest

from lazygt.graph import Graph
from lazygt.graph.node import FUSED
from lazygt.passes.fuse import (
    MAX_MEMBERS,
    Fuse,
    GroupContext,
    candidates,
    compile_gain,
)
from tests.passes.tools import graph_of, keeps, same_numbers

FUSE = Fuse()
PRICES = FUSE.prices


def members(graph: Graph) -> list[list[str]]:
    """The short names of the ops in each fused node of a graph."""
    bodies = [node.body for node in graph.nodes if node.body is not None]
    return [[node.op.split(".")[1] for node in body.nodes] for body in bodies]


def fused(text: str) -> list[list[str]]:
    """``members`` of the graph after the pass, which computes the same numbers."""
    graph = graph_of(text)
    made = FUSE.run(graph)
    same_numbers(graph, made)
    return members(made)


def candidates_of(text: str) -> list[list[str]]:
    """The short names of the ops in each group that might be fused."""
    graph = graph_of(text)
    groups = candidates(graph, PRICES)
    return [[graph.nodes[n].op.split(".")[1] for n in each.members] for each in groups]


def chain(length: int, meta: str) -> str:
    """``neg`` of ``neg`` of ..."""
    rows = [f"%{n + 1}: {meta} = aten.neg.default(%{n})" for n in range(length)]
    return "\n".join([f"%0: {meta} = input", *rows, f"return %{length}"])


# -- would be wrong ------------------------------------------------------------------------------


def test_group_has_no_path_out_and_back() -> None:
    # %0 ──exp──> %1 ──neg──> %2 ───────────────mul──> %4 ──abs──> %5
    #                          └──cumsum──> %3 ──┘
    text = """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.neg.default(%1)
        %3: f32[9000] = aten.cumsum.default(%2, 0)
        %4: f32[9000] = aten.mul.Tensor(%2, %3)
        %5: f32[9000] = aten.abs.default(%4)
        return %5
        """
    assert fused(text) == [["exp", "neg"], ["mul", "abs"]]


def test_group_has_no_path_through_another_group() -> None:
    # %2, %3 are narrow, %4 is wide and reads them; %6 reads both, and can't join the narrow ones
    text = """
        %0: f32[9000] = input
        %1: f32[2, 9000] = input
        %2: f32[9000] = aten.exp.default(%0)
        %3: f32[9000] = aten.neg.default(%2)
        %4: f32[2, 9000] = aten.add.Tensor(%3, %1)
        %5: f32[9000] = aten.sum.dim_IntList(%4, [0])
        %6: f32[9000] = aten.mul.Tensor(%3, %5)
        return %6
        """
    assert fused(text) == [["exp", "neg"], ["add", "sum", "mul"]]


def test_a_write_waits_for_those_that_read_before_it() -> None:
    # cumsum reads %0 before neg_ writes it, so it comes before the whole group
    text = """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.cumsum.default(%0, 0)
        %3: f32[9000] = aten.neg_.default(%0) writes %0
        %4: f32[9000] = aten.add.Tensor(%3, %1)
        return %2, %4
        """
    assert fused(text) == [["exp", "neg_", "add"]]


SEEN_IN_PARTS = """
%0: f32[2, 9000] = input
%1: f32[9000]{offset} = aten.select.int(%0, 0, {row})
%2: f32[9000] = aten.exp.default(%1)
%3: f32[9000] = aten.neg.default(%2)
%4: f32[2, 9000] = aten.add.Tensor(%0, %3)
%5: f32[2, 9000] = aten.{op}.default(%0){writes}
%6: f32[2, 9000] = aten.mul.Tensor(%5, %4)
return %6
"""


@pytest.mark.parametrize("row", [0, 1])
def test_memory_that_is_written_is_seen_in_one_shape_only(row: int) -> None:
    # %0 ──select──> %1 ──exp──> ──neg──> %3        a fused node writes its operands at its end:
    #  └──neg_──> %5                                %1 must not be one of the same node
    offset = "+9000" if row else ""
    writes = SEEN_IN_PARTS.format(offset=offset, row=row, op="neg_", writes=" writes %0")
    assert fused(writes) == [["exp", "neg"], ["add", "neg_", "mul"]]


def test_read_of_part_is_not_fused_with_write_of_whole() -> None:
    # exp reads the first row, neg_ writes both rows: reading is before writing, but the two
    # are operands of different shapes in one memory
    text = """
        %0: f32[1, 90000] = input
        %1: f32[90000] = aten.select.int(%0, 0, 0)
        %2: f32[90000] = aten.exp.default(%1)
        %3: f32[90000] = aten.abs.default(%2)
        %4: f32[1, 90000] = aten.neg_.default(%0) writes %0
        %5: f32[1, 90000] = aten.add.Tensor(%4, %3)
        return %5
        """
    assert fused(text) == [["exp", "abs"], ["neg_", "add"]]


@pytest.mark.parametrize(
    "row",
    [
        "%2: f32[9000] = aten.rand_like.default(%1)",
        "%2: f32[9000] = aten.bernoulli.p(%1, 0.5)",
        "%2: f32[9000] = aten.cumsum.default(%1, 0)",
        "%2: f32[9000] = aten.flip.default(%1, [0])",
        "%2: f32[9000] = aten.view.default(%1, [9000])",
        "%2: f32[9000] = aten.clone.default(%1)",
        "%2: f32[9000] = aten.zeros_like.default(%1)",
    ],
)
def test_a_node_that_is_no_member_parts_a_chain(row: str) -> None:
    text = f"""
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        {row}
        %3: f32[9000] = aten.neg.default(%2)
        return %3
        """
    keeps(FUSE, text)


@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_complex_numbers_are_left_to_torch(dtype: str) -> None:
    keeps(FUSE, chain(9, f"{dtype}[9000]"))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i64", "f64"])
def test_ordinary_dtypes_are_fused(dtype: str) -> None:
    assert fused(chain(3, f"{dtype}[30000]")) == [["neg"] * 3]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i32", "i64"])
def test_run_time_numbers_need_an_exact_dtype(dtype: str) -> None:
    # torch keeps the number in a wider type than the tensor's
    number = "int" if dtype[0] == "i" else "float"
    keeps(
        FUSE,
        f"""
        %0: {dtype}[90000] = input
        $0: {number} = param
        %1: {dtype}[90000] = aten.mul.Tensor(%0, $0)
        %2: {dtype}[90000] = aten.add.Tensor(%1, $0)
        return %2
        """,
    )


# -- would be too much, or not worth it ----------------------------------------------------------


@pytest.mark.parametrize("length", [MAX_MEMBERS, MAX_MEMBERS + 1, 2 * MAX_MEMBERS + 5])
def test_a_group_has_only_so_many_members(length: int) -> None:
    sizes = [len(group) for group in fused(chain(length, "f32[9000]"))]
    whole, rest = divmod(length, MAX_MEMBERS)
    assert sizes == [MAX_MEMBERS] * whole + ([rest] if rest > 1 else [])


def test_two_full_groups_that_meet_stay_two() -> None:
    half = MAX_MEMBERS // 2 + 1
    rows = ["%0: f32[9000] = input"]
    rows += [f"%{n}: f32[9000] = aten.neg.default(%{n - 1})" for n in range(1, half + 1)]
    rows += [f"%{half + 1}: f32[9000] = aten.abs.default(%0)"]
    rows += [f"%{n}: f32[9000] = aten.abs.default(%{n - 1})" for n in range(half + 2, 2 * half + 1)]
    last = 2 * half + 1
    rows += [f"%{last}: f32[9000] = aten.add.Tensor(%{half}, %{2 * half})", f"return %{last}"]
    assert sorted(len(group) for group in fused("\n".join(rows))) == [half, half + 1]


def test_small_tensors_need_many_members() -> None:
    # what launches cost against one call; memory counts for nothing here
    enough = int(PRICES.call / PRICES.launch) + 2
    keeps(FUSE, chain(enough - 1, "f32[2]"))
    assert fused(chain(enough, "f32[2]")) == [["neg"] * enough]


def test_two_members_need_large_tensors() -> None:
    # one temporary less is written and read: 8 bytes an element
    enough = int((PRICES.call - PRICES.launch) / (8 * PRICES.byte))
    keeps(FUSE, chain(2, f"f32[{enough - 1}]"))
    assert fused(chain(2, f"f32[{enough + 2}]")) == [["neg"] * 2]


def test_a_temporary_that_others_need_saves_half() -> None:
    # %1 is written, as it is returned; only reading it again is saved
    text = """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.neg.default(%1)
        return %1, %2
        """
    keeps(FUSE, text)
    around = GroupContext(graph_of(text))
    saved = PRICES.launch + 4 * 9000 * PRICES.byte
    assert compile_gain(around, [0, 1], PRICES) == pytest.approx(saved - PRICES.call)


def test_one_node_is_no_group() -> None:
    keeps(FUSE, chain(1, "f32[1000000]"))


def test_fused_nodes_are_not_fused_again() -> None:
    graph = graph_of(chain(3, "f32[9000]"))
    made = FUSE.run(graph)
    assert [node.op for node in made.nodes] == [FUSED]
    assert FUSE.run(made) is made


def test_gradients_are_added_up_as_they_come() -> None:
    # fused, the second of three products would be kept until the third
    text = """
        %0: f32[90, 90] = input
        %1: f32[90, 90] = aten.mm.default(%0, %0)
        %2: f32[90, 90] = aten.mm.default(%1, %0)
        %3: f32[90, 90] = aten.add.Tensor(%1, %2)
        %4: f32[90, 90] = aten.mm.default(%0, %0)
        %5: f32[90, 90] = aten.add.Tensor(%3, %4)
        return %5
        """
    keeps(FUSE, text)
    # small ones may be kept
    assert candidates_of(text) == [["add"], ["add"]]
    assert candidates_of(text.replace("90", "4")) == [["add", "add"]]
