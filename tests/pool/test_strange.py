"""Clients of another version, and with another clock, than the pool's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool.serving import SECONDS, Served, served
from tests.support.strange import LATER, OTHER_LAZYGT, OTHER_TORCH, UP_LONGER, strange

pytestmark = pytest.mark.timeout(240)

CLIENT = """
import sys, torch, lazygt
try:
    with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]),
                        workers=lazygt.Workers(1, start_timeout=100.0)) as session:
        print((torch.arange(4.0) * 2).sum().item(), len(session.recoveries))
except lazygt.LazyGTError as error:
    print(type(error).__name__, error)
"""


def said(pool: Served, environment: dict[str, str], *before: str) -> str:
    """What a client prints that starts with other variables."""
    done = subprocess.run(
        [*before, sys.executable, "-c", CLIENT, pool.on, str(pool.key("alice"))],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.anew
def test_another_version_is_told_with_both_and_takes_no_place(tmp_path: Path) -> None:
    with served(tmp_path, "--workers", "1") as pool:
        for what, name, other in (
            (OTHER_LAZYGT, "lazygt", "0.0.1"),
            (OTHER_TORCH, "torch", "2.0.99"),
        ):
            told = said(pool, strange(tmp_path / name, what))
            assert told.startswith("VersionMismatch ")
            assert name in told
            assert other in told
            assert "Install the same ones" in told
        status = pool.status()
        assert status["free"] == 1
        assert status["sessions"] == []
        assert said(pool, {}) == "12.0 0"


def test_a_clock_that_is_an_hour_off_is_of_no_account(tmp_path: Path) -> None:
    """Neither that of a calendar nor that since the machine was started."""
    with served(tmp_path, "--workers", "1") as pool:
        later = strange(tmp_path / "later", LATER)
        assert said(pool, later) == "12.0 0"
        if os.geteuid() == 0:
            assert said(pool, later, *UP_LONGER) == "12.0 0"
        pool.until(lambda status: status["free"] == 1)
