"""dce: what nobody reads goes, what does more than compute stays."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.passes.cse import DeadCode
from tests.passes.tools import check, check_numbers, graph_of, keeps

DCE = DeadCode()


def test_a_dead_chain_goes_from_its_end() -> None:
    # %0 ──exp──> %1 ──neg──> %2        nobody reads %2, then nobody reads %1
    #    └──tanh─> %3 ──> return
    check_numbers(
        DCE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%1)
        %3: f32[4] = aten.tanh.default(%0)
        return %3
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.tanh.default(%0)
        return %1
        """,
    )


def test_a_dead_write_goes_and_the_old_version_stays() -> None:
    # %0 ──exp──> %1 ──add_──> %2       %2 is never read: %1 needs no writing
    #              └──> return
    check_numbers(
        DCE,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.add_.Tensor(%1, $0) writes %1
        return %1
        """,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.exp.default(%0)
        return %1
        """,
    )


def test_a_dead_view_of_a_written_base_goes() -> None:
    # %0 ──select──> %1     (dead)
    #  └──add_──> %2 ──> return
    check_numbers(
        DCE,
        """
        %0: f32[2, 3] = input
        $0: float = param
        %1: f32[3] = aten.select.int(%0, 0, 0)
        %2: f32[2, 3] = aten.add_.Tensor(%0, $0) writes %0
        return %2
        """,
        """
        %0: f32[2, 3] = input
        $0: float = param
        %1: f32[2, 3] = aten.add_.Tensor(%0, $0) writes %0
        return %1
        """,
    )


def test_one_used_result_keeps_node_and_its_writes() -> None:
    # max_pool gives values and indices; only the indices are read, the node stays whole
    keeps(
        DCE,
        """
        %0: f32[1, 1, 4] = input
        %1: f32[1, 1, 1, 4] = aten.unsqueeze.default(%0, 2)
        %2: f32[1, 1, 1, 2], %3: i64[1, 1, 1, 2] = \
aten.max_pool2d_with_indices.default(%1, [1, 2], [1, 2])
        return %3
        """,
    )


def test_a_write_back_is_needed_for_its_base() -> None:
    # %0 ──select──> %1 ──add_──> %2
    #  └──────── write_back ───────┴──> %3 ──> return
    keeps(
        DCE,
        """
        %0: f32[2, 3] = input
        $0: float = param
        %1: f32[3] = aten.select.int(%0, 0, 0)
        %2: f32[3] = aten.add_.Tensor(%1, $0) writes %1
        %3: f32[2, 3] = lazygt.write_back(%0, %2, [['aten.select.int', 0, [None, 0, 0], [], 0]])
        return %3
        """,
    )


def test_unread_write_back_is_removed_with_its_write() -> None:
    check_numbers(
        DCE,
        """
        %0: f32[2, 3] = input
        $0: float = param
        %1: f32[3] = aten.select.int(%0, 0, 0)
        %2: f32[3] = aten.add_.Tensor(%1, $0) writes %1
        %3: f32[2, 3] = lazygt.write_back(%0, %2, [['aten.select.int', 0, [None, 0, 0], [], 0]])
        return %0
        """,
        """
        %0: f32[2, 3] = input
        $0: float = param
        return %0
        """,
    )


@pytest.mark.parametrize(
    "draw",
    [
        "%1: f32[4] = aten.rand_like.default(%0)",
        "%1: f32[4] = aten.bernoulli.p(%0, 0.5)",
        "%1: f32[4], %2: b8[4] = aten.native_dropout.default(%0, 0.5, True)",
        "%1: f32[4] = aten.normal_.default(%0) writes %0",
        "%1: u8[5056] = lazygt.get_rng_state(device)",
        "_ = lazygt.manual_seed(device, 7)",
    ],
)
def test_a_dead_random_op_stays(draw: str) -> None:
    # the numbers of the op after it must not depend on who is alive
    made = draw.count(": ")
    keeps(
        DCE,
        f"""
        %0: f32[4] = input
        {draw}
        %{made + 1}: f32[4] = aten.rand_like.default(%0)
        return %{made + 1}
        """,
    )


def test_inputs_of_dead_random_op_are_kept() -> None:
    # %0 ──sigmoid──> %1 ──bernoulli──> %2 (dead)       ──exp──> %3 (dead, goes)
    check_numbers(
        DCE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.ones_like.default(%0)
        %2: f32[4] = aten.bernoulli.default(%1)
        %3: f32[4] = aten.exp.default(%1)
        %4: f32[4] = aten.rand_like.default(%0)
        return %4
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.ones_like.default(%0)
        %2: f32[4] = aten.bernoulli.default(%1)
        %3: f32[4] = aten.rand_like.default(%0)
        return %3
        """,
    )


@pytest.mark.parametrize(
    "last",
    [
        "_ = aten.nonzero.default(%0) dynamic",
        "_ = aten._local_scalar_dense.default(%0) dynamic",
        "_ = aten._assert_async.msg(%0, 'must not be zero')",
    ],
)
def test_an_op_somebody_waits_for_stays(last: str) -> None:
    keeps(DCE, f"%0: i64[] = input\n{last}\nreturn")


def test_lines_and_origins_move_along() -> None:
    made = check(
        DCE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)  # train.py:1
        %2: f32[4] = aten.neg.default(%0)  # train.py:2
        %3: f32[4] = aten.tanh.default(%2)  # train.py:3
        return %3
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.neg.default(%0)  # train.py:2
        %2: f32[4] = aten.tanh.default(%1)  # train.py:3
        return %2
        """,
    )
    assert made.origins == (1, 2)


def test_nothing_wanted_leaves_nothing() -> None:
    check(
        DCE,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        return
        """,
        """
        %0: f32[4] = input
        return
        """,
    )


def test_a_fused_node_is_judged_by_its_results() -> None:
    fused = """\
graph {
  %0: f32[4] = input
  %1: f32[4] = lazygt.fused(%0) {
    %0: f32[4] = input
    %1: f32[4] = aten.exp.default(%0)
    return %1
  }
  return %VALUE
}"""
    keeps(DCE, fused.replace("VALUE", "1"))
    dropped = DCE.run(graph_of(fused.replace("VALUE", "0")))
    assert dropped.nodes == ()


def test_a_dead_draw_moves_the_generator_of_a_session() -> None:
    """Seen from a script: a random tensor that dies unread still draws."""

    def drawn() -> list[float]:
        torch.manual_seed(1)
        torch.rand(3)
        return torch.rand(3).tolist()

    with lazygt.session(launcher="inline"):
        lazily = drawn()
    assert lazily == drawn()
