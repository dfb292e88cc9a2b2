"""The commands in docs/seeing.md print what stands there, but for times and plan digests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks_in, commands_in, scrubbed, shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def blocks(language: str) -> list[str]:
    return blocks_in((ROOT / "docs" / "seeing.md").read_text(), language)


def commands() -> list[tuple[str, str]]:
    return commands_in((ROOT / "docs" / "seeing.md").read_text())


def test_there_is_an_example_of_every_command() -> None:
    shown = " ".join(command for command, _ in commands())
    for name in ("explain", "comm", "dump", "diff", "viz", "why", "profile"):
        assert f"lazygt {name} " in shown


def test_documented_commands_print_documented_output(tmp_path: Path) -> None:
    for name, script in zip(("step.py", "sharded.py"), blocks("py"), strict=True):
        (tmp_path / name).write_text(script)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LAZYGT_THREADS": "1",
        "LAZYGT_COMPILE": "off",
    }
    for command, output in commands():
        done = shell(command, tmp_path, env)
        assert scrubbed(done.stdout) == scrubbed(output), f"{command}\n{done.stderr}"
