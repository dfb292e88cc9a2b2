"""The benchmark of collectives between hosts in a short form."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_collectives_on_one_host_and_on_two() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.between_hosts", "--rounds", "1", "--kib", "4"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"(one way|all_reduce)\W+(\d+ \w+)", done.stdout)
    assert rows == [("one way", "8 B"), ("one way", "64 KiB"), ("all_reduce", "4 KiB")]
