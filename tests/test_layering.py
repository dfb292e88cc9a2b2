"""Imports inside lazygt point down, form no cycle, and stand at the top of their file."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lazygt"

# The rooms in which plans run, from the bottom up; "runtime" are the files that lie loose in it.
RUNTIME = (
    "runtime",
    "runtime.collectives",
    "runtime.executors",
    "recovery",
    "runtime.worker",
    "runtime.launch",
    "runtime.client",
    "runtime.compiling",
    "runtime.cluster",
)
# From the bottom up; what stands in one row may import one another, without a circle. A name is a
# package's or, at the root, a file's; "lazygt" is the package's own __init__.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "config", "settings", "host", "printing"}),
    frozenset({"native"}),
    frozenset({"net"}),
    frozenset({"graph"}),
    frozenset({"serving"}),
    frozenset({"machine"}),
    frozenset({"passes"}),
    *(frozenset({room}) for room in RUNTIME),
    frozenset({"transfer", "pool"}),
    frozenset({"record"}),
    frozenset({"session", "submit", "recovery.checkpoint", "recovery.rollback"}),
    frozenset({"parallel"}),
    frozenset({"observe", "calibrate", "simulation"}),
    frozenset({"sweeps"}),
    frozenset({"cli", "integrations", "lightning", "observe.top"}),
    frozenset({"lazygt"}),
)
# Pairs that a downward rule alone would allow.
FORBIDDEN = {
    **{(room, "passes"): "the runtime runs plans and never makes them" for room in RUNTIME},
    ("transfer", "passes"): "weights are no graphs",
    ("graph", "host"): "graphs know no device and no file",
    ("graph", "net"): "graphs are sent by others",
}
# What still breaks a rule, by package. Only ever less may stand here.
UPWARD: set[tuple[str, str]] = set()

REASON = re.compile(r"#.*\bwhy: \S")


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    return {module_name(path): path for path in sorted(package.rglob("*.py"))}


def imported_modules(node: ast.Import | ast.ImportFrom, package: str, known: set[str]) -> list[str]:
    """The lazygt modules that one import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return [name for name in names if name.split(".")[0] == "lazygt"]
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    if base.split(".")[0] != "lazygt":
        return []
    full = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in known else base for name in full]


def read_imports(name: str, path: Path, known: set[str], source: str | None = None) -> list[Import]:
    tree = ast.parse(source if source is not None else path.read_text())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return [
        Import(name, target, node.lineno)
        for node, _ in walk_imports(tree)
        for target in dict.fromkeys(imported_modules(node, package, known))
    ]


def walk_imports(
    tree: ast.AST, around: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[ast.Import | ast.ImportFrom, tuple[ast.AST, ...]]]:
    """Every import statement, with the syntax that encloses it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, around
        yield from walk_imports(node, (*around, node))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@cache
def all_imports() -> list[Import]:
    found = modules()
    return [entry for name, path in found.items() for entry in read_imports(name, path, set(found))]


def package_of(module: str) -> str:
    """The package, or the file at the root, that a module belongs to."""
    rows = set[str]().union(*LAYERS)
    path = module.split(".")[1:]
    pair = ".".join(path[:2])
    return pair if pair in rows else (path or [module])[0]


def height_of(package: str) -> int:
    for height, row in enumerate(LAYERS):
        if package in row:
            return height
    raise AssertionError(f"lazygt.{package} stands in no layer: add it to LAYERS")


def complaint(entry: Import) -> str | None:
    """Why this import is not allowed, or None."""
    pair = source, target = package_of(entry.importer), package_of(entry.imported)
    if pair in FORBIDDEN:
        return FORBIDDEN[pair]
    if height_of(target) > height_of(source) and pair not in UPWARD:
        return "points up"
    return None


def circles() -> list[set[str]]:
    """Modules that import one another, each circle's together; imports for types are counted."""
    graph = nx.DiGraph()
    graph.add_edges_from(
        (entry.importer, entry.imported)
        for entry in all_imports()
        if entry.importer != entry.imported
    )
    return [members for members in nx.strongly_connected_components(graph) if len(members) > 1]


def test_every_module_has_a_layer() -> None:
    for name in modules():
        height_of(package_of(name))


