"""Workers killed at random moments of a training: the bits are right, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.timeouts import DEEP

ROOT = Path(__file__).parents[2]
KILLS = 500 if DEEP else 3
SECONDS = 3000 if DEEP else 300
CASES = [("fully sharded", 2, "off"), ("pipeline", 2, "off"), ("one worker", 1, "now")]
if DEEP:
    CASES += [
        ("one worker", 1, "off"), ("tensor parallel", 2, "off"), ("invariant", 2, "off"),
        ("fully sharded", 4, "off"), ("one worker", 1, "auto"), ("replicated", 2, "now"),
        ("replicated", 2, "auto"), ("data parallel", 4, "auto"),
    ]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize(("layout", "workers", "compiled"), CASES)
def test_deaths_at_random_moments_change_no_bit(layout: str, workers: int, compiled: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little") if DEEP else 1
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.recovery.killed"]
    command += [f"--layout={layout}", f"--workers={workers}", f"--kills={KILLS}", f"--seed={seed}"]
    command += [f"--compile={compiled}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    told = json.loads(done.stdout)
    assert told["kills"] == KILLS, f"seed {seed}\n{done.stderr}"
    assert bool(told["plans on compiled code"]) == (compiled != "off")


@pytest.mark.parametrize("layout", ["one worker", "fully sharded"] if DEEP else ["one worker"])
def test_program_killed_under_checkpoints_ends_with_the_bits_of_one_that_was_not(
    layout: str,
) -> None:
    kills = 50 if DEEP else 4
    command = [sys.executable, "-m", "tests.recovery.killed_client"]
    command += [f"--layout={layout}", f"--kills={kills}", "--seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] == kills
