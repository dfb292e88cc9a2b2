"""Random programs on tensors of odd sizes, with placements in their midst; numbers are float64."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import strategies as st

from tests.property.programs import State, Step
from tests.sharding.actions import (
    ACTIONS,
    MOVING,
    NORMALISATIONS,
    POINTWISE,
    PRODUCTS,
    REDUCTIONS,
    VIEWS,
    WRITES,
)
from tests.support.values import ORDINARY_NUMBERS

Tensor = torch.Tensor
SIZES = (0, 1, 2, 3, 4, 5, 7)


class ShardStep(Step):
    """A step of this module."""

    def run(self, s: State) -> None:
        ACTIONS[self.name](s, self)


KINDS = (POINTWISE, PRODUCTS, REDUCTIONS, NORMALISATIONS, VIEWS, MOVING, WRITES)
#: Each kind of step is as likely as another, and placements are often.
NAMES = st.one_of(*(st.sampled_from(sorted(kind)) for kind in KINDS),
                  st.just("place"), st.just("descend"))  # fmt: skip
NUMBERS = st.sampled_from(ORDINARY_NUMBERS)
STEPS = st.builds(ShardStep, NAMES, st.integers(0, 7), st.integers(0, 7), NUMBERS)
PROGRAMS = st.lists(STEPS, min_size=3, max_size=14)
SHAPES = st.tuples(*[st.sampled_from(SIZES)] * 3)


def start(sizes: Sequence[int], device: str, seed: int = 3) -> State:
    """What a program finds: two of them have gradients, one is of indices."""
    n, m, k = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        # two more: a session keeps single numbers to itself
        made = torch.randn(prod(shape) + 2, generator=generator, dtype=torch.float64)
        return made.to(device)[2:].view(shape).clone()

    whole = (draw(n + 1) * 4).long().abs()
    return State(device, [draw(n, m), draw(m, k).requires_grad_(), draw(m), draw(2, n, m), whole,
                          draw(n, m).requires_grad_()])  # fmt: skip


def accepted(program: Sequence[Step], sizes: Sequence[int]) -> list[Step]:
    """The steps that eager torch takes, and that keep numbers small."""
    state, taken = start(sizes, "cpu"), []
    for step in program:
        before = list(state.tensors)
        try:
            step.run(state)
        except (RuntimeError, IndexError, ValueError):
            state.tensors = before
            continue
        if any(map(large, state.tensors)):
            break
        taken.append(step)
    return taken


def large(t: Tensor) -> bool:
    return t.numel() > 4000 or bool(t.detach().double().abs().nan_to_num().sum() > 1e6)


def results(state: State) -> list[Tensor]:
    """Every tensor of a program as it stands in the end, each in memory of its own."""
    return [t.detach().clone(memory_format=torch.contiguous_format) for t in state.tensors]
