"""Drawn shapes for calls of ops, and the tests that every table of calls goes through."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.sharding.rules.harness import PARTS, Case, check

Tensor = torch.Tensor


class Draw:
    """Sizes from ``size``, numbers from torch's generator, in float64."""

    def __init__(self, size: Callable[[], int], flag: Callable[[], bool]) -> None:
        self.size, self.flag = size, flag

    def shape(self, rank: int) -> tuple[int, ...]:
        """``rank`` sizes."""
        return tuple(self.size() for _ in range(rank))

    def of(self, *shape: int) -> Tensor:
        """A tensor of a shape."""
        return torch.randn(shape, dtype=torch.float64)

    def tensor(self, rank: int) -> Tensor:
        """A tensor of drawn sizes."""
        return self.of(*self.shape(rank))

    def like(self, value: Tensor) -> Tensor:
        """Other numbers in the same shape."""
        return self.of(*value.shape)

    def indices(self, below: int, *shape: int) -> Tensor:
        """Whole numbers from 0."""
        return torch.randint(below, shape)

    def dim(self, rank: int) -> int:
        """A dim, counted from either end."""
        dim = (self.size() - 1) % rank
        return dim - rank if self.flag() else dim


Cases = Mapping[str, Callable[[Draw], Case]]


def typical(seed: int = 0) -> Draw:
    """Sizes above 4, so that every dim can be split."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    return Draw(lambda: rng.choice((5, 6, 8)), lambda: rng.random() < 0.5)


def check_strategies(make: Callable[[Draw], Case], examples: int = 20) -> None:
    """Assert that every strategy of drawn calls is right, and that typical ones have several."""
    for parts in PARTS:
        case = make(typical(parts))
        found = [str(row) for row in case.strategies(parts)]
        assert len(found) > 1, f"{case.node.op} has only {found}"
        check(case, parts)

    @settings(max_examples=examples, database=None)
    @given(data=st.data(), parts=st.sampled_from(PARTS), seed=st.integers(0, 1000))
    def drawn(data: Any, parts: int, seed: int) -> None:
        torch.manual_seed(seed)
        sizes, flags = st.integers(1, 6), st.booleans()
        check(make(Draw(lambda: data.draw(sizes), lambda: data.draw(flags))), parts)

    drawn()
