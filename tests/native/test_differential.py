"""Both recorders record the same: plans, misses, flushes, lines, values and errors.

The same programs run in two processes, a recorder each, and the accounts of both are compared. That
the comparison can fail is asked of the recorder in Python against itself with faults put in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazygt import native
from tests.native.compare import accounts, differences, other_ops
from tests.native.mutations import MUTATIONS

pytestmark = pytest.mark.timeout(600)
needs_native = pytest.mark.skipif(
    native.choice().recorder != "native",
    reason="the native recorder is not chosen: make test-native",
)

FAST: dict[str, list[Any]] = {
    "drawn": [0, 40],
    "positions": [0, 20],
    "operators": [5, 60, 1],
    "models": [["adamw"], 2],
}
DEEP: dict[str, list[Any]] = {
    "drawn": [1_000, 600],
    "positions": [1_000, 400],
    "operators": [0, 1, 1],
    "models": [["sgd", "adam_foreach", "adamw_fused"], 3],
}


def compared(folder: Path, kind: str, arguments: list[Any], *recorders: str) -> list[str]:
    """What two recorders differ in."""

    def run(only: list[str] | None) -> list[Any]:
        sides = accounts(folder, kind, arguments, [(name, None) for name in recorders], only)
        assert [side["recorder"] for side in sides] == list(recorders)
        return [side["accounts"] for side in sides]

    plain = run(None)
    assert plain[0]
    names = other_ops(*plain)
    return differences(*plain, names) + (differences(*run(names)) if names else [])


@needs_native
@pytest.mark.parametrize("kind", FAST)
def test_recorders_record_the_same(tmp_path: Path, kind: str) -> None:
    found = compared(tmp_path, kind, FAST[kind], "native", "python")
    assert not found, "\n".join(found)


@needs_native
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", DEEP)
def test_recorders_record_the_same_of_many_more(tmp_path: Path, kind: str) -> None:
    found = compared(tmp_path, kind, DEEP[kind], "native", "python")
    assert not found, "\n".join(found)


# -- the comparison itself -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the recorder in Python tells of some drawn programs, and with each fault put in."""
    sides = [("python", mutation) for mutation in (None, None, *MUTATIONS)]
    every = accounts(tmp_path_factory.mktemp("told"), "drawn", [0, 12], sides)
    return [side["accounts"] for side in every]


def test_a_recorder_agrees_with_itself(told: Any) -> None:
    assert told[0][0]["plans"]
    assert not differences(told[0], told[1])


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["operators", "models"])
def test_a_recorder_agrees_with_itself_in_all(tmp_path: Path, kind: str) -> None:
    found = compared(tmp_path, kind, FAST[kind], "python", "python")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_is_seen(told: Any, mutation: str) -> None:
    found = differences(told[0], told[2 + list(MUTATIONS).index(mutation)])
    field = MUTATIONS[mutation][1]
    assert any(f": {field}: " in line for line in found), "\n".join(found)
