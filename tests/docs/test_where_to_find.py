"""docs/where_to_find.md: every door opens, and no room is missing."""

import ast
import re
from pathlib import Path

import pytest

from lazygt.runtime.cluster.opening import LAUNCHERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lazygt"
PAGE = (ROOT / "docs" / "where_to_find.md").read_text()
DOORS = re.findall(r"^\| [^`|]+ \| `([\w/.]+)`, `(\w+)` \|$", PAGE, re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Names that a file defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_page_lists_fifteen_topics() -> None:
    assert len(DOORS) == 15


@pytest.mark.parametrize(("file", "name"), DOORS)
def test_listed_entry_point_exists(file: str, name: str) -> None:
    assert name in defined(PACKAGE / file)


def test_every_package_is_listed() -> None:
    rooms = PAGE.partition("## The rooms")[2]
    for path in PACKAGE.iterdir():
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__", "lightning"):
            assert f"`{path.name}`" in rooms, path.name
        elif path.is_dir() and (path / "__init__.py").exists():
            assert f"`{path.name}/`" in rooms, path.name


def test_every_launcher_is_listed() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    listed = re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)
    assert sorted(listed) == sorted(["auto", *LAUNCHERS])
