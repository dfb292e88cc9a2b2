"""What the figures of a machine are the constants of, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazygt.machine import Figure, default_machine
from lazygt.machine.prices import (
    collective_seconds,
    link_for,
    matmul_seconds,
    moving_seconds,
    pointwise_seconds,
)

#: 4 tiles of 100 x 10 at once, 1e9 operations a second.
GPU = default_machine("cuda").with_values({
    "matmul.tile_rows": 100, "matmul.tile_columns": 10, "matmul.units": 4, "matmul.rate.bf16": 1e9,
    "memory.bandwidth": 1e12, "memory.cache": 1e3, "memory.cache_bandwidth": 1e14,
    "pointwise.exp": 1e9, "host.launch": 0.0,
})  # fmt: skip


def test_a_matmul_computes_whole_tiles_and_whole_rounds_of_them() -> None:
    full = 2 * 4 * 100 * 10 * 50 / 1e9
    assert matmul_seconds(GPU, "bf16", 200, 20, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 101, 11, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 1, 1, 50) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 201, 20, 50) == pytest.approx(2 * full)
    assert matmul_seconds(GPU, "bf16", 100, 10, 50, batch=4) == pytest.approx(full)
    assert matmul_seconds(GPU, "bf16", 100, 10, 50, batch=5) == pytest.approx(2 * full)


def test_the_ends_of_a_tile_take_as_long_as_some_steps_of_its_sum() -> None:
    deep = replace(GPU, figures={**GPU.figures, "matmul.depth": Figure(50, "measured", "nccl")})
    assert matmul_seconds(deep, "bf16", 9, 9, 50) == 2 * matmul_seconds(GPU, "bf16", 9, 9, 50)


def test_a_thin_product_is_as_slow_as_memory() -> None:
    slow = GPU.with_values({"memory.bandwidth": 1e6})
    assert matmul_seconds(slow, "bf16", 1, 1000, 100) == pytest.approx(2 * 101_100 / 1e6)


def test_a_dtype_without_a_rate_counts_as_f32() -> None:
    assert "f64" not in default_machine("cpu").matmul.rate
    cpu = default_machine("cpu")
    f32, f64 = (matmul_seconds(cpu, dtype, 600, 640, 512) for dtype in ("f32", "f64"))
    assert f64 == f32


def test_small_operands_are_in_the_cache() -> None:
    assert moving_seconds(GPU, 1000) == pytest.approx(1000 / 1e14)
    assert moving_seconds(GPU, 1001) == pytest.approx(1001 / 1e12)


def test_arithmetic_or_memory_decides_whichever_takes_longer() -> None:
    assert pointwise_seconds(GPU, "exp", 1000, 8000) == pytest.approx(1e-6)
    assert pointwise_seconds(GPU, "exp", 1, 8_000_000) == pytest.approx(8e-6)


def test_a_carrier_may_be_another_one_for_large_payloads() -> None:
    new = {
        "collectives.local[0].latency": 1.0,
        "collectives.local[0].bandwidth": 10.0,
        "collectives.local[0].up_to": 100.0,
        "collectives.local[1].latency": 5.0,
        "collectives.local[1].each": 2.0,
        "collectives.local[1].bandwidth": 100.0,
    }
    figures = {**GPU.figures, **{k: Figure(v, "measured", "nccl") for k, v in new.items()}}
    machine = replace(GPU, figures=figures)
    assert [link.up_to for link in machine.collectives.local] == [100.0, float("inf")]
    assert link_for(machine.collectives.local, 100).latency == 1.0
    assert collective_seconds(machine, "all_gather", 200, 2) == 1.0 + 100 / 10
    assert collective_seconds(machine, "all_gather", 400, 4) == 5.0 + 2 * 2.0 + 300 / 100
    assert collective_seconds(machine, "all_gather", 400, 1) == 0.0
