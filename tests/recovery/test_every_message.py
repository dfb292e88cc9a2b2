"""A worker dies before, in the midst of and after every message of a program: the bits are those of
the run that was not disturbed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazygt
from lazygt.recovery import snapshot
from tests.recovery.mortal import Fault, mortal_session
from tests.support.timeouts import DEEP

pytestmark = pytest.mark.timeout(600)

#: One of so many messages of a program is tried; in the deep profile each.
STRIDE = 1 if DEEP else 2


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


def failed_step(s: lazygt.Session) -> list[torch.Tensor]:
    """A batch is bad, and nobody sees that before the optimizer has stepped."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8, 4))
    model.to("lazygt")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randint(0, 8, (6, 2), device="cpu")
        x[0, 0] = 99 if step == 2 else 1
        opt.zero_grad()
        loss = F.cross_entropy(model(x.to("lazygt")), torch.randint(0, 4, (6,)))
        loss.backward()
        opt.step()
        with pytest.raises(IndexError) if step == 2 else nullcontext():
            loss.item()
    state = [v for each in opt.state.values() for v in each.values()]
    return [*model.parameters(), *state, torch.get_rng_state()]


PROGRAMS: dict[str, Callable[[lazygt.Session], list[torch.Tensor]]] = {
    "training": training,
    "values in Python": values_in_python,
    "failed step": failed_step,
}


class Outcome:
    """What a program came to, and the messages that it took."""

    def __init__(self, program: str, faults: Sequence[Fault] = (), snapshots: bool = False) -> None:
        torch.manual_seed(11)
        with mortal_session(faults, snapshots) as (s, link):
            self.digest = digest(PROGRAMS[program](s))
        self.recoveries = s.recoveries
        self.messages, self.lives = len(link.messages), link.lives


def test_where_memory_is_short_no_snapshot_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "memory_left", lambda: 100)
    undisturbed = Outcome("training")
    with pytest.warns(RuntimeWarning, match=r"bytes to copy, and [\d,]+ bytes of memory are left"):
        assert Outcome("training", snapshots=True).digest == undisturbed.digest


def test_a_value_is_copied_by_one_snapshot_alone() -> None:
    with mortal_session(snapshots=True) as (s, _):
        frozen = torch.ones(1024) * 2
        for _ in range(2):  # a snapshot's answer is looked at by the next run
            frozen[:2].sum().item()
        before = s.stats()["snapshot_bytes"]
        assert before >= 4096
        for _ in range(3):
            frozen[:2].sum().item()
        assert s.stats()["snapshots"] >= 3
        assert s.stats()["snapshot_bytes"] - before < 256


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_death_at_any_message_changes_no_bit(program: str, snapshots: bool, when: str) -> None:
    undisturbed = Outcome(program, snapshots=snapshots)
    assert undisturbed.lives == 1
    assert not undisturbed.recoveries
    for message in range(1 + snapshots % STRIDE, undisturbed.messages + 1, STRIDE):
        disturbed = Outcome(program, [(message, when)], snapshots)
        assert disturbed.digest == undisturbed.digest, message
        # nobody waits for an answer to the last one, if that is a snapshot
        noticed = disturbed.lives == 2 or (snapshots and message == undisturbed.messages)
        assert noticed, message
        assert [r.ranks for r in disturbed.recoveries] == [(0,)] * (disturbed.lives - 1)
