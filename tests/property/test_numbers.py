"""Numbers that Python takes for equal give eager torch's bits, whatever came before."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import lazygt
from lazygt.graph.meta import typed_key

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:ComplexHalf"),
              pytest.mark.filterwarnings("ignore:Casting complex")]  # fmt: skip

Number = bool | int | float | complex
ERRORS = (RuntimeError, TypeError, ValueError, OverflowError)
Bits = tuple[torch.dtype, tuple[int, ...], bytes]


def nan(bits: int) -> float:
    """The double of these bits."""
    made: float = struct.unpack(">d", bits.to_bytes(8))[0]
    return made


NANS = [nan(0x7FF8000000000000), nan(0xFFF8000000000000), nan(0x7FF9234560000000)]
PLAIN = [True, False, 0, 1, -1, 2, 0.0, -0.0, 1.0, 0.5, float("inf"), -float("inf"), *NANS]
BIG = [2**53 + 1, 2**62 + 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64]
COMPLEX = [complex(*parts) for parts in product((0.0, -0.0, 1.0, NANS[1]), repeat=2)]
NUMBERS = st.sampled_from([*PLAIN, *BIG, *COMPLEX])

OPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": lambda x, n: x + n,
    "subtract": lambda x, n: n - x,
    "multiply": lambda x, n: x * n,
    "divide": lambda x, n: x / n,
    "add_scaled": lambda x, n: torch.add(x, x, alpha=+n),
    "power": lambda x, n: x**+n,
    "copysign": lambda x, n: torch.copysign(x, n.real),
    "clamp": lambda x, n: x.clamp(min=n.real),
    "where": lambda x, n: torch.where(x == x, x, n),
    "fill": lambda x, n: torch.full_like(x, n),
    "full": lambda x, n: x + torch.full((3,), n),
    "tensor": lambda x, n: x + torch.tensor(n),
    "arange": lambda x, n: x + torch.arange(n.real, n.real + 3),
    "masked_fill": lambda x, n: x.masked_fill(x != x, n.real),
    "masked_fill_": lambda x, n: x.clone().masked_fill_(x == x, n.real),
    "nan_to_num": lambda x, n: x.nan_to_num(nan=n.real, posinf=n.real),
    "threshold": lambda x, n: F.threshold(x, 0.5, n.real),
    "pad": lambda x, n: F.pad(x, (0, 3), value=n.real)[3:],
    "norm": lambda x, n: torch.linalg.vector_norm(x, n.real) + x,
    "foreach": lambda x, n: torch._foreach_mul([x, x], [n, n])[1],
    "foreach_": lambda x, n: torch._foreach_add([x, x], n)[0],
    "there_and_back": lambda x, n: x.double().to(x.dtype),
    "minus_minus": lambda x, n: x.neg().neg(),
    "times_ones": lambda x, n: x * torch.ones_like(x),
    "half": lambda x, n: x.to(torch.bfloat16),
    "real": lambda x, n: torch.view_as_real(x)[:, 0] if x.is_complex() else x,
    "twice": lambda x, n: torch.maximum(x * n, x * n),
}
STARTS: list[tuple[torch.dtype, list[Any]]] = [
    (torch.float32, [-0.0, NANS[2], 1.5]),
    (torch.float64, [NANS[1], 0.0, -1.0]),
    (torch.float16, [NANS[1], -0.0, 1.0]),
    (torch.int64, [2**62 + 1, 0, -3]),
    (torch.uint8, [255, 0, 1]),
    (torch.bool, [True, False, True]),
    (torch.complex64, [complex(-0.0, 0.0), complex(0.0, NANS[1]), 1j]),
]
PROGRAMS = st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=5)
ROWS = st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=2, max_size=4)


def bits(t: torch.Tensor) -> Bits:
    """Dtype, shape and bytes."""
    t = t.cpu().contiguous()
    return t.dtype, tuple(t.shape), bytes(t.reshape(-1).view(torch.uint8).tolist())


def run(program: list[str], start: torch.Tensor, numbers: list[Any]) -> list[Bits | str]:
    """The bits of each result, until there is an error."""
    made: list[torch.Tensor] = [start]
    with suppress(*ERRORS):
        for name, number in zip(program, numbers, strict=False):
            made.append(OPS[name](made[-1], number))
    found: list[Bits | str] = []
    with suppress(*ERRORS):  # lazily, some errors come with the values
        found += map(bits, made[1:])
    return found if len(found) == len(program) else [*found, "error"]


def assert_same(found: list[Bits | str], expected: list[Bits | str]) -> None:
    if "error" in found and "error" in expected:  # the first read raises for any op
        assert found[:-1] == expected[: len(found) - 1]
    else:
        assert found == expected


@given(PROGRAMS, st.sampled_from(STARTS), ROWS)
def test_other_numbers_on_the_same_plan(
    program: list[str], start: tuple[torch.dtype, list[Any]], rows: list[list[Number]]
) -> None:
    dtype, values = start
    expected = [run(program, torch.tensor(values, dtype=dtype), row) for row in rows]
    with lazygt.session(launcher="inline") as s:
        for row, wanted in [*zip(rows, expected, strict=True)] * 2:
            assert_same(run(program, torch.tensor(values, dtype=dtype), row), wanted)
            with suppress(lazygt.ExecutionError):  # of an op after the first that failed
                s.synchronize()


@pytest.mark.parametrize("name", ["multiply", "nan_to_num", "full", "foreach", "copysign"])
def test_each_number_after_each_other(name: str) -> None:
    numbers = [*PLAIN, *COMPLEX[:4]]
    pairs = [number for pair in product(numbers, numbers) for number in pair]
    start = torch.tensor([1.0, NANS[0], 0.0])
    expected = {typed_key(number): run([name], start, [number]) for number in numbers}
    with lazygt.session(launcher="inline"):
        lazy = torch.tensor([1.0, NANS[0], 0.0])
        for number in pairs:
            assert run([name], lazy, [number]) == expected[typed_key(number)], number