def test_contributing_draws_the_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = next(block for block in text.split("```") if "runtime/executors/" in block)
    lines = [re.split(r"  +", line)[0].split() for line in drawn.strip().splitlines()]
    rows = [{name.strip("/").replace("/", ".") for name in line} for line in lines]
    assert rows == [set(row) for row in reversed(LAYERS) if row != {"lazygt"}]


def test_imports_point_down() -> None:
    wrong = [f"{entry}: {why}" for entry in all_imports() if (why := complaint(entry))]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """An import under `if TYPE_CHECKING` never runs, and yet binds two files to be read as one."""
    assert not circles(), "\n".join(" <-> ".join(sorted(circle)) for circle in circles())


def test_imports_inside_functions_state_a_reason() -> None:
    """A late import (of anything, not only of lazygt) needs `# why: ...` on or above its line."""
    wrong = []
    for name, path in modules().items():
        source = path.read_text()
        wrong += [f"{name}:{line}" for line in unexplained(source)]
    assert not wrong, "imports inside functions without `# why: ...`:\n" + "\n".join(wrong)


def unexplained(source: str) -> list[int]:
    lines = source.splitlines()
    return [
        node.lineno
        for node, around in walk_imports(ast.parse(source))
        if any(map(is_function, around))
        and not has_reason(lines, node.lineno, node.end_lineno or node.lineno)
    ]


def has_reason(lines: list[str], first: int, last: int) -> bool:
    """A `# why:` on the statement, or in the block of comments and imports just above it."""
    if any(REASON.search(line) for line in lines[first - 1 : last]):
        return True
    for line in reversed(lines[: first - 1]):
        if REASON.search(line):
            return True
        if not line.strip().startswith(("#", "import ", "from ")):
            return False
    return False


# The tests below hold the reader itself to account, with sources that break each rule.


@pytest.mark.parametrize(
    ("importer", "source", "expected"),
    [
        ("lazygt.graph.node", "from lazygt.runtime import plan", "points up"),
        ("lazygt.graph.node", "import lazygt", "points up"),
        ("lazygt.runtime.plan", "from lazygt.passes.base import Pass", "never makes them"),
        ("lazygt.runtime.client.answers", "from lazygt.passes import base", "never makes them"),
        ("lazygt.recovery.journal", "from lazygt.passes import base", "never makes them"),
        ("lazygt.runtime.worker.inline", "from lazygt.runtime.launch import launcher", "points up"),
        ("lazygt.runtime.launch.launcher", "from lazygt.runtime.worker import inline", None),
        ("lazygt.recovery.checkpoint.states", "from lazygt.passes import base", None),
        ("lazygt.recovery.checkpoint.states", "from lazygt.parallel import stage", "points up"),
        ("lazygt.transfer.sender", "from lazygt.passes import base", "no graphs"),
        ("lazygt.graph.node", "from lazygt.host import files", "no file"),
        ("lazygt.runtime.plan", "def f():\n    from ..session import x", "points up"),
        ("lazygt.record.tensor", "from lazygt.session import x", "points up"),
        ("lazygt.session", "from lazygt.parallel import stage", "points up"),
        ("lazygt.observe.why", "from lazygt.cli.show import x", "points up"),
        ("lazygt.parallel.distribute", "from lazygt.session import x", None),
        ("lazygt.session", "from lazygt.graph.node import Node", None),
        ("lazygt.record.tensor", "from lazygt import errors", None),
        ("lazygt.record.tensor", "import torch", None),
    ],
)
def test_import_reader_judges_source(importer: str, source: str, expected: str | None) -> None:
    known = {"lazygt.errors", "lazygt.runtime.plan", "lazygt.passes.base", "lazygt.session"}
    path = PACKAGE / "x.py"
    found = [complaint(entry) for entry in read_imports(importer, path, known, source)]
    reasons = [why for why in found if why]
    if expected is None:
        assert not reasons
    else:
        assert expected in reasons[0]


def test_reader_wants_a_reason_for_a_late_import() -> None:
    assert unexplained("def f():\n    import torch\n") == [2]
    assert unexplained("def f():\n    import torch  # noqa: PLC0415\n") == [2]
    assert unexplained("def f():\n    import torch  # why: torch takes a second to load\n") == []
    assert unexplained("def f():\n    # why: slow\n    import torch\n    import numpy\n") == []
    assert unexplained("import torch\n") == []
