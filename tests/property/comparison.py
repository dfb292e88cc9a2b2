"""Comparison of the results of a program, lazy and eager."""

from __future__ import annotations

import math
from typing import Any

from tests.support.bits import assert_same_bits


def same(a: Any, b: Any) -> bool:
    """Equal, with the sign of zero, and NaN equal to itself."""
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) and math.copysign(1, a) == math.copysign(1, b)


def assert_same(lazy: Any, eager: Any) -> None:
    assert lazy[2] == eager[2], "other errors"
    assert same(lazy[1], eager[1]), f"read {lazy[1]} instead of {eager[1]}"
    for ours, theirs in zip(lazy[0], eager[0], strict=True):
        assert_same_bits(ours, theirs)
