"""Strategies of factories, and of horizontal ops: optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.sharding.rules.cases import on
from tests.passes.sharding.rules.draws import Cases, Draw, check_strategies
from tests.passes.sharding.rules.harness import Case

Make = Callable[[Draw], Case]

FACTORIES: Cases = {
    "zeros": lambda d: Case("zeros.default", d.shape(2)),
    "full": lambda d: Case("full.default", d.shape(2), 2.0),
    "empty": lambda d: Case("empty.memory_format", d.shape(2), shapes_only=[0]),
    "zeros_like": on("zeros_like.default", 2),
    "ones_like of a transposed": lambda d: Case("ones_like.default", d.tensor(2).t()),
    "full_like": on("full_like.default", 2, 3.0, dtype=torch.float32),
    "empty_like": on("empty_like.default", 2, shapes_only=[0]),
    "new_zeros": on("new_zeros.default", 2, [4, 4]),
    "arange": lambda d: Case("arange.default", d.size()),
    "arange out": lambda d: Case("arange.start_out", 2, 5, 1, out=torch.zeros(3)),
    "empty_strided": lambda d: Case("empty_strided.default", [5, 6], [1, 5], shapes_only=[0]),
    "arange by steps": lambda d: Case("arange.start_step", 3 * d.size() + 2, 1, -3),
    "native_dropout": lambda d: Case(
        "native_dropout.default", d.tensor(2), 0.5, True, shapes_only=[0, 1]),
    "rand_like": on("rand_like.default", 2, shapes_only=[0]),
}  # fmt: skip


def listed(op: str, lists: int, *rest: Any, positive: bool = False) -> Make:
    """A horizontal op on tensors of ranks 2, 1 and 3."""

    def make(d: Draw) -> Case:
        first = [d.tensor(rank) for rank in (2, 1, 3)]
        made = [first] + [[d.like(t) for t in first] for _ in range(lists - 1)]
        if positive:
            made = [[t.abs() for t in one] for one in made]
        return Case(op, *made, *rest)

    return make


def adamw(ranks: tuple[int, ...]) -> Make:
    def make(d: Draw) -> Case:
        first = [d.tensor(rank) for rank in ranks]
        rest = [[d.like(t).abs() for t in first] for _ in range(3)]
        return Case("_fused_adamw_.default", first, *rest, [], [torch.tensor(3.0) for _ in first],
                    lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False,
                    maximize=False)  # fmt: skip

    return make


OPTIMIZER: Cases = {
    "_foreach_add_.Scalar": listed("_foreach_add_.Scalar", 1, 1.0),
    "_foreach_add_.List": listed("_foreach_add_.List", 2),
    "_foreach_mul_.Tensor": listed(
        "_foreach_mul_.Tensor", 1, torch.tensor(0.5, dtype=torch.float64)),
    "_foreach_mul.Scalar": listed("_foreach_mul.Scalar", 1, 2.0),
    "_foreach_maximum_": listed("_foreach_maximum_.List", 2),
    "_foreach_minimum_": listed("_foreach_minimum_.List", 2),
    "_foreach_clamp_min_": listed("_foreach_clamp_min_.Scalar", 1, -0.5),
    "_foreach_clamp_max_": listed("_foreach_clamp_max_.Scalar", 1, 0.5),
    "_foreach_norm": listed("_foreach_norm.Scalar", 1),
    "_foreach_addcdiv_": listed("_foreach_addcdiv_.ScalarList", 3, [1.0, 2.0, 3.0]),
    "_foreach_addcmul_": listed("_foreach_addcmul_.Scalar", 3, 0.5),
    "_foreach_lerp_": listed("_foreach_lerp_.Scalar", 2, 0.5),
    "_foreach_sqrt": listed("_foreach_sqrt.default", 1, positive=True),
    "_foreach_div_": listed("_foreach_div_.ScalarList", 1, [1.0, 2.0, 3.0]),
    "_fused_adamw_ of one": adamw((2,)), "_fused_adamw_": adamw((2, 1, 3)),
}  # fmt: skip

ALL = FACTORIES | OPTIMIZER


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ALL)
def test_rows(name: str) -> None:
    check_strategies(ALL[name], examples=12)
