"""Values that tests draw: ordinary ones, and those at the limits of their dtype.

Extreme values have one result in any order of summation, so that a sharded program need not be
compared loosely: finite ones are small multiples of a power of two, and stay so far below the limit
of the dtype that sums of hundreds are exact.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch

Tensor = torch.Tensor


class Kind(StrEnum):
    """Kinds of drawn values."""

    ORDINARY = "ordinary"  # of the normal distribution
    LARGE = "large"  # ``exp`` of them is infinite or 0; equal ones among them
    FAR = "far"  # a small variance about a large mean
    TINY = "tiny"  # subnormal: products are 0
    LIMIT = "limit"  # products overflow: for ops that multiply nothing
    INFINITE = "infinite"  # large, infinities and zeros of both signs
    NAN = "nan"  # ordinary, NaN and zeros of both signs


#: For any op.
EXTREME = (Kind.LARGE, Kind.INFINITE, Kind.NAN, Kind.TINY, Kind.FAR)
#: One of so many values of ``INFINITE`` and ``NAN`` tensors is special.
RARE = 6
#: The largest multiple: half precision adds up hundreds of them.
_STEPS = 8
_FAR = 2.0**20
_SPECIAL = {
    Kind.INFINITE: (math.inf, -math.inf, 0.0, -0.0),
    Kind.NAN: (math.nan, 0.0, -0.0),
}


def draw(
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    kind: Kind = Kind.ORDINARY,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a tensor on the CPU.

    Args:
        generator: torch's default one if not given, so that the seed of a test decides.
    """
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator, device="cpu").bool()
    if dtype.is_complex:
        parts = draw((*shape, 2), dtype.to_real(), kind, generator)
        return torch.view_as_complex(parts)
    if not dtype.is_floating_point:
        return _whole(shape, dtype, kind, generator)
    return _real(shape, dtype, kind, generator)


def _whole(
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    kind: Kind,
    generator: torch.Generator | None,
) -> Tensor:
    """Small whole numbers; extreme ones are next to the limits of the dtype, with ties."""
    info = torch.iinfo(dtype)
    small = torch.randint(
        0 if info.min == 0 else -9, 10, shape, generator=generator, device="cpu"
    ).to(dtype)
    if kind is Kind.ORDINARY:
        return small
    ends = torch.tensor([info.min, info.min + 1, info.max - 1, info.max], dtype=dtype, device="cpu")
    rare = torch.randint(2, shape, generator=generator, device="cpu").bool()
    return torch.where(
        rare, ends[torch.randint(4, shape, generator=generator, device="cpu")], small
    )


def _real(
    shape: tuple[int, ...] | torch.Size,
    dtype: torch.dtype,
    kind: Kind,
    generator: torch.Generator | None,
) -> Tensor:
    if kind in (Kind.ORDINARY, Kind.FAR, Kind.NAN):
        made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        made = (made + _FAR * (kind is Kind.FAR)).to(dtype)
    else:
        steps = torch.randint(-_STEPS, _STEPS + 1, shape, generator=generator, device="cpu")
        made = (steps.double() * _scale(dtype, kind)).to(dtype)
    special = _SPECIAL.get(kind)
    if special is None:
        return made
    rare = torch.randint(RARE, shape, generator=generator, device="cpu") == 0
    which = torch.randint(len(special), shape, generator=generator, device="cpu")
    return torch.where(rare, torch.tensor(special, dtype=dtype, device="cpu")[which], made)


def _scale(dtype: torch.dtype, kind: Kind) -> float:
    """The power of two of which values of a kind are small multiples."""
    info = torch.finfo(dtype)
    highest, digits = math.frexp(info.max)[1], -math.frexp(info.eps)[1] + 1
    if kind is Kind.LIMIT:
        return 2.0 ** (highest - 13)
    if kind is Kind.TINY:
        return info.smallest_normal * 2.0 ** -min(digits, 7)
    return 32.0 if dtype == torch.float16 else 1024.0


def any_kind(seed: int) -> Kind:
    """Ordinary values for half of the seeds, and each extreme kind for a tenth."""
    return Kind.ORDINARY if seed % 2 else EXTREME[seed // 2 % len(EXTREME)]


#: Single numbers of programs.
ORDINARY_NUMBERS = (0.5, 2.0, -1.0, 0.0, 3.0)
EXTREME_NUMBERS = (-0.0, 1e4, -1e4, 1e38, -1e38, 1e-42, math.inf, -math.inf, math.nan)
#: To choose from: a third of them extreme, so that a program has both.
NUMBERS = ORDINARY_NUMBERS * 4 + EXTREME_NUMBERS
