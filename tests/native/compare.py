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

ROOT = Path(__file__).parents[2]
SHOWN = 12


def accounts(
    folder: Path, kind: str, arguments: list[Any], sides: list[tuple[str, str | None]]
) -> list[dict[str, Any]]:
    """What both sides tell; each side is a recorder and a mutation of it."""

    def side(number: int) -> dict[str, Any]:
        recorder, mutation = sides[number]
        path = folder / f"{number}.json"
        task = json.dumps({"kind": kind, "arguments": arguments, "mutation": mutation})
        done = subprocess.run(
            [sys.executable, "-m", "tests.native.accounts", str(path), task],
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


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Where two lists of accounts differ, one line a field, and the program's name first."""
    assert [a["name"] for a in ours] == [b["name"] for b in theirs]
    return [
        f"{a['name']}: {field}: {difference(a[field], b[field])}"
        for a, b in zip(ours, theirs, strict=True)
        for field in a
        if a[field] != b[field]
    ]


def difference(ours: Any, theirs: Any) -> str:
    """The lines of two values that differ."""
    ours, theirs = (json.dumps(value, indent=0).replace("\\n", "\n") for value in (ours, theirs))
    changed = [
        line
        for line in difflib.unified_diff(ours.splitlines(), theirs.splitlines(), lineterm="", n=0)
        if line[:3] not in ("---", "+++") and line[:2] != "@@"
    ]
    return "\n    ".join(["", *changed[:SHOWN]])
