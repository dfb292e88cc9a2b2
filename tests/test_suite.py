"""Passes of `make test`: each test runs in one of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_timed_tests_lie_where_make_test_looks_for_them() -> None:
    """The first pass leaves them out, and the second looks in a few folders only."""
    (folders,) = re.findall(r"^TIMED = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = {
        str(path.parent.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\bmark\.timed\b", path.read_text())
    }
    assert marked == set(folders.split())


def test_table_of_passes_names_those_that_make_test_prints() -> None:
    printed = re.findall(r"^\t\$\(call PASS,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| pass of `make test` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\| [\d.]+ \|$", table, re.MULTILINE)
    assert rows == printed != []
