"""Drawn shapes for calls of ops, and the tests that every table of calls goes through."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.sharding.rules.harness import PARTS, Case, check
from tests.support.values import Kind, any_kind, draw

Tensor = torch.Tensor
#: Of these, kernels of attention give what depends on the number of keys: torch's own take a query
#: whose scores are all NaN for one that a mask hides, and scores of far ones have no digits left.
UNATTENDED = (Kind.INFINITE, Kind.NAN, Kind.FAR)


class Draw:
    """Sizes from ``size``, numbers of a kind from torch's generator, in float64."""

    def __init__(
        self, size: Callable[[], int], flag: Callable[[], bool], kind: Kind = Kind.ORDINARY
    ) -> None:
        self.size, self.flag, self.kind = size, flag, kind

    def without(self, *kinds: Kind) -> Draw:
        """The same, with ordinary numbers instead of those that a kernel does not define."""
        return Draw(self.size, self.flag, Kind.ORDINARY) if self.kind in kinds else self

    def shape(self, rank: int) -> tuple[int, ...]:
        """``rank`` sizes."""
        return tuple(self.size() for _ in range(rank))

    def of(self, *shape: int) -> Tensor:
        """A tensor of a shape."""
        return draw(shape, torch.float64, self.kind)

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


def typical(seed: int = 0, kind: Kind = Kind.ORDINARY) -> Draw:
    """Sizes above 4, so that every dim can be split."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    return Draw(lambda: rng.choice((5, 6, 8)), lambda: rng.random() < 0.5, kind)


def check_strategies(make: Callable[[Draw], Case], examples: int = 20) -> None:
    """Assert that every strategy of drawn calls is right, and that typical ones have several.

    Numbers are ordinary for half of the calls, and extreme for the others.
    """
    for parts, kind in [*((parts, Kind.ORDINARY) for parts in PARTS), (3, Kind.LARGE)]:
        case = make(typical(parts, kind))
        found = [str(row) for row in case.strategies(parts)]
        assert len(found) > 1, f"{case.node.op} has only {found}"
        check(case, parts)

    @settings(max_examples=examples, database=None)
    @given(data=st.data(), parts=st.sampled_from(PARTS), seed=st.integers(0, 1000))
    def drawn(data: Any, parts: int, seed: int) -> None:
        torch.manual_seed(seed)
        sizes, flags = st.integers(1, 6), st.booleans()
        call = Draw(lambda: data.draw(sizes), lambda: data.draw(flags), any_kind(seed))
        check(make(call), parts)

    drawn()
