"""CONTRIBUTING's "Adding things": the files, tables and methods that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TABLE = TEXT.partition("## Adding things")[2].partition("\n## ")[0]
ROWS = [row.strip("| ").split(" | ") for row in TABLE.splitlines() if row.startswith("| a")]
#: One or some names in a file: `A`, `B` or `C` in `a/file.py`.
NAMED = re.compile(r"((?:`\w+`(?:, | or | and )?)+) in `([\w/]+\.py)`")


def named(cell: str, root: Path) -> list[tuple[Path, str]]:
    """What a cell says is in which file."""
    found = NAMED.findall(cell)
    return [(root / file, name) for names, file in found for name in re.findall(r"`(\w+)`", names)]


CLAIMS = [
    claim
    for row in ROWS
    for claim in (*named(row[3], ROOT / "lazygt"), *named(row[4], ROOT / "tests"))
]


def test_page_lists_seven_extension_points() -> None:
    assert len(ROWS) == 7
    for _, file, *_ in ROWS:
        path = re.findall(r"`([\w/]+\.py)`", file)[0]
        assert (ROOT / "lazygt" / path.replace("NAME", "__init__")).exists(), path


def test_every_row_names_something() -> None:
    assert len(CLAIMS) == 12


@pytest.mark.parametrize(("file", "name"), CLAIMS, ids=lambda part: getattr(part, "name", part))
def test_listed_name_is_defined_in_listed_file(file: Path, name: str) -> None:
    defined = rf"^ *(def|class) {name}\b|^{name}\b.*="
    assert re.search(defined, file.read_text(), re.MULTILINE), f"{file} has no {name}"
