"""CUDA branches of the package, and those of them that the tests have not entered.

A branch is an ``if`` that compares something with ``"cuda"`` or NCCL; the arm for CUDA is entered
if coverage.py has recorded the arc to it in some process.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import coverage

ROOT = Path(__file__).parents[2]
#: What decides for CUDA beside the name of the device.
NAMES = frozenset({"NCCL", "nccl"})


class Branch(NamedTuple):
    """An ``if``: its lines, and whether its body is the arm for CUDA."""

    path: Path
    line: int
    body: int
    is_body: bool

    def is_entered(self, arcs: set[tuple[int, int]]) -> bool:
        """Return whether a test has gone from the condition into the arm for CUDA."""
        nexts = {to for at, to in arcs if at == self.line and to != self.line}
        return self.body in nexts if self.is_body else bool(nexts - {self.body})

    def __str__(self) -> str:
        text = self.path.read_text().splitlines()[self.line - 1].strip()
        return f"{self.path.relative_to(ROOT)}:{self.line}: {text}"


def is_of_cuda(test: ast.expr) -> bool:
    """Return whether a condition asks for CUDA by name."""
    for node in ast.walk(test):
        if isinstance(node, ast.Constant) and node.value == "cuda":
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in NAMES:
                return True
    return False


def branches(package: Path) -> Iterator[Branch]:
    """Find the branches of all modules of a package."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.If) and is_of_cuda(node.test):
                first = node.test.ops[0] if isinstance(node.test, ast.Compare) else None
                other = isinstance(first, ast.NotEq | ast.NotIn)
                negated = isinstance(node.test, ast.UnaryOp) or other or _is_refusal(node.test)
                yield Branch(path, node.lineno, node.body[0].lineno, not negated)


def _is_refusal(test: ast.expr) -> bool:
    """``device.type != "cuda" or ...``: the body is for all others."""
    return isinstance(test, ast.BoolOp) and any(
        isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.NotEq)
        for value in test.values
    )


def main() -> None:
    """Print the branches that were not entered; the exit status is 1 if there is one."""
    data = coverage.CoverageData(sys.argv[1])
    data.read()
    all_ = list(branches(ROOT / "lazygt"))
    left = [each for each in all_ if not each.is_entered(set(data.arcs(str(each.path)) or ()))]
    print(f"{len(all_) - len(left)} of {len(all_)} CUDA branches were entered")
    print(*left, sep="\n")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
