"""The benchmark of collectives in a short form: both contestants, and the same bits of both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collectives import KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_collectives_against_gloo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.collectives", "--rounds", "1", "--mib", "2"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        assert f"{kind} of 2 MiB" in done.stdout
