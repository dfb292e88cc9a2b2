"""The example as a user starts it: versions rise, and the server's answers get better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]


def test_the_server_learns_while_it_answers() -> None:
    done = subprocess.run(
        [sys.executable, "examples/serve_while_training.py", "--steps", "100"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step/s" not in done.stderr, "a progress bar was drawn, and this is no terminal"
    pushed, answered = done.stdout.split("\n\n")
    rows = [line.split() for line in pushed.splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5]
    assert float(rows[0][2]) < 0.3
    assert float(rows[-1][2]) > 0.8
    served = [line.split() for line in answered.splitlines()[1:-1]]
    versions = [int(row[0]) for row in served]
    assert versions == sorted(set(versions))
    assert versions[-1] == 5
    assert float(served[-1][2]) > 0.75
    assert re.search(r"^[\d,]+ answers, none without weights$", answered, re.MULTILINE)
