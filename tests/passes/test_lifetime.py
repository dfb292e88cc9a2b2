"""lifetime: results are written over operands that die, and over nothing else."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.graph.alias import IN_PLACE
from lazygt.passes.lifetime import Lifetime
from lazygt.runtime.plan import Plan
from tests.passes.tools import check_numbers, graph_of, keeps

LIFETIME = Lifetime()


def test_chain_reuses_one_buffer() -> None:
    # %0 ──exp──> %1 ──neg──> %2 ──tanh──> %3       %0 is the client's: exp makes memory
    #              └── its ───┴── memory ──┘
    check_numbers(
        LIFETIME,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[2, 3] = aten.neg.default(%1)
        %3: f32[2, 3] = aten.tanh.default(%2)
        return %3
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[2, 3] = aten.neg_.default(%1) writes %1
        %3: f32[2, 3] = aten.tanh_.default(%2) writes %2
        return %3
        """,
    )


PREPARED = """
%0: f32[2, 3] = input
$0: float = param
%1: f32[2, 3] = aten.exp.default(%0)
%2: f32[2, 3] = {}
return %2
"""


@pytest.mark.parametrize(
    ("call", "writing"),
    [
        ("aten.mul.Tensor(%1, $0)", "aten.mul_.Tensor(%1, $0)"),
        ("aten.add.Tensor(%1, %0, alpha=$0)", "aten.add_.Tensor(%1, %0, alpha=$0)"),
        ("aten.mul.Tensor(%1, %1)", "aten.mul_.Tensor(%1, %1)"),
        # not the first operand, or no in-place overload: the one with `out`
        ("aten.sub.Tensor(%0, %1)", "aten.sub.out(%0, %1, out=%1)"),
        (
            "aten.addcmul.default(%0, %0, %1, value=$0)",
            "aten.addcmul.out(%0, %0, %1, value=$0, out=%1)",
        ),
        ("aten.maximum.default(%1, %0)", "aten.maximum.out(%1, %0, out=%1)"),
        ("aten.pow.Tensor_Scalar(%1, $0)", "aten.pow.Tensor_Scalar_out(%1, $0, out=%1)"),
        ("aten.rsub.Scalar(%1, $0)", "aten.rsub.Scalar_out(%1, $0, out=%1)"),
        (
            "aten.clone.default(%1, memory_format=torch.contiguous_format)",
            "aten.clone.out(%1, memory_format=torch.contiguous_format, out=%1)",
        ),
        (
            "aten.tanh_backward.default(%0, %1)",
            "aten.tanh_backward.grad_input(%0, %1, grad_input=%1)",
        ),
    ],
)
def test_each_op_has_its_own_way_to_write(call: str, writing: str) -> None:
    check_numbers(LIFETIME, PREPARED.format(call), PREPARED.format(f"{writing} writes %1"))


def test_first_of_two_dying_operands_is_reused() -> None:
    check_numbers(
        LIFETIME,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%0)
        %3: f32[4] = aten.add.Tensor(%2, %1)
        return %3
        """,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%0)
        %3: f32[4] = aten.add_.Tensor(%2, %1) writes %2
        return %3
        """,
    )


def test_the_one_of_the_results_shape_is_taken() -> None:
    check_numbers(
        LIFETIME,
        """
        %0: f32[3] = input
        %1: f32[2, 3] = input
        %2: f32[3] = aten.exp.default(%0)
        %3: f32[2, 3] = aten.exp.default(%1)
        %4: f32[2, 3] = aten.mul.Tensor(%2, %3)
        return %4
        """,
        """
        %0: f32[3] = input
        %1: f32[2, 3] = input
        %2: f32[3] = aten.exp.default(%0)
        %3: f32[2, 3] = aten.exp.default(%1)
        %4: f32[2, 3] = aten.mul.out(%2, %3, out=%3) writes %3
        return %4
        """,
    )


