"""A failed step leaves nothing failed: all is as eager torch has it when an op raises."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

import lazygt
from lazygt.settings import grouped
from tests.recovery.mortal import mortal_session
from tests.recovery.programs import BATCH, LAYOUTS, MLP, WIDTH, Layout, digest

pytestmark = pytest.mark.timeout(600)

#: Several blocks a worker are not gone back to.
ROLLBACKS = sorted(LAYOUTS.keys() - {"invariant"})

#: (what, a tensor, another)
Statement = tuple[str, int, int]

KINDS = ("add", "scale", "part", "copy", "upload", "draw", "new", "replace", "flush")
STATEMENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9)), max_size=12
)


class Program:
    """Tensors that statements write, draw into, and make anew."""

    def __init__(self, device: str, session: lazygt.Session | None) -> None:
        self._device, self._session = device, session
        torch.manual_seed(3)
        self.tensors = [torch.rand(4, device="cpu").to(device) for _ in range(3)]
        self._table = torch.rand(5, 4, device="cpu").to(device)

    def run(self, statements: list[Statement]) -> None:
        for kind, first, second in statements:
            count = len(self.tensors)
            self._do(kind, first % count, self.tensors[second % count])

    def _do(self, kind: str, at: int, other: torch.Tensor) -> None:
        t = self.tensors[at]
        match kind:
            case "add":
                t.add_(other)
            case "scale":
                t.mul_(0.5)
            case "part":
                t[1:].sub_(other[:-1].clone())
            case "copy":
                t.copy_(other)
            case "upload":
                t.copy_(torch.arange(4.0, device="cpu"))
            case "draw":
                t.add_(torch.rand(4, device=self._device))
            case "new":
                self.tensors.append(t * 2 + other)
            case "replace":
                self.tensors[at] = other + 1
            case "flush" if self._session is not None:
                self._session.flush()

    def fail(self) -> None:
        """Look up a row that there is not; eager torch raises here."""
        rows = torch.tensor([1, 99], device="cpu").to(self._device)
        self.bad = F.embedding(rows, self._table)
        self.tensors.append(self.bad[0])


def values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.cpu().clone() for t in tensors]


@pytest.mark.parametrize("snapshots", [False, True])
@settings(max_examples=settings().max_examples // 2)
@given(before=STATEMENTS, since=STATEMENTS, later=STATEMENTS)
def test_state_after_failure_matches_eager_torch(
    snapshots: bool, before: list[Statement], since: list[Statement], later: list[Statement]
) -> None:
    eager = Program("cpu", None)
    eager.run(before)
    with pytest.raises(IndexError):
        eager.fail()
    expected = values(eager.tensors)
    eager.run(later)
    with mortal_session(snapshots=snapshots) as (s, _):
        lazy = Program("lazygt", s)
        lazy.run(before)
        existing = list(lazy.tensors)
        lazy.fail()
        lazy.run(since)
        with pytest.raises(IndexError, match="index out of range"):
            s.synchronize()
        lazy.tensors = existing
        found = values(existing)
        lazy.run(later)
        finally_found = values(lazy.tensors)
        state = torch.get_rng_state()
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, finally_found, values(eager.tensors)))
    assert torch.equal(state, eager_state(before, later))


def eager_state(before: list[Statement], later: list[Statement]) -> torch.Tensor:
    eager = Program("cpu", None)
    eager.run([*before, *later])
    return torch.get_rng_state()


def trained(layout: Layout, bad: int, fails: bool) -> str:
    """Weights and the optimizer's state after steps one of which has no good labels.

    Args:
        fails: that step is taken, and fails; otherwise it goes no further than the forward pass.
    """
    torch.manual_seed(7)
    model = MLP()
    layout.lay(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.randn(BATCH, WIDTH, device="cpu").to("lazygt")
        labels = torch.randint(0, WIDTH, (BATCH,), device="cpu")
        labels[0] = 99 if fails and step == bad else 0
        y = labels.to("lazygt")
        if layout.cut:
            x, y = (lazygt.distribute(t, {"ranks": Shard(0)}) for t in (x, y))
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step == bad and not fails:
            continue
        loss.backward()
        opt.step()
        with pytest.raises(RuntimeError, match="99 is out of") if step == bad else nullcontext():
            loss.item()
    state = [value for values in opt.state.values() for value in values.values()]
    return digest([*model.parameters(), *state])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", ROLLBACKS)
def test_a_bad_batch_changes_no_weight(name: str, bad: int) -> None:
    layout = LAYOUTS[name]
    with lazygt.session(**grouped(layout.settings)):
        expected = trained(layout, bad, fails=False)
    with lazygt.session(**grouped(layout.settings)) as s:
        assert trained(layout, bad, fails=True) == expected
        assert not s.recoveries


@pytest.mark.parametrize("snapshots", [False, True])
def test_values_independent_of_failed_op_survive(snapshots: bool) -> None:
    with mortal_session(snapshots=snapshots) as (s, link):
        program = Program("lazygt", s)
        program.fail()
        apart = program.tensors[1] + 1
        program.tensors[0].add_(program.bad[0])
        with pytest.raises(IndexError):
            s.synchronize()
        assert torch.equal(apart.cpu(), program.tensors[1].cpu() + 1)
        with pytest.raises(IndexError):
            program.bad.cpu()
        assert link.lives == 1
