"""A worker dies before, in the midst of and after every message of a program: the bits are those of
the run that was not disturbed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazygt
from lazygt.runtime.launch import opening
from lazygt.runtime.recovery import snapshot
from lazygt.runtime.recovery.recover import Recovery
from tests.recovery.mortal import Fault, MortalLink

pytestmark = pytest.mark.timeout(600)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """SHA-256 of the values and their layouts."""
    told = hashlib.sha256()
    for t in tensors:
        told.update(repr((t.shape, t.stride(), t.dtype)).encode())
        told.update(t.detach().cpu().contiguous().numpy().tobytes())
    return told.hexdigest()


def training(s: lazygt.Session) -> list[torch.Tensor]:
    """Dropout, a schedule, batches from the CPU, losses that are read now and then."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    model.to("lazygt")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5)
    losses = []
    for step in range(5):
        x = torch.randn(6, 8, device="cpu").to("lazygt")
        opt.zero_grad()
        loss = F.cross_entropy(model(x), torch.randint(0, 4, (6,)))
        loss.backward()
        opt.step()
        schedule.step()
        if step % 2:
            losses.append(torch.tensor(loss.item(), device="cpu"))
    state = [v for each in opt.state.values() for v in each.values()]
    return [*losses, *model.parameters(), *state, torch.get_rng_state()]


def values_in_python(s: lazygt.Session) -> list[torch.Tensor]:
    """Shapes that depend on values, uploads and fetches through shared memory, in-place writes,
    views, an op that fails."""
    x = torch.arange(4096.0)
    big = torch.randn(64, 64, device="cpu").to("lazygt")
    picked = x[x.remainder(7) == 3]
    for _ in range(3):
        x[1:] += picked.sum()
        big.mul_(0.5).add_(x[:64])
    with pytest.raises(IndexError):
        x[torch.tensor([5000])].sum().item()
    found = x.nonzero()
    whole = big.cpu()
    again = whole.to("lazygt") @ big
    s.flush()
    return [picked, x, found, whole, again, big.t(), torch.rand(3), torch.rand(3, device="cpu")]


PROGRAMS: dict[str, Callable[[lazygt.Session], list[torch.Tensor]]] = {
    "training": training,
    "values in Python": values_in_python,
}


def is_due(recovery: Recovery, snapshots: bool, kept_bytes: int) -> bool:
    return snapshots and not recovery.journal.cutting


class Outcome:
    """What a program came to, and the messages that it took."""

    def __init__(self, program: str, faults: Sequence[Fault] = (), snapshots: bool = False) -> None:
        links: list[MortalLink] = []

        def open_mortal(config: Any, mesh: Any, copier: str) -> MortalLink:
            links.append(MortalLink(faults, config.shm_threshold))
            return links[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(opening.LAUNCHERS, "mortal", open_mortal)
            patch.setattr(Recovery, "is_due", partialmethod(is_due, snapshots))
            torch.manual_seed(11)
            with lazygt.session(launcher="mortal", compile="off", shm_threshold=1024) as s:
                self.digest = digest(PROGRAMS[program](s))
            self.recoveries = s.recoveries
        self.messages, self.lives = len(links[0].messages), links[0].lives


def test_where_memory_is_short_no_snapshot_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "memory_left", lambda: 100)
    undisturbed = Outcome("training")
    with pytest.warns(RuntimeWarning, match=r"bytes to copy, and [\d,]+ bytes of memory are left"):
        assert Outcome("training", snapshots=True).digest == undisturbed.digest


@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_death_at_any_message_changes_no_bit(program: str, snapshots: bool, when: str) -> None:
    undisturbed = Outcome(program, snapshots=snapshots)
    assert undisturbed.lives == 1
    assert not undisturbed.recoveries
    for message in range(1, undisturbed.messages + 1):
        disturbed = Outcome(program, [(message, when)], snapshots)
        assert disturbed.digest == undisturbed.digest, message
        # nobody waits for an answer to the last one, if that is a snapshot
        noticed = disturbed.lives == 2 or (snapshots and message == undisturbed.messages)
        assert noticed, message
        assert [r.ranks for r in disturbed.recoveries] == [(0,)] * (disturbed.lives - 1)
