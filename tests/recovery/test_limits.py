"""Where recovery ends: it is turned off or gives up, and says so; nothing hangs or is kept."""

from __future__ import annotations

import errno
import gc
import os
import weakref

import pytest
import torch

import lazygt
from lazygt.recovery import snapshot
from tests.recovery.mortal import mortal_session

pytestmark = pytest.mark.timeout(60)


def test_values_killing_every_restore_are_given_up() -> None:
    """No run has begun, so none is to blame; it is given up all the same."""
    with mortal_session() as (s, link):
        x = torch.ones(8) * 3
        s.synchronize()
        sent = len(link.messages)
        link._faults = dict.fromkeys(range(sent + 1, sent + 100), "before")
        with pytest.raises(lazygt.WorkerDied, match="10 processes died while values were restored"):
            x.sum().item()
        assert link.lives == 1 + 10
        s.close()


def test_a_snapshot_that_is_refused_in_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being done again needs the journal: it is turned off when that is done."""
    with mortal_session() as (s, link):
        x = torch.ones(80) * 3
        assert x.sum().item() == 240
        recovery = s._client.recovery
        assert recovery is not None
        x = x + 1
        s.flush()
        monkeypatch.setattr(snapshot, "memory_left", lambda: 100)
        link._faults = {len(link.messages) + 1: "before"}
        s._client._snap(recovery)  # which kills
        with pytest.warns(RuntimeWarning, match="From here on the death of a worker loses values"):
            assert x.sum().item() == 320
        assert [each.ranks for each in s.recoveries] == [(0,)]
        for _ in range(3):
            x = x + 1
        assert x.sum().item() == 560
        assert s._client.recovery is None


def test_an_upload_finds_room_where_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are kept for a recovery; where that leaves no room, there will be none."""
    ftruncate = os.ftruncate

    def full(fd: int, nbytes: int) -> None:
        if nbytes > 2 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ftruncate(fd, nbytes)

    monkeypatch.setattr(os, "ftruncate", full)
    large = torch.ones(100_000, device="cpu")  # two fill the arena's first segment
    with mortal_session() as (s, _):
        with pytest.warns(RuntimeWarning, match="no memory for an upload beside those kept"):
            total = sum(large.to("lazygt").sum().item() for _ in range(4))
        assert total == 400_000
        assert s._client.recovery is None


def test_recorded_death_keeps_no_tensor_alive() -> None:
    """An error holds the frames that it went through, and these the user's tensors."""

    def seen() -> weakref.ref[torch.Tensor]:
        theirs = torch.ones(8, device="cpu")
        assert theirs.to("lazygt").sum().item() == 8
        return weakref.ref(theirs)

    with mortal_session([(1, "after")]) as (s, link):
        theirs = seen()
        assert link.lives == 2
        assert len(s.recoveries) == 1
        gc.collect()
        assert theirs() is None
