"""Two processes, a recorder each, the same programs: do their accounts agree?"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.conformance.refusals import UNWRITTEN

ROOT = Path(__file__).parents[2]
SHOWN = 12
#: What the user sees, which is equal whatever ops torch calls.
SEEN = ("values", "errors", "flushes", "count of bytes_uploaded", "count of bytes_fetched")

#: Where torch has another formula for Python subclasses, in a mode, too, or asks others for values.
OTHER_FORMULAS = {"atan2 backward", "cumprod backward", "linalg.eig backward",
                  "masked.cumprod backward", "__getitem__ backward",
                  "nn.functional.one_hot forward"}  # fmt: skip
#: Memory that nobody has written, and strides of another formula.
OTHER_VALUES = {f"{name} forward" for name in UNWRITTEN} | {"ormqr backward"}


def accounts(
    folder: Path,
    kind: str,
    arguments: list[Any],
    sides: list[tuple[str, str | None]],
    only: list[str] | None = None,
) -> list[dict[str, Any]]:
    """What both sides tell; each side is a recorder and a mutation of it.

    Args:
        only: the names of the programs that are wanted, run so that torch calls the ops that it
            calls for Python subclasses; None: all, run plainly.
    """

    def side(number: int) -> dict[str, Any]:
        recorder, mutation = sides[number]
        path = folder / f"{number}.json"
        asked = {"kind": kind, "arguments": arguments, "mutation": mutation, "only": only}
        done = subprocess.run(
            [sys.executable, "-m", "tests.native.accounts", str(path), json.dumps(asked)],
            env={**os.environ, "LAZYGT_RECORDER": recorder, "LAZYGT_CHECK_PASSES": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told: dict[str, Any] = json.loads(path.read_text())
        return told

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(side, range(len(sides))))


def other_ops(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """The programs for which torch called other ops on one side, and would not in a mode."""
    return [
        a["name"]
        for a, b in zip(ours, theirs, strict=True)
        if a["ops"] != b["ops"] and operator_of(a["name"]) not in OTHER_FORMULAS
    ]


def differences(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], seen: list[str] | None = None
) -> list[str]:
    """Where two lists of accounts differ, one line a field, and the program's name first.

    Args:
        seen: programs of which only what the user sees is looked at.
    """
    assert [a["name"] for a in ours] == [b["name"] for b in theirs]
    return [
        f"{a['name']}: {field}: {difference(a[field], b[field])}"
        for a, b in zip(ours, theirs, strict=True)
        for field in (SEEN if a["name"] in (seen or ()) else a)
        if a[field] != b[field] and not by_torch(a["name"], field)
    ]


def by_torch(program: str, field: str) -> bool:
    """Whether torch itself makes a field differ."""
    operator = operator_of(program)
    if operator in OTHER_FORMULAS:
        return field not in ("values", "errors")
    return field == "values" and operator in OTHER_VALUES


def operator_of(program: str) -> str:
    """Operator and direction of a program of the operator database."""
    return program.rpartition(" ")[0]


def difference(ours: Any, theirs: Any) -> str:
    """The lines of two values that differ."""
    ours, theirs = (json.dumps(value, indent=0).replace("\\n", "\n") for value in (ours, theirs))
    changed = [
        line
        for line in difflib.unified_diff(ours.splitlines(), theirs.splitlines(), lineterm="", n=0)
        if line[:3] not in ("---", "+++") and line[:2] != "@@"
    ]
    return "\n    ".join(["", *changed[:SHOWN]])
