"""The benchmark of transfers out of sharded sessions, in a short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(180)
def test_benchmark_runs_and_counts_no_weights_in_client() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transfer_sharded", "--megabytes", "50", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "25 MB by worker 0, 25 MB by worker 1" in done.stdout
    assert "routes planned during the rounds: 0" in done.stdout
