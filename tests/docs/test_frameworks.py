"""The examples of docs/frameworks.md run, each with its packages or not at all."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, ROOT

TEXT = (ROOT / "docs/frameworks.md").read_text()
PREAMBLE, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def code(text: str) -> str:
    return "\n".join(body for language, body in BLOCK.findall(text) if language == "python")


EXAMPLES = {section.split("\n", 1)[0]: code(section) for section in SECTIONS if code(section)}


def missing(example: str) -> list[str]:
    """Packages that an example imports and that are not installed."""
    names = dict.fromkeys(re.findall(r"^(?:from|import) (\w+)", example, re.MULTILINE))
    return [name for name in names if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    lacking = missing(EXAMPLES[name])
    if lacking:
        pytest.skip(f"{', '.join(lacking)} is not installed")
    script = tmp_path / "example.py"
    script.write_text(code(PREAMBLE) + EXAMPLES[name])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_framework_has_an_example() -> None:
    assert set(EXAMPLES) == {
        "transformers", "accelerate", "peft", "Lightning", "skorch", "ignite",
        "stable-baselines3", "PyTorch Geometric",
    }  # fmt: skip
