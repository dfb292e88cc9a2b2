"""The pages in docs/sharding: their programs run, and are explained as they say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, ROOT, scrubbed, shell

PAGES = sorted((ROOT / "docs" / "sharding").glob("*.md"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_commands_print_documented_output(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    for language, body in blocks:
        if language == "py":
            name = body.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(body)
    commands = [body for language, body in blocks if language == "console"]
    assert commands
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LAZYGT_THREADS": "1"}
    for body in commands:
        command, _, output = body.removeprefix("$ ").partition("\n")
        done = shell(command, tmp_path, env)
        assert scrubbed(done.stdout) == scrubbed(output), f"{command}\n{done.stderr}"


def test_every_page_is_named() -> None:
    text = (ROOT / "docs" / "sharding.md").read_text()
    named = set(re.findall(r"\(sharding/(\w+)\.md\)", text))
    assert named == {page.stem for page in PAGES} == {"dlrm", "llama", "long_context", "moe"}
