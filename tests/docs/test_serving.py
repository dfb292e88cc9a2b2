"""The commands in docs/serving.md print what stands there, to the digit."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from lazygt.serving.stages import Stage
from tests.docs.pages import ROOT, commands_in, shell

TEXT = (ROOT / "docs" / "serving.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_documented_commands_print_documented_output(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command, output in commands_in(TEXT):
        done = shell(command, tmp_path, env)
        assert done.stdout.strip() == output.strip(), f"{command}\n{done.stderr}"


def test_every_setting_of_a_stage_is_told() -> None:
    for field in fields(Stage)[1:]:
        assert f"{field.name}=" in TEXT
