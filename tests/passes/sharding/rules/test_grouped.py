"""Strategies of products of groups of rows."""

from __future__ import annotations

import pytest
import torch

from tests.passes.sharding.rules.harness import PARTS, Case, check

ENDS = torch.tensor([4, 4, 9, 16], dtype=torch.int32)


def of(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


CASES = {
    "rows": (of(16, 8), of(4, 8, 12), ENDS),
    "rows by matrices laid out by columns": (of(16, 8), of(4, 12, 8).transpose(1, 2), ENDS),
    "columns": (of(4, 8, 12), of(12, 16), ENDS),
    "inside": (of(16, 8).t(), of(16, 12), ENDS),
    "a batch": (of(4, 8, 12), of(4, 12, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_all_strategies(name: str) -> None:
    torch.manual_seed(0)
    case = Case("_grouped_mm.default", *CASES[name])
    for parts in PARTS:
        check(case, parts)
    assert len(case.strategies(2)) > 4


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("rows", {"(S(1), S(1), R) -> (P(sum))", "(R, S(2), R) -> (S(1))",
                  "(S(0), R, R) -> (S(0))"}),
        ("columns", {"(S(1), R, R) -> (S(0))", "(R, S(1), R) -> (S(1))",
                     "(S(2), S(0), R) -> (P(sum))"}),
        ("inside", {"(S(0), R, R) -> (S(1))", "(R, S(1), R) -> (S(2))",
                    "(S(1), S(0), R) -> (P(sum))"}),
        ("a batch", {"(S(0), S(0)) -> (S(0))"}),
    ],
)  # fmt: skip
def test_grouped_mm_sharding_strategies(name: str, strategies: set[str]) -> None:
    case = Case("_grouped_mm.default", *CASES[name])
    assert strategies <= {str(one) for one in case.strategies(2)}
