"""The examples of docs/transfer.md run and print what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_examples_of_the_document_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs/transfer.md").read_text())
    script = tmp_path / "example.py"
    script.write_text("\n".join(body for kind, body in blocks if kind == "python"))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(body for kind, body in blocks if kind == "text")
