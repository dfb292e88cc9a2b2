"""fuse: which nodes become one, in which order, and what the fused node looks like.

What stays apart is in ``test_fuse_limits``.
"""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.graph import Graph
from lazygt.graph.fusion import expand_fused
from lazygt.graph.node import FUSED
from lazygt.passes.fuse import Fuse
from tests.passes.tools import check_numbers, difference, graph_of, same_numbers

FUSE = Fuse()


def opens_to_itself(text: str, fused: int = 1) -> Graph:
    """Assert that fusing and opening gives the same nodes in the same order; the fused graph."""
    graph = graph_of(text)
    made = FUSE.run(graph)
    assert [node.op for node in made.nodes].count(FUSED) == fused, str(made)
    opened = expand_fused(made)
    assert str(opened) == str(graph), difference(str(graph), str(opened))
    same_numbers(graph, made)
    return made


def test_a_chain_is_one_node() -> None:
    # %0 ──mul──> %1 ──exp──> %2 ──neg──> %3        %1 and %2 never leave the node
    check_numbers(
        FUSE,
        """
        %0: f32[9000] = input
        $0: float = param
        %1: f32[9000] = aten.mul.Tensor(%0, $0)
        %2: f32[9000] = aten.exp.default(%1)
        %3: f32[9000] = aten.neg.default(%2)
        return %3
        """,
        """
        %0: f32[9000] = input
        $0: float = param
        %1: f32[9000] = lazygt.fused(%0, $0) {
          %0: f32[9000] = input
          $0: float = param
          %1: f32[9000] = aten.mul.Tensor(%0, $0)
          %2: f32[9000] = aten.exp.default(%1)
          %3: f32[9000] = aten.neg.default(%2)
          return %3
        }
        return %1
        """,
    )


def test_value_with_other_readers_is_result_of_fused_node() -> None:
    # %0 ──exp──> %1 ──neg──> %2 ──> return
    #              └──cumsum──> %3 ──> return
    check_numbers(
        FUSE,
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.neg.default(%1)
        %3: f32[9000] = aten.abs.default(%2)
        %4: f32[9000] = aten.cumsum.default(%1, 0)
        return %3, %4
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000], %2: f32[9000] = lazygt.fused(%0) {
          %0: f32[9000] = input
          %1: f32[9000] = aten.exp.default(%0)
          %2: f32[9000] = aten.neg.default(%1)
          %3: f32[9000] = aten.abs.default(%2)
          return %1, %3
        }
        %3: f32[9000] = aten.cumsum.default(%1, 0)
        return %2, %3
        """,
    )


def test_numbers_and_operands_come_in_the_order_of_their_use() -> None:
    check_numbers(
        FUSE,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        $1: float = param
        %2: f32[9000] = aten.mul.Tensor(%1, $1)
        %3: f32[9000] = aten.add.Tensor(%2, %0, alpha=$0)
        %4: f32[9000] = aten.mul.Tensor(%3, $1)
        return %4
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        $1: float = param
        %2: f32[9000] = lazygt.fused(%1, %0, $1, $0) {
          %0: f32[9000] = input
          %1: f32[9000] = input
          $0: float = param
          $1: float = param
          %2: f32[9000] = aten.mul.Tensor(%0, $0)
          %3: f32[9000] = aten.add.Tensor(%2, %1, alpha=$1)
          %4: f32[9000] = aten.mul.Tensor(%3, $0)
          return %4
        }
        return %2
        """,
    )


def test_written_value_is_write_of_fused_node() -> None:
    # %0 ──mul_──> %2 ──add_──> %3: only the last version of %0 leaves the node
    check_numbers(
        FUSE,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        %2: f32[9000] = aten.mul_.Tensor(%0, $0) writes %0
        %3: f32[9000] = aten.add_.Tensor(%2, %1) writes %2
        %4: f32[9000] = aten.exp.default(%3)
        return %3, %4
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        %2: f32[9000], %3: f32[9000] = lazygt.fused(%0, %1, $0) writes %0 {
          %0: f32[9000] = input
          %1: f32[9000] = input
          $0: float = param
          %2: f32[9000] = aten.mul_.Tensor(%0, $0) writes %0
          %3: f32[9000] = aten.add_.Tensor(%2, %1) writes %2
          %4: f32[9000] = aten.exp.default(%3)
          return %4, %3
        }
        return %3, %2
        """,
    )


def test_a_version_in_between_that_others_read_is_a_result() -> None:
    # cumsum reads %1, which the second write makes another version of
    made = opens_to_itself(
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp_.default(%0) writes %0
        %2: f32[9000] = aten.neg_.default(%1) writes %1
        %3: f32[9000] = aten.abs_.default(%2) writes %2
        %4: f32[9000] = aten.cumsum.default(%1, 0)
        return %3, %4
        """
    )
    (fused, _) = made.nodes
    assert (len(fused.fresh), fused.writes) == (1, (0,))


