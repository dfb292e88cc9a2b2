"""Ctrl-C at random moments of a training, with compiled code and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.timeouts import DEEP

ROOT = Path(__file__).parents[2]
INTERRUPTS = 1000 if DEEP else 40
SECONDS = 3000 if DEEP else 1000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "workers"), [("off", 1), ("auto", 1), ("now", 1), ("off", 2)])
def test_interrupts_at_random_moments_leave_everything_right(
    mode: str, workers: int, tmp_path: Path
) -> None:
    """The process lives, the session goes on, no value is lost, and the bits are right."""
    seed = int.from_bytes(os.urandom(4), "little") if DEEP else 1
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.faults.interrupted"]
    command += [f"--interrupts={INTERRUPTS}", f"--seed={seed}"]
    command += [f"--workers={workers}", f"--compile={mode}", f"--cache={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        start_new_session=True,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    assert json.loads(done.stdout) == {"interrupts": INTERRUPTS}, f"seed {seed}\n{done.stderr}"
    assert "Exception ignored" not in done.stderr
