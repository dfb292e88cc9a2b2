"""split_foreach: horizontal ops taken apart."""

from __future__ import annotations

from lazygt.passes.sharding.rules.pointwise import SplitForeach
from tests.passes.tools import check_numbers, graph_of, keeps


def test_an_op_in_place() -> None:
    check_numbers(
        SplitForeach(),
        """
        %0: f32[2] = input
        %1: f32[3] = input
        $0: float = param
        %2: f32[2], %3: f32[3] = aten._foreach_mul_.Scalar([%0, %1], $0) writes %0, %1
        return %3, %2
        """,
        """
        %0: f32[2] = input
        %1: f32[3] = input
        $0: float = param
        %2: f32[2] = aten.mul_.Tensor(%0, $0) writes %0
        %3: f32[3] = aten.mul_.Tensor(%1, $0) writes %1
        return %3, %2
        """,
    )


def test_norms() -> None:
    check_numbers(
        SplitForeach(),
        """
        %0: f32[2] = input
        %1: f32[3] = input
        %2: f32[], %3: f32[] = aten._foreach_norm.Scalar([%0, %1])
        return %2, %3
        """,
        """
        %0: f32[2] = input
        %1: f32[3] = input
        %2: f32[] = aten.linalg_vector_norm.default(%0)
        %3: f32[] = aten.linalg_vector_norm.default(%1)
        return %2, %3
        """,
    )


STEP = (
    "weight_decay=0.25, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False, "
    "is_first_step=True"
)


def test_a_fused_step() -> None:
    """torch says that it writes the gradients too."""
    op = "aten._fused_sgd_.default"
    results = "%4: f32[2], %5: f32[3], %6: f32[2], %7: f32[3]"
    check_numbers(
        SplitForeach(),
        f"""
        %0: f32[2] = input
        %1: f32[3] = input
        %2: f32[2] = input
        %3: f32[3] = input
        {results} = {op}([%0, %1], [%2, %3], [], {STEP}) writes %0, %1, %2, %3
        return %4, %5, %6, %7
        """,
        f"""
        %0: f32[2] = input
        %1: f32[3] = input
        %2: f32[2] = input
        %3: f32[3] = input
        %4: f32[2], %5: f32[2] = {op}([%0], [%2], [], {STEP}) writes %0, %2
        %6: f32[3], %7: f32[3] = {op}([%1], [%3], [], {STEP}) writes %1, %3
        return %4, %6, %5, %7
        """,
    )


def test_graph_without_foreach_is_unchanged() -> None:
    keeps(SplitForeach(), "%0: f32[2] = input\n%1: f32[2] = aten.mul.Tensor(%0, 2.0)\nreturn %1")
    graph = graph_of("%0: f32[2] = input\n%1: f32[2] = aten.neg.default(%0)\nreturn %1")
    assert SplitForeach().run(graph) is graph


def test_tensors_that_meet_stay_together() -> None:
    """The second sum takes what the first one wrote."""
    op = "aten._foreach_add_.List"
    keeps(
        SplitForeach(),
        f"""
        %0: f32[2] = input
        %1: f32[2] = input
        %2: f32[2], %3: f32[2] = {op}([%0, %1], [%1, %0]) writes %0, %1
        return %2, %3
        """,
    )
