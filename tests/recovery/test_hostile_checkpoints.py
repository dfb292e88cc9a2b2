"""Hostile checkpoints with right checksums: typed refusals, and nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hostile_checkpoints import KINDS, attack


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_are_refused_and_nothing_runs(kind: str, tmp_path: Path) -> None:
    count = {"pickle": 400, "deep": 40}.get(kind, 150)
    forge, events = attack(kind, count, tmp_path / kind)
    assert events == {}
    assert sum(forge.outcomes.values()) == count
    assert set(forge.outcomes) <= {"read", "refused"}
    assert forge.outcomes["refused"] > (count if kind == "pickle" else 0.3 * count) - 1
