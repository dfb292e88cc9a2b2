"""Here snapshots are taken, and often."""

import pytest

from lazygt.recovery import recover


@pytest.fixture(autouse=True)
def snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "_LEAST_SECONDS", 0.1)