def test_through_a_view_that_shows_all_of_its_dying_base() -> None:
    # %0 ──exp──> %1 ──t──> %2 ──neg──> %3
    check_numbers(
        LIFETIME,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[3, 2]@(1, 3) = aten.t.default(%1)
        %3: f32[3, 2]@(1, 3) = aten.neg.default(%2)
        return %3
        """,
        """
        %0: f32[2, 3] = input
        %1: f32[2, 3] = aten.exp.default(%0)
        %2: f32[3, 2]@(1, 3) = aten.t.default(%1)
        %3: f32[3, 2]@(1, 3) = aten.neg_.default(%2) writes %2
        return %3
        """,
    )


def test_an_input_that_the_run_owns_anyway() -> None:
    # a write in place: the run owns %0, or has copied it
    check_numbers(
        LIFETIME,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        %2: f32[4] = aten.exp.default(%1)
        return %2
        """,
        """
        %0: f32[4] = input
        $0: float = param
        %1: f32[4] = aten.add_.Tensor(%0, $0) writes %0
        %2: f32[4] = aten.exp_.default(%1) writes %1
        return %2
        """,
    )


@pytest.mark.parametrize("shape", ["", "1", "0", "2, 0"])
def test_tensors_of_hardly_any_elements(shape: str) -> None:
    before = f"%0: f32[{shape}] = input\n%1: f32[{shape}] = aten.exp.default(%0)\n"
    check_numbers(
        LIFETIME,
        f"{before}%2: f32[{shape}] = aten.neg.default(%1)\nreturn %2",
        f"{before}%2: f32[{shape}] = aten.neg_.default(%1) writes %1\nreturn %2",
    )


def test_prepared_write_is_in_place() -> None:
    graph = graph_of(PREPARED.format("aten.sub.Tensor(%0, %1)"))
    steps = Plan.build(LIFETIME.run(graph)).steps
    assert steps.writes.modes[-1] == (IN_PLACE,)
    assert steps.writes.overwritten_inputs == ()


# -- what must not change ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        # the operand is an input, an output, or read again
        "%1: f32[2, 2] = aten.neg.default(%0)\nreturn %1",
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2, 2] = aten.neg.default(%1)\nreturn %2, %1",
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2, 2] = aten.neg.default(%1)\n"
        "%3: f32[] = aten.sum.default(%1)\nreturn %2, %3",
        # read again by a draw
        "%1: f32[2, 2] = aten.sigmoid.default(%0)\n%2: f32[2, 2] = aten.neg.default(%1)\n"
        "%3: f32[2, 2] = aten.rand_like.default(%1)\nreturn %2, %3",
        # a view of an input is an input's memory
        "%1: f32[2, 2]@(1, 2) = aten.t.default(%0)\n"
        "%2: f32[2, 2]@(1, 2) = aten.neg.default(%1)\nreturn %2",
        # a view of it is read later
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2, 2]@(1, 2) = aten.t.default(%1)\n"
        "%3: f32[2, 2] = aten.neg.default(%1)\n%4: f32[] = aten.sum.default(%2)\n"
        "return %3, %4",
        # its base is read later
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2, 2]@(1, 2) = aten.t.default(%1)\n"
        "%3: f32[2, 2]@(1, 2) = aten.neg.default(%2)\n%4: f32[] = aten.sum.default(%1)\n"
        "return %3, %4",
        # a view of it is an output
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[4] = aten.view.default(%1, [4])\n"
        "%3: f32[2, 2] = aten.neg.default(%1)\nreturn %3, %2",
        # the other operand shows the same memory in another order
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2, 2]@(1, 2) = aten.t.default(%1)\n"
        "%3: f32[2, 2] = aten.add.Tensor(%1, %2)\nreturn %3",
        "%1: f32[2, 2] = aten.exp.default(%0)\n%2: f32[2] = aten.select.int(%1, 0, 0)\n"
        "%3: f32[2, 2] = aten.mul.Tensor(%1, %2)\nreturn %3",
    ],
)
def test_memory_in_use_is_not_reused(rows: str) -> None:
    keeps(LIFETIME, f"%0: f32[2, 2] = input\n{rows}")


