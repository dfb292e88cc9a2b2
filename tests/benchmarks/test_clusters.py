"""The benchmark of sessions on two hosts in a short form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.hosts import missing

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.timeout(400),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


def test_steps_on_second_host_and_cost_of_losses() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.clusters", "--rounds", "1", "--losses", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"W3|killed|down", done.stdout)) >= 4
