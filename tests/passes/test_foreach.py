"""foreach: horizontal ops on large tensors become one node a tensor, if no part reads another."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.passes.foreach import SMALL, Foreach
from tests.passes.tools import check_numbers, keeps

FOREACH = Foreach()
#: Elements of the smallest large tensor.
MORE = SMALL // 4 + 1


def inputs(*shapes: str) -> str:
    """Rows for f32 inputs of these shapes."""
    return "\n".join(f"%{n}: f32[{shape}] = input" for n, shape in enumerate(shapes))


def test_arguments_left_out_stay_left_out() -> None:
    # torch.nn.utils.clip_grad_norm_ asks for the norm's own default, 2
    check_numbers(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[], %3: f32[] = aten._foreach_norm.Scalar([%0, %1])
        return %2, %3
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[] = aten.linalg_vector_norm.default(%0)
        %3: f32[] = aten.linalg_vector_norm.default(%1)
        return %2, %3
        """,
    )


def test_keywords_go_along() -> None:
    check_numbers(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        %2: f32[9000], %3: f32[9000] = aten._foreach_add.List([%0, %1], [%1, %1], alpha=$0)
        return %2, %3
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        $0: float = param
        %2: f32[9000] = aten.add.Tensor(%0, %1, alpha=$0)
        %3: f32[9000] = aten.add.Tensor(%1, %1, alpha=$0)
        return %2, %3
        """,
    )


def test_a_tensor_twice_in_the_list() -> None:
    check_numbers(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000], %2: f32[9000] = aten._foreach_mul.List([%0, %0], [%0, %0])
        return %1, %2
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = aten.mul.Tensor(%0, %0)
        %2: f32[9000] = aten.mul.Tensor(%0, %0)
        return %1, %2
        """,
    )


def test_foreach_member_may_read_its_own_target() -> None:
    check_numbers(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000], %3: f32[9000] = aten._foreach_add_.List([%0, %1], [%0, %1]) writes %0, %1
        return %2, %3
        """,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000] = aten.add_.Tensor(%0, %0) writes %0
        %3: f32[9000] = aten.add_.Tensor(%1, %1) writes %1
        return %2, %3
        """,
    )


@pytest.mark.parametrize(
    "call",
    [
        "aten._foreach_add_.List([%0, %1], [%2, %0])",  # %1 gets the new %0
        "aten._foreach_add_.List([%0, %1], [%1, %0])",
        "aten._foreach_add_.List([%0, %1], [%2, %3])",  # %3 lies in the memory of %0
        "aten._foreach_copy_.default([%0, %1], [%1, %0])",
    ],
)
def test_foreach_member_reading_target_of_another_is_kept(call: str) -> None:
    keeps(
        FOREACH,
        f"""
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000] = input
        %3: f32[9000] = aten.alias.default(%0)
        %4: f32[9000], %5: f32[9000] = {call} writes %0, %1
        return %4, %5
        """,
    )


def test_a_factor_that_is_written_stays() -> None:
    # %1 is multiplied with the square of %0
    keeps(
        FOREACH,
        """
        %0: f32[] = input
        %1: f32[9000] = input
        %2: f32[], %3: f32[9000] = aten._foreach_mul_.Tensor([%0, %1], %0) writes %0, %1
        return %2, %3
        """,
    )


def test_one_tensor_written_twice_stays() -> None:
    keeps(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000], %2: f32[9000] = aten._foreach_exp_.default([%0, %0]) writes %0, %0
        return %2
        """,
    )


@pytest.mark.parametrize("shapes", [("4096", "4096"), ("3", "0", "2, 2", "")])
def test_small_tensors_stay_together(shapes: tuple[str, ...]) -> None:
    refs = ", ".join(f"%{n}" for n in range(len(shapes)))
    names = [f"%{n}" for n in range(len(shapes), 2 * len(shapes))]
    made = ", ".join(f"{name}: f32[{shape}]" for name, shape in zip(names, shapes, strict=True))
    keeps(
        FOREACH,
        f"{inputs(*shapes)}\n{made} = aten._foreach_exp.default([{refs}])\n"
        f"return {', '.join(names)}",
    )


def test_an_op_without_a_form_stays() -> None:
    keeps(
        FOREACH,
        """
        %0: f32[9000] = input
        %1: f32[9000] = input
        %2: f32[9000], %3: f32[9000] = aten._foreach_erf.default([%0, %1])
        return %2, %3
        """,
    )


def test_a_script_with_tensors_that_read_each_other() -> None:
    def work(device: str, size: int) -> list[torch.Tensor]:
        a, b = torch.arange(float(size), device=device), torch.ones(size, device=device) * 2
        torch._foreach_add_([a, b], [b, a])
        norms = torch._foreach_norm([a, b])
        return [t.cpu() for t in (a, b, *norms)]

    for size in (5, MORE):
        with lazygt.session(launcher="inline"):
            found = work("lazygt", size)
        assert all(map(torch.equal, found, work("cpu", size)))
