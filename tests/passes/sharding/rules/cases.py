"""Factories of cases for the tests of sharding rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.passes.sharding.rules.draws import Draw
from tests.passes.sharding.rules.harness import Case
from tests.support.values import Kind

Tensor = torch.Tensor

Make = Callable[[Draw], Case]


def positive(d: Draw) -> Tensor:
    """Two dims of positive definite matrices, with eigenvalues apart."""
    value = d.without(Kind.INFINITE, Kind.NAN, Kind.FAR).of(*d.shape(2), 3, 3)
    return value @ value.mT + torch.diag(torch.arange(1, 4, dtype=value.dtype))


def of_matrices(op: str, *rest: Any) -> Make:
    return lambda d: Case(op, positive(d), *rest)


def bounds(d: Draw, *shape: int) -> Tensor:
    """Sorted, with no NaN among them: what a search makes of it depends on where it looks first."""
    return d.without(Kind.NAN).of(*shape).sort(-1).values


def on(op: str, rank: int, *args: Any, **kwargs: Any) -> Make:
    """An op on a tensor of drawn sizes, with fixed arguments."""
    return lambda d: Case(op, d.tensor(rank), *args, **kwargs)
