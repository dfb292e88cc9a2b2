"""The commands in docs/security.md print what stands there, to the letter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lazygt.runtime.cluster.connection import Listener
from lazygt.runtime.cluster.reliable import GONE_AFTER, GRACE
from tests.docs.test_seeing import ROOT, commands_in, shell

TEXT = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_print_what_is_said(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert len(commands_in(TEXT)) == 6
    for command, output in commands_in(TEXT):
        done = shell(command, tmp_path, env)
        assert done.stdout.strip() == output.strip(), f"{command}\n{done.stderr}"


def test_figures_are_those_of_the_code() -> None:
    assert f"After `grace` seconds ({GRACE:g})" in TEXT
    assert GONE_AFTER == 1.0
    assert "there again within a second" in TEXT


def test_every_count_is_told() -> None:
    names = ("foreign", "malformed", "replayed", "version", "handshake")
    assert all(f"`{name}`" in TEXT for name in names)
    assert all(name in str(Listener.__doc__) for name in names)
