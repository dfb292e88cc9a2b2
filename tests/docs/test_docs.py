"""Every example and command in the documents runs, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, ROOT

DOCUMENTS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "concepts",
            "native",
            "custom_ops",
            "passes",
            "tuning",
            "seeing",
            "sharding",
            "machines",
            "foresight",
            "transfer",
            "recovery",
            "clusters",
            "serving",
            "security",
            "pool",
        )
    ),
]
#: Pages whose examples take minutes.
LONG = ("docs/foresight.md",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text()
    return [body for kind, body in BLOCK.findall(text) if kind == language]


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.deep] * (each in LONG)) for each in DOCUMENTS],
)
def test_python_examples_run(name: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(name, "python")))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(blocks(name, "text"))


def test_readme_shows_the_program_that_its_picture_draws() -> None:
    (program,) = blocks("README.md", "python")
    assert (ROOT / "examples" / "first_session.py").read_text() == program
    picture = (ROOT / "docs" / "pictures" / "step.svg").read_text()
    for number, line in enumerate(program.splitlines(), 1):
        if "loss =" in line or ".step()" in line:
            assert f"first_session.py:{number}&#10;" in picture


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    commands = "".join(blocks(name, "console"))
    targets = re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)
    assert targets
    for target in targets:
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    pages = [str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "sharding").glob("*.md")]
    others = ["docs/frameworks.md", "docs/ROADMAP.md", "CONTRIBUTING.md"]
    for name in [*DOCUMENTS, *pages, *others]:
        prose = re.sub(
            r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE
        )
        for link in re.findall(r"\]\((?!http|#)([^)#]+)", prose):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"
