"""Local names say the thing: six names that say only where a value came from stand in
comprehensions alone, where the thing is one word away."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lazygt"
NAMES = frozenset({"found", "made", "one", "each", "own", "mine"})
SHORT = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda
# Functions that still have one, by package. Only ever less may stand here.
LEFT: dict[str, int] = {
    "lazygt": 5,
    "passes": 23,
    "record": 48,
    "runtime": 20,
    "transfer": 17,
}


def bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The six names that a function itself binds, as a parameter or a variable."""
    names: set[str] = set()
    todo: list[ast.AST] = [function.args, *function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, SHORT | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return names & NAMES


def functions(path: Path) -> list[str]:
    """The functions of a file that bind one of the names, with the names."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {', '.join(sorted(names))}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (names := bound(node))
    ]


def test_local_names_say_the_thing() -> None:
    lines = [line for path in sorted(PACKAGE.rglob("*.py")) for line in functions(path)]
    counts = Counter(line.split("/")[0] if "/" in line else "lazygt" for line in lines)
    over = {package for package, count in counts.items() if count > LEFT.get(package, 0)}
    assert not over, "\n".join(line for line in lines if line.split("/")[0] in over)


def test_the_reader_sees_what_is_bound() -> None:
    source = "def f(found):\n    made, x = g()\n    return [one for one in x]"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert bound(function) == {"found", "made"}
