"""Strategies of transposed convolutions and of resizing, along the dims of the picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazygt.passes.sharding.rules.strategy import S
from tests.passes.sharding.rules.harness import PARTS, Case, check

aten: Any = torch.ops.aten
#: rows, columns, kernel, stride, padding, dilation, output_padding
TRANSPOSED = {
    "doubled": (9, 5, (4, 4), [2, 2], [1, 1], [1, 1], [0, 0]),
    "a row more": (8, 6, (3, 3), [2, 2], [1, 1], [1, 1], [1, 1]),
    "apart": (10, 7, (2, 2), [2, 2], [0, 0], [1, 1], [0, 0]),
    "wide": (12, 9, (3, 2), [1, 1], [2, 0], [2, 1], [0, 0]),
    "gaps": (9, 8, (1, 3), [2, 1], [0, 1], [1, 1], [1, 0]),
}
RESIZED = {
    "nearest": ("upsample_nearest2d", (9, 6), (18, 24), ()),
    "nearest of rows": ("upsample_nearest2d", (10, 5), (20, 5), ()),
    "not by a power of two": ("upsample_nearest2d", (8, 6), (24, 9), ()),
    "linear": ("upsample_bilinear2d", (9, 6), (18, 12), (False,)),
    "linear by corners": ("upsample_bilinear2d", (9, 6), (18, 12), (True,)),
    "linear 1d": ("upsample_linear1d", (11,), (44,), (False,)),
    "nearest 3d": ("upsample_nearest3d", (9, 5, 6), (18, 10, 12), ()),
}


def of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def transposed(name: str, backward: bool) -> Case:
    rows, columns, kernel, *rest = TRANSPOSED[name]
    value, weight, bias = of(2, 3, rows, columns), of(3, 4, *kernel), of(4)
    stride, padding, dilation, extra = rest
    given = (stride, padding, dilation, True, extra, 1)
    if not backward:
        return Case("convolution.default", value, weight, bias, *given)
    made = aten.convolution(value, weight, bias, *given)
    return Case("convolution_backward.default", of(*made.shape), value, weight, [4], *given,
                [True, True, True])  # fmt: skip


def resized(name: str, backward: bool) -> Case:
    op, have, made, corners = RESIZED[name]
    scales = [None] * len(have)
    if not backward:
        return Case(f"{op}.default", of(2, 3, *have), list(made), *corners, *scales)
    sizes = list(made), [2, 3, *have]
    return Case(f"{op}_backward.default", of(2, 3, *made), *sizes, *corners, *scales)


def cut_dims(case: Case, parts: int) -> set[int]:
    """The dims of space that a strategy cuts."""
    placements = {one.outputs[0] for one in case.strategies(parts)}
    return {one.dim for one in placements if isinstance(one, S) and one.dim > 1}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str, backward: bool) -> None:
    torch.manual_seed(0)
    case = transposed(name, backward)
    for parts in PARTS:
        check(case, parts)
    # rows that none of the picture reaches are left to those who have the whole
    rows = set() if name == "gaps" and not backward else {2}
    assert cut_dims(case, 2) == rows | {3}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", RESIZED)
def test_resizing(name: str, backward: bool) -> None:
    torch.manual_seed(0)
    case = resized(name, backward)
    for parts in PARTS:
        check(case, parts)
    some = name not in ("not by a power of two", "linear by corners")
    assert cut_dims(case, 2) == (set(range(2, 2 + len(RESIZED[name][1]))) if some else set())
