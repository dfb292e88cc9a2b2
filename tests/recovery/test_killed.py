"""Workers killed at random moments of a training: the bits are right, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
KILLS = 500 if DEEP else 6
SECONDS = 3000 if DEEP else 300
CASES = [("fully sharded", 2), ("pipeline", 2)]
if DEEP:
    CASES += [("one worker", 1), ("tensor parallel", 2), ("invariant", 2), ("fully sharded", 4)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize(("layout", "workers"), CASES)
def test_deaths_at_random_moments_change_no_bit(layout: str, workers: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little") if DEEP else 1
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.recovery.killed"]
    command += [f"--layout={layout}", f"--workers={workers}", f"--kills={KILLS}", f"--seed={seed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    assert json.loads(done.stdout)["kills"] == KILLS, f"seed {seed}\n{done.stderr}"
