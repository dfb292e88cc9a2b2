"""Laws are found again in times that follow them, and nearly so in times that are disturbed."""

from __future__ import annotations

import math
import random

import pytest

from lazygt.calibrate.device_benchmarks import (
    FULL,
    ExchangeFit,
    ProductFit,
    fit_carrier,
    fit_matmul,
)


def timed(rows: int, columns: int, depth: int, units: int, noise: float = 0.0) -> list[ProductFit]:
    draw = random.Random(0)
    found = []
    for dtype, rate in (("f32", 1e11), ("f64", 4e10)):
        for m, n, k in FULL.products:
            tiles = math.ceil(m / rows) * math.ceil(n / columns)
            flops = 2 * math.ceil(tiles / units) * units * rows * columns * (k + depth)
            seconds = flops / rate * (1 + noise * draw.random())
            found.append(ProductFit(dtype, m, n, k, seconds))
    return found


@pytest.mark.parametrize(("rows", "columns", "depth", "units"), [(16, 32, 8, 1), (1, 1, 0, 1)])
def test_a_law_is_found_again(rows: int, columns: int, depth: int, units: int) -> None:
    law = fit_matmul(timed(rows, columns, depth, units), units)
    assert law.error == pytest.approx(0, abs=1e-9)
    assert law.rate["f32"] == pytest.approx(1e11)
    assert law.rate["f64"] == pytest.approx(4e10)
    assert law.depth == depth


def test_a_law_under_noise() -> None:
    law = fit_matmul(timed(16, 32, 32, 1, noise=0.2), 1)
    assert law.error < 0.1
    assert law.rate["f32"] == pytest.approx(1e11, rel=0.2)


def exchanges(
    latency: float, each: float, bandwidth: float, groups: tuple[int, ...]
) -> list[ExchangeFit]:
    return [
        ExchangeFit(sent, ranks, latency + each * (ranks - 2) + sent / bandwidth)
        for ranks in groups
        for sent in (4e3, 16e3, 64e3, 256e3, 1e6, 4e6, 16e6, 64e6)
    ]


def test_one_line_where_one_fits() -> None:
    (link,) = fit_carrier(exchanges(2e-5, 3e-6, 4e9, (2, 4, 8)), slope=9.0)
    assert link.latency == pytest.approx(2e-5)
    assert link.each == pytest.approx(3e-6)
    assert link.bandwidth == pytest.approx(4e9)
    assert math.isinf(link.up_to)


def test_two_ranks_do_not_determine_cost_of_third() -> None:
    (link,) = fit_carrier(exchanges(2e-5, 3e-6, 4e9, (2,)), slope=9.0)
    assert link.each == 9.0
    assert link.latency == pytest.approx(2e-5)


def test_large_payloads_on_a_line_of_their_own() -> None:
    """As where what is sent no longer fits into the cache."""
    rows = [
        row._replace(seconds=row.seconds if row.sent <= 1e6 else 5 * row.seconds)
        for row in exchanges(2e-5, 0.0, 4e9, (2,))
    ]
    small, large = fit_carrier(rows, slope=0.0)
    assert small.up_to == 1e6
    assert small.bandwidth == pytest.approx(4e9)
    assert large.bandwidth == pytest.approx(8e8)


def test_no_latency_is_negative() -> None:
    rows = [ExchangeFit(sent, 2, sent**1.2 / 1e9) for sent in (1e3, 1e5, 1e7)]
    for link in fit_carrier(rows, slope=0.0):
        assert link.latency >= 0
        assert link.bandwidth > 0
