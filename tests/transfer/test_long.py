"""Many transfers: nothing torn, nothing leaked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazygt
from tests.transfer.child import Reader, footprint, weights
from tests.transfer.conftest import Stage

pytestmark = [pytest.mark.timeout(100), pytest.mark.slow]

MakeStage = Callable[[str], Stage]


def stamped(version: int) -> dict[str, torch.Tensor]:
    """Every element of every parameter says which version it is of."""
    return {f"m{k}.weight": torch.full((4_000,), float(version)) for k in range(6)}


def test_no_reading_is_torn(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, 2)
    last = 200
    lazygt.transfer_weights(stamped(1), sender, timeout=20.0)
    for reader in readers:
        reader._pipe.send(("hammer", (last,)))
    for version in range(2, last + 1):
        lazygt.transfer_weights(stamped(version), sender, timeout=20.0)
    for reader in readers:
        assert reader._pipe.poll(20.0)
        readings, versions, torn = reader._pipe.recv()
        assert torn == []
        assert readings > last
        assert versions > last // 4


def footprints(readers: list[Reader]) -> list[tuple[int, int, int]]:
    return [footprint(), *(reader.ask("footprint") for reader in readers)]


def test_a_hundred_transfers_leave_nothing_behind(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, 2)
    models = [weights(1), weights(2)]
    for version in range(20):
        lazygt.transfer_weights(models[version % 2], sender, timeout=20.0)
    before = footprints(readers)
    for version in range(100):
        lazygt.transfer_weights(models[version % 2], sender, timeout=20.0)
    for old, new in zip(before, footprints(readers), strict=True):
        assert new[0] == old[0], "descriptors"
        assert new[1] <= old[1] + 4, "mappings"  # malloc may map an arena of its own
        assert new[2] <= old[2] + 2_048, "resident KiB"
