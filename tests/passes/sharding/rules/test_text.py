"""Sharding rules as text: what a text means, and what is said of one that means nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazygt.passes.sharding.rules.factors import Dims, parse, rule, strategies_by
from lazygt.passes.sharding.rules.strategy import Call
from tests.passes.sharding.rules.harness import Case


def strategies(text: str, op: str, *args: Any, parts: int = 2, **kwargs: Any) -> list[str]:
    """The strategies that a text gives a call of an op."""
    case = Case(op, *args, **kwargs)
    return [str(strategy) for strategy in strategies_by(Call(case.node, case.metas, parts), text)]


def of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_parsed_rule_text() -> None:
    text = parse("* n !c ..., + !...@dim k, _ -> max n ...@dim !p, _,")
    assert text.operands == (
        Dims(before="nc", rest=True, mark="*"),
        Dims(after="k", rest=True, rest_whole=True, argument="dim", mark="+"),
        Dims(whole=True),
    )
    assert text.results == (
        Dims(before="n", after="p", rest=True, argument="dim", mark="max"),
        Dims(whole=True),
        Dims(),
    )
    assert text.unsharded == {"c", "p"}


@pytest.mark.parametrize(("text", "what", "token"), [
    ("i k, k j", "one '->' stands between operands and results", ""),
    ("i -> i -> i", "one '->' stands between operands and results", "-> i"),
    ("ik, k j -> i j", "'ik' is no dim", "ik,"),
    ("i k, K j -> i j", "'K' is no dim", "K j"),
    ("i k, ! k j -> i j", "'!' is no dim", "! k"),
    ("i k, k j -> + i j", "'+' is no dim", "+ i"),
    ("max i k, k j -> i j", "'max' is no dim", "max"),
    ("i _ -> i", "'_' is no dim", "_ ->"),
    ("... i ... -> i", "a second '...'", "... ->"),
    ("i i -> i", "a second 'i' in one tensor", "i ->"),
    ("i k, k j -> i n", "no operand has 'n'", "n"),
    ("i !k, k j -> i j", "'k' stays whole elsewhere", "k j"),
    ("i k -> ... i", "no operand has '...'", "... i"),
])  # fmt: skip
def test_invalid_rule_text_is_reported_with_op_and_position(
    text: str, what: str, token: str
) -> None:
    with pytest.raises(ValueError, match=r"sharding rule of mm\.default: ") as raised:
        rule("mm.default", text)
    first, written, caret = str(raised.value).splitlines()
    assert what in first
    assert written == f"  {text}"
    at = len(text) if not token else text.rindex(token)
    assert caret == f"  {' ' * at}^"


@pytest.mark.parametrize(("text", "options", "what"), [
    ("i k, k j, j -> i j", {}, "it has 2 tensor arguments, not 3"),
    ("i k, k j -> i j, i", {}, "it has 1 results, not 2"),
    ("...@dim, _ -> ...@dim", {}, "it has no argument dim"),
    ("i k, k j -> i j", {"sizes": "size"}, "it has no argument size"),
])  # fmt: skip
def test_a_text_has_the_arguments_of_its_op(text: str, options: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        rule("mm.default", text, **options)


def test_a_dim_of_no_result_is_left_partial_and_products_are_linear() -> None:
    assert strategies("* i k, * k j -> i j", "mm.default", of(4, 6), of(6, 8)) == [
        "(S(0), R) -> (S(0))", "(R, S(1)) -> (S(1))", "(S(1), S(0)) -> (P(sum))",
        "(P(sum), R) -> (P(sum))", "(R, P(sum)) -> (P(sum))",
    ]  # fmt: skip


def test_addend_is_partial_where_result_is() -> None:
    found = strategies("+ i j, * i k, * k j -> i j", "addmm.default", of(8), of(4, 6), of(6, 8))
    assert found == [
        "(R, S(0), R) -> (S(0))", "(S(0), R, S(1)) -> (S(1))", "(P(sum), S(1), S(0)) -> (P(sum))",
        "(P(sum), P(sum), R) -> (P(sum))", "(P(sum), R, P(sum)) -> (P(sum))",
    ]  # fmt: skip


def test_rule_states_reduction_of_partial_result() -> None:
    others = torch.zeros(6, dtype=torch.int64)
    found = strategies("..., k -> max ...", "isin.Tensor_Tensor", others, others)
    assert found == ["(S(0), R) -> (S(0))", "(R, S(0)) -> (P(max))"]


def test_moved_elements_pass_any_partial() -> None:
    found = strategies("= !i !j -> !i !j", "clone.default", of(4, 4))
    assert found == ["(P(sum)) -> (P(sum))", "(P(max)) -> (P(max))", "(P(min)) -> (P(min))"]


def test_a_broadcast_dim_is_whole_and_its_gradient_a_sum() -> None:
    found = strategies("... i, ... i -> ... i", "mul.Tensor", of(4, 1, 6), of(8, 6))
    assert found == ["(S(0), R) -> (S(0))", "(R, S(0)) -> (S(1))", "(S(2), S(1)) -> (S(2))"]
    found = strategies("h i -> !j i", "sum.dim_IntList", of(4, 6), [0], True)
    assert found == ["(S(1)) -> (S(1))", "(S(0)) -> (P(sum))"]
    found = strategies("h i -> h i", "sum.dim_IntList", of(4, 6), [0], True)
    assert found == ["(S(0)) -> (P(sum))", "(S(1)) -> (S(1))"]


@pytest.mark.parametrize(("parts", "count"), [(2, 1), (4, 1), (3, 0)])
def test_groups_are_split_where_ranks_have_as_many(parts: int, count: int) -> None:
    text = "b h !i !e, b h !j !e, b h !j !e -> b h !i !e, b h !..."
    q, k = of(1, 12, 4, 8), of(1, 4, 4, 8)
    op = "_scaled_dot_product_flash_attention.default"
    found = strategies(text, op, q, k, k, 0.0, False, False, parts=parts)
    assert len(found) == count


def test_dims_that_an_argument_names_are_whole() -> None:
    text = "...@dim -> ...@dim, ...@dim"
    value = of(4, 5, 6)
    assert strategies(text, "sort.default", value, -2) == [
        "(S(0)) -> (S(0), S(0))", "(S(2)) -> (S(2), S(2))",
    ]  # fmt: skip
    assert strategies(text, "median.dim", value, 1, True)[1] == "(S(2)) -> (S(2), S(2))"
    assert strategies(text, "median.dim", value, 1, False)[1] == "(S(2)) -> (S(1), S(1))"
    transformed = strategies("...@dim -> ...@dim", "_fft_r2c.default", value, [0, 2], 0, True)
    assert transformed == ["(S(1)) -> (S(1))"]
    assert strategies("...@dims -> ...@dims", "flip.default", value, []) == []


def test_a_result_that_was_not_asked_for_is_whole() -> None:
    text = "... !m !n -> ... !m !p, ... !q, ... !r !n"
    found = strategies(text, "_linalg_svd.default", of(4, 2, 2), False, False)
    assert found == ["(S(0)) -> (R, S(0), R)"]


def test_sizes_among_the_arguments_are_those_of_a_block() -> None:
    made = rule("upsample_nearest1d_backward.default", "* ... !w -> ... !w", sizes="input_size")
    case = Case("upsample_nearest1d_backward.default", of(4, 3, 8), [8], [4, 3, 4])
    strategy = made[case.node.op](Call(case.node, case.metas, 2))[0]
    graph = case.local(2, strategy)[0][0]
    assert graph.nodes[0].args[2] == (2, 3, 4)


@pytest.mark.parametrize("no_empty", [False, True])
def test_a_rank_without_a_block_gives_zeros_for_a_kernel_that_takes_none(no_empty: bool) -> None:
    made = rule("linalg_matrix_exp.default", "... !n !n -> ... !n !n", no_empty=no_empty)
    case = Case("linalg_matrix_exp.default", of(5, 2, 2))
    strategy = made[case.node.op](Call(case.node, case.metas, 4))[0]
    ops = [[node.op for node in graph.nodes] for graph in case.local(4, strategy)[0]]
    assert ops[2] == ["aten.linalg_matrix_exp.default"]
    assert ops[3] == ["aten.zeros.default" if no_empty else "aten.linalg_matrix_exp.default"]


def test_letters_may_be_kept_by_a_call() -> None:
    made = rule("clone.default", "i j -> i j", unsharded=lambda call: "i" * (call.axis_size > 2))
    case = Case("clone.default", of(4, 4))
    assert len(made[case.node.op](Call(case.node, case.metas, 2))) == 2
    assert len(made[case.node.op](Call(case.node, case.metas, 3))) == 1
