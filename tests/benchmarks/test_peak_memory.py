"""Peaks are exact: tensors of known sizes, and what is freed in between."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.contestant import EAGER, LAST, LAZYGT, Workload
from benchmarks.peak_memory import living

ELEMENTS = 1 << 20  # of float32: 4.194304 MB a tensor
MB = ELEMENTS * 4 / 1e6


def three_at_once(device: str) -> Callable[[], Tensor]:
    """A weight that stays, and two results that live together for a moment."""
    weight = torch.ones(ELEMENTS, device=device)

    def step() -> Tensor:
        twice = weight + weight
        return (twice - weight * twice).sum()

    return step


def peak(kind: str) -> float:
    return living(kind, Workload(three_at_once, LAST, 1))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_eager_torch_at_its_peak() -> None:
    # the weight, `twice`, the product and the difference
    assert peak(EAGER) == pytest.approx(4 * MB, abs=0.01)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_plan_at_its_peak() -> None:
    # a pass may write the difference over one of its operands
    assert 3 * MB <= peak(LAZYGT) <= 4 * MB + 0.01