@pytest.mark.parametrize(
    "rows",
    [
        # part of a larger memory, which would stay alive
        "%1: f32[4, 4] = aten.exp.default(%0)\n%2: f32[4] = aten.select.int(%1, 0, 0)\n"
        "%3: f32[4] = aten.neg.default(%2)\nreturn %3",
        "%1: f32[4, 4] = aten.exp.default(%0)\n%2: f32[4]+4 = aten.select.int(%1, 0, 1)\n"
        "%3: f32[4] = aten.neg.default(%2)\nreturn %3",
        # one element seen four times
        "%1: f32[] = aten.sum.default(%0)\n%2: f32[4]@(0) = aten.expand.default(%1, [4])\n"
        "%3: f32[4] = aten.neg.default(%2)\nreturn %3",
        # inner elements seen twice
        "%1: f32[4] = aten.sum.dim_IntList(%0, [0])\n"
        "%2: f32[2, 2]@(1, 1) = aten.as_strided.default(%1, [2, 2], [1, 1])\n"
        "%3: f32[2, 2] = aten.neg.default(%2)\nreturn %3",
        # another dtype, another shape
        "%1: i64[4, 4] = aten._to_copy.default(%0, dtype=torch.int64)\n"
        "%2: f32[4, 4] = aten.mul.Tensor(%1, 2.0)\nreturn %2",
        "%1: f32[4, 4] = aten.exp.default(%0)\n%2: b8[4, 4] = aten.gt.Scalar(%1, 1)\nreturn %2",
        "%1: f32[4] = aten.sum.dim_IntList(%0, [0])\n%2: f32[4, 4] = aten.add.Tensor(%1, %0)\n"
        "return %2",
        # the bits of floats, taken for whole numbers
        "%1: f32[4, 4] = aten.exp.default(%0)\n"
        "%2: i32[4, 4] = aten.view.dtype(%1, torch.int32)\n"
        "%3: i32[4, 4] = aten.bitwise_not.default(%2)\nreturn %3",
        # a conjugate that is not yet computed
        "%1: c64[4, 4] = aten._to_copy.default(%0, dtype=torch.complex64)\n"
        "%2: c64[4, 4]~conj = aten._conj.default(%1)\n"
        "%3: c64[4, 4] = aten.exp.default(%2)\nreturn %3",
        # a kernel that rounds otherwise in place
        "%1: c64[4, 4] = aten._to_copy.default(%0, dtype=torch.complex64)\n"
        "%2: c64[4, 4] = aten.exp.default(%1)\n"
        "%3: c64[4, 4] = aten.div.Tensor(%1, %2)\nreturn %3",
    ],
)
def test_memory_that_does_not_fit(rows: str) -> None:
    keeps(LIFETIME, f"%0: f32[4, 4] = input\n{rows}")


@pytest.mark.parametrize(
    "call",
    [
        "aten.rand_like.default(%1)",
        "aten.cumsum.default(%1, 0)",
        "aten._softmax.default(%1, 1, False)",
        "aten.flip.default(%1, [0])",
        "aten.neg_.default(%1) writes %1",
    ],
)
def test_only_pointwise_ops(call: str) -> None:
    keeps(LIFETIME, PREPARED.replace("$0: float = param\n", "").format(call))


def test_final_data_dependent_op_keeps_its_operand() -> None:
    keeps(
        LIFETIME,
        """
        %0: f32[4] = input
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%1)
        %3: none = aten.nonzero.default(%1) dynamic
        return %2
        """,
    )


def test_held_values_match_eager_torch() -> None:
    def work(device: str) -> list[torch.Tensor]:
        x = torch.arange(6.0, device=device).view(2, 3)
        held = x.exp()
        row = held[0]
        made = (held.neg() + 1).tanh() * row
        row.mul_(2)
        return [held.cpu(), row.cpu(), made.cpu()]

    with lazygt.session(launcher="inline"):
        found = work("lazygt")
    assert all(map(torch.equal, found, work("cpu")))
