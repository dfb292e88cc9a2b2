"""Ten thousand steps: what the client holds does not grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 10_000


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_memory_stays_flat_over_many_steps() -> None:
    """With new batches and learning rates in each; in a process of its own, with this recorder."""
    command = [sys.executable, "-m", "benchmarks.long_run", "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "growth over the last four fifths" in done.stdout