def test_an_old_version_may_be_read_after_the_write() -> None:
    # neg reads %0 as it was before exp_
    opens_to_itself(
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp_.default(%0) writes %0
        %2: f32[9000] = aten.neg.default(%0)
        %3: f32[9000] = aten.add.Tensor(%1, %2)
        return %3
        """
    )


def test_memory_made_inside_is_no_operand() -> None:
    made = opens_to_itself(
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.neg_.default(%1) writes %1
        %3: f32[9000] = aten.abs_.default(%2) writes %2
        return %3
        """
    )
    assert made.nodes[0].writes == ()


def test_run_time_numbers_in_ops_that_write_to_a_given_tensor() -> None:
    """``1 - (y + n * x)`` on memory that lifetime has found."""
    opens_to_itself(
        """
        %0: f32[9000] = input
        $0: float = param
        $1: int = param
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.add.out(%0, %1, alpha=$0, out=%1) writes %1
        %3: f32[9000] = aten.rsub.Scalar_out(%2, $1, out=%2) writes %2
        return %3
        """
    )


def test_handwritten_softmax_is_one_group() -> None:
    # %0 ──amax──> %1        a reduction, then as wide again as what the group has seen
    #  └───────sub──> %2 ──exp──> %3 ──sum──> %4
    #                              └────────div──> %5
    opens_to_itself(
        """
        %0: f32[90, 100] = input
        %1: f32[90, 1] = aten.amax.default(%0, [1], True)
        %2: f32[90, 100] = aten.sub.Tensor(%0, %1)
        %3: f32[90, 100] = aten.exp.default(%2)
        %4: f32[90, 1] = aten.sum.dim_IntList(%3, [1], True)
        %5: f32[90, 100] = aten.div.Tensor(%3, %4)
        return %5
        """
    )


def test_chains_that_meet_are_one_group() -> None:
    # %0 ──exp──> %2 ──┐
    # %1 ──neg──> %3 ─add──> %4        in the walk they are two groups until they meet
    opens_to_itself(
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000] = aten.exp.default(%0)
        %3: f32[9000] = aten.neg.default(%1)
        %4: f32[9000] = aten.add.Tensor(%2, %3)
        return %4
        """
    )


def test_a_group_stands_where_its_last_member_stood() -> None:
    # draws between the members: they come first, in their order
    text = """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)
        %2: f32[9000] = aten.rand_like.default(%0)
        %3: f32[9000] = aten.neg.default(%1)
        %4: f32[9000] = aten.randn_like.default(%0)
        %5: f32[9000] = aten.abs.default(%3)
        return %2, %4, %5
        """
    graph = graph_of(text)
    made = FUSE.run(graph)
    assert [node.op for node in made.nodes] == [
        "aten.rand_like.default",
        "aten.randn_like.default",
        FUSED,
    ]
    same_numbers(graph, made)


def test_lines_and_origins_of_the_members() -> None:
    graph = graph_of(
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.exp.default(%0)  # train.py:1
        %2: f32[9000] = aten.cumsum.default(%0, 0)  # train.py:2
        %3: f32[9000] = aten.neg.default(%1)  # train.py:3
        return %2, %3
        """
    )
    made = FUSE.run(graph)
    assert made.nodes[1].body is not None
    assert made.nodes[1].body.lines == ("train.py:1", "train.py:3")
    assert made.nodes[1].body.origins == (0, 2)
    opened = expand_fused(made)
    assert opened.lines == ("train.py:2", "train.py:1", "train.py:3")
    assert opened.origins == (1, 0, 2)


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_a_script_computes_the_same_bits_before_it_is_compiled(
    compile: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path))

    def work(device: str) -> torch.Tensor:
        x = torch.arange(9000.0, device=device) / 9000
        for _ in range(3):
            x = 1 - (x * 1.5 + 0.25).tanh() ** 2
        return (x.sum() + x).cpu()

    with lazygt.session(launcher="inline", compile=compile) as s:
        found = work("lazygt")
        assert any(n.op == FUSED for p in s.plans() for n in p.graph.nodes)
    assert torch.equal(found, work("cpu"))
