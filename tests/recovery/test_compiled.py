"""A worker that dies while plans run compiled: what is done again is done by the same code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import lazygt
from tests.recovery.programs import chaotic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("compiled_code_pays"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(autouse=True)
def cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(shared))


def run(kill: int | None, snapshot: int | None, workers: int) -> tuple[torch.Tensor, int, int]:
    """What eight steps make, of which the last five run compiled.

    Args:
        kill, snapshot: the step before which a worker is killed, or a snapshot taken.

    Returns:
        The values, how many groups are compiled, and how many recoveries there were.
    """
    start = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    with lazygt.session(
        workers=lazygt.Workers(workers, threads=1), mesh={"data": workers}, compile="auto"
    ) as session:
        x = lazygt.distribute(start.to("lazygt"), {"data": lazygt.Shard(0)})
        for number in range(8):
            if number == 3:
                assert session.compiled(timeout=200)
            if number == snapshot:
                session._client.snap(lambda snapshot: None)
                session._client.wait_snapped()
            if number == kill:
                os.kill(session.worker_pids[-1], signal.SIGKILL)
            x = chaotic(x)
            session.flush()
        values = x.cpu()
        swapped = sum(bool(entry.swap) for entry in session._client.entries)
        return values, swapped, len(session.recoveries)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("snapshot", [None, 2, 5])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_recovery_changes_no_bit(workers: int, snapshot: int | None) -> None:
    expected, swapped, _ = run(None, None, workers)
    assert swapped == 1
    for kill in (4, 7):
        found, swapped, recoveries = run(kill, snapshot, workers)
        assert (swapped, recoveries) == (1, 1)
        assert torch.equal(found, expected)


def test_compiled_code_has_other_bits() -> None:
    """Else the test above could not fail."""
    expected, _, _ = run(None, None, 1)
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        x = chaotic(x)
    assert not torch.equal(expected, x)
