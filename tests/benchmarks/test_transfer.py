"""The transfer benchmark in a short form, and its model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.transfer import verdict
from benchmarks.transfer_processes import model

ROOT = Path(__file__).parents[2]


def test_the_model_has_300_tensors_of_many_sizes() -> None:
    sizes = sorted(p.nbytes for p in model(10).values())
    assert len(sizes) == 300
    assert sum(sizes) == pytest.approx(10e6, rel=0.02)
    assert sizes[-1] > 1_000 * sizes[0]


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [(0.8, True, "met"), (0.7, True, "MISSED"), (0.7, False, "met"), (0.8, False, "MISSED")],
)
def test_verdict_states_if_aim_is_met(value: float, least: bool, expected: str) -> None:
    assert verdict("it", value, 0.75, least=least).endswith(expected)


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(115)
def test_the_benchmark_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transfer", "--megabytes", "4", "--rounds", "1"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared memory, 3 receivers, crc32" in done.stdout
    assert "100 more transfers: sender +0 descriptors" in done.stdout
