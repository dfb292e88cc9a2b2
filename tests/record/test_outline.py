"""Whole programs in other sizes: what a session reuses is what it would have planned anew."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import lazygt
from lazygt.passes import template
from lazygt.record import miss
from lazygt.runtime.plan import Plan
from tests.passes.test_template import SIZED, accepted, start
from tests.property.programs import Step

#: torch refuses some steps of tensors without elements on meta tensors, and takes them on a CPU
SIZES = st.sampled_from([1, 2, 3, 5, 8, 24, 32, 33, 64])


def texts(plans: list[Plan]) -> dict[bytes, tuple[Any, ...]]:
    return {
        plan.digest: (str(plan), plan.graph.lines, plan.origins, str(plan.steps), plan.backward)
        for plan in plans
    }


def planned(
    programs: list[tuple[list[Step], tuple[int, int]]], reusing: bool
) -> tuple[dict[bytes, tuple[Any, ...]], int]:
    """The plans of one session for a program in several sizes; how many came out of others."""
    with pytest.MonkeyPatch.context() as patch, lazygt.session(launcher="inline") as s:
        if not reusing:
            patch.setattr(s._planner, "_resized", lambda *_: None)
            patch.setattr(s._planner.templates, "resize", lambda *_, **__: None)
            patch.setattr(miss, "repeated_op", lambda *_: None)
        for program, size in programs:
            state = start("lazygt", *size)
            s.flush()
            for step in program:
                step.run(state)
            s.flush()
        return texts(s.plans()), s._planner.templates.resized


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(
    st.lists(SIZED, min_size=3, max_size=25),
    st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=4),
)
def test_what_is_reused_is_what_would_be_planned(
    program: list[Step], sizes: list[tuple[int, int]]
) -> None:
    programs = [(accepted(program, start("cpu", *size)), size) for size in sizes]
    ours, resized = planned(programs, reusing=True)
    theirs, _ = planned(programs, reusing=False)
    target(float(resized), label="resized")
    assert ours == theirs


# -- what is done for a new size ---------------------------------------------------------------


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the passes ran, and graphs were read."""
    counts: Counter[str] = Counter()
    for name in ("run_passes", "skeleton"):
        function = getattr(template, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(template, name, counted)
    return counts


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(device: str, batches: list[int], passed: Counter[str] | None = None) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 30), torch.nn.LayerNorm(30), torch.nn.GELU(), torch.nn.Linear(30, 4)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.linspace(-1, 1, 600, device=device).view(100, 6)
    losses = []
    for place, rows in enumerate(batches):
        if place == 3 and passed is not None:
            passed.clear()
        losses.append(step(model, optimizer, data[:rows]))
    return losses


def test_a_new_batch_runs_no_pass_and_is_one_plan(passed: Counter[str]) -> None:
    batches = [20, 20, 20, 21, 23, 22, 25, 20, 29, 27]
    with lazygt.session(launcher="inline") as s:
        trained("lazygt", batches[:3])
        before = s.stats()
        ours = trained("lazygt", batches, passed)
        assert not passed
        after = s.stats()
    assert ours == trained("cpu", batches)
    news = len(set(batches[3:]) - {20})
    assert after["plans_built"] - before["plans_built"] == news


def test_the_last_batch_of_a_loader_is_one_miss(passed: Counter[str]) -> None:
    rows = torch.linspace(-1, 1, 50 * 6).view(50, 6)

    def epochs(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
        losses = []
        for _ in range(3):
            losses += [step(model, optimizer, batch.to(device)) for batch in loader]
            built.append(s.stats()["plans_built"])
            ran.append(passed["run_passes"])
        return losses

    built: list[int] = []
    ran: list[int] = []
    with lazygt.session(launcher="inline", default_device=False) as s:
        ours = epochs("lazygt")
    assert built[2] == built[1]
    assert ran[2] == ran[1]
    built.clear()
    assert ours == epochs("cpu")


def test_a_growing_sequence_is_one_program(passed: Counter[str]) -> None:
    def grown(device: str) -> list[float]:
        row = torch.linspace(-1, 1, 50, device=device).view(1, 50)
        rows, sums = row, []
        for place in range(12):
            if place == 4:
                passed.clear()
            rows = torch.cat([rows, row * 1.5])
            weights = torch.softmax(rows @ row.t(), 0)
            sums.append((weights * rows).sum().item())
        return sums

    with lazygt.session(launcher="inline"):
        ours = grown("lazygt")
        assert not passed
    assert ours == grown("cpu")
