"""Programs that are predicted and then run on workers of this machine; how close they are is not
tested, since it hangs on who else is busy."""

from __future__ import annotations

import sys

import pytest

from benchmarks import foresight_here
from benchmarks.foresight_here import CASES, measure

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["W3, MLP, SGD", "MLP 4 x 512, two stages"])
def test_a_program_is_simulated_and_run(name: str) -> None:
    told = measure(CASES[name], "cpu-generic", steps=2, rounds=1)
    assert 0 < told.predicted < 1
    assert told.seconds > 0
    assert told.peak > 0
    assert told.predicted_bytes > 0


def test_a_name_that_no_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["foresight_here", "--only", "nothing"])
    with pytest.raises(SystemExit, match="no program has 'nothing' in its name: W1"):
        foresight_here.main()


def test_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["foresight_here", "--only", "W3", "--machine", "none"])
    with pytest.raises(SystemExit, match="machine none is no machine"):
        foresight_here.main()
