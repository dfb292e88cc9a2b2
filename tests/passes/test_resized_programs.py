"""Whole programs in other sizes: what a session reuses is what it would have planned anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import lazygt
from lazygt.passes import PIPELINE, template
from lazygt.record.repeats import Repeat
from lazygt.runtime.plan import Plan
from lazygt.submit import planner
from tests.passes.sized import SIZED, accepted, start
from tests.property.programs import Step

#: torch refuses some steps of tensors without elements on meta tensors, and takes them on a CPU
SIZES = st.sampled_from([1, 2, 3, 5, 8, 24, 32, 33, 64])


def texts(plans: list[Plan]) -> set[tuple[Any, ...]]:
    """What they do, whatever they are called: sizes that have become equal are still two there."""
    return {
        (str(plan.graph), plan.graph.lines, plan.origins, str(plan.steps), plan.backward)
        for plan in plans
    }


def planned(
    programs: list[tuple[list[Step], tuple[int, int]]], reusing: bool
) -> tuple[set[tuple[Any, ...]], int]:
    """The plans of one session for a program in several sizes; how many came out of others."""
    with pytest.MonkeyPatch.context() as patch, lazygt.session(launcher="inline") as s:
        if not reusing:
            patch.setattr(s._planner, "_resized", lambda *_: None)
            patch.setattr(Repeat, "_next", lambda *_: None)
        for program, size in programs:
            state = start("lazygt", *size)
            s.flush()
            for step in program:
                step.run(state)
            s.flush()
        return texts(s.plans()), s._planner.resized


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(
    st.lists(SIZED, min_size=3, max_size=25),
    st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=4),
)
def test_reused_plans_equal_new_plans(program: list[Step], sizes: list[tuple[int, int]]) -> None:
    programs = [(accepted(program, start("cpu", *size)), size) for size in sizes]
    ours, resized = planned(programs, reusing=True)
    theirs, _ = planned(programs, reusing=False)
    target(float(resized), label="resized")
    assert ours == theirs


# -- what is done for a new size ---------------------------------------------------------------


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the passes ran, and graphs were built."""
    counts: Counter[str] = Counter()
    for module, name in ((template, "run_passes"), (planner, "build_graph")):
        function = getattr(module, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counted)
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
    with lazygt.session(launcher="inline", tracing=lazygt.Tracing(default_device=False)) as s:
        ours = epochs("lazygt")
    assert built[2] == built[1]
    assert ran[2] == ran[1]
    built.clear()
    assert ours == epochs("cpu")


def test_a_size_that_becomes_another_one_is_no_other_program(passed: Counter[str]) -> None:
    """8 rows of 8 columns: no two tensors have become alike."""

    def summed(device: str, counts: list[int]) -> list[float]:
        weight = torch.linspace(-1, 1, 8 * 6, device=device).view(8, 6)
        parts = [torch.linspace(-2, 2, n * 32, device=device).view(n, 4, 8) for n in counts]
        return [torch.softmax(part @ weight, 0).square().sum().item() for part in parts]

    with lazygt.session(launcher="inline") as s:
        ours = summed("lazygt", [5, 7])
        passed.clear()
        ours += summed("lazygt", [8, 9])
        assert passed["run_passes"] == 0
        assert any(len(set(plan.sizes)) < len(plan.sizes) for plan in s.plans())
    assert ours == summed("cpu", [5, 7, 8, 9])


def test_equal_sizes_of_two_tensors_need_own_plan(passed: Counter[str]) -> None:
    """Passes may do with both at once what they do with one."""

    def summed(device: str, counts: list[int]) -> list[float]:
        row, sums = torch.linspace(-1, 1, 12, device=device), []
        for count in counts:
            other = torch.linspace(-2, 2, count, device=device)
            sums.append((row.exp().sum() + other.exp().sum()).item())
        return sums

    with lazygt.session(launcher="inline"):
        ours = summed("lazygt", [5, 6, 9])
        passed.clear()
        ours += summed("lazygt", [12, 13])
        assert passed["run_passes"] == 1
    assert ours == summed("cpu", [5, 6, 9, 12, 13])


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


def test_every_decision_of_the_passes_is_retained(passed: Counter[str]) -> None:
    """A chain is fused from some size on: each side has its plan, whatever the other's came to."""

    def summed(counts: list[int]) -> None:
        for count in counts:
            torch.linspace(-1, 1, count, device="lazygt").exp().tanh().sum().item()

    with lazygt.session(launcher="inline"):
        summed([5000, 9000])
        passed.clear()
        summed([6000, 9900, 5500, 9800])
        assert passed["run_passes"] == 0


def test_the_program_used_longest_ago_is_forgotten(passed: Counter[str]) -> None:
    def chain(count: int) -> None:
        torch.linspace(-1, 1, count, device="lazygt").exp().tanh().sum().item()

    def row(count: int) -> None:
        torch.linspace(-1, 1, count, device="lazygt").cumsum(0).sum().item()

    for most, runs in ((8, 0), (1, 4)):
        with lazygt.session(launcher="inline", planning=lazygt.Planning(max_plans=most)):
            chain(5000)
            row(5000)
            passed.clear()
            for count in (5001, 5002):
                chain(count)
                row(count)
            assert passed["run_passes"] == runs


def test_lines_of_another_place_need_own_plan(passed: Counter[str]) -> None:
    def here(count: int) -> None:
        torch.linspace(-1, 1, count, device="lazygt").exp().sum().item()

    def there(count: int) -> None:
        torch.linspace(-1, 1, count, device="lazygt").exp().sum().item()

    with lazygt.session(launcher="inline") as s:
        for function, count in ((here, 500), (there, 600), (here, 700), (there, 800)):
            function(count)
        assert passed["run_passes"] == 2
        lines = [plan.graph.lines for plan in s.plans()]
    assert lines[0] == lines[2] != lines[1] == lines[3]


def test_request_for_stages_runs_every_pass(passed: Counter[str]) -> None:
    with lazygt.session(launcher="inline", planning=lazygt.Planning(keep_stages=True)) as s:
        for count in (500, 600):
            torch.linspace(-1, 1, count, device="lazygt").exp().sum().item()
        assert [len(s.stages(plan)) for plan in s.plans()] == [1 + len(PIPELINE)] * 2
    assert passed["run_passes"] == 2


def written(device: str, tokens: int, seen: Callable[[int], object]) -> list[int]:
    """A text, token by token, with a cache that grows: as libraries do it."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(97, 46).to(device)
    qkv, head = torch.nn.Linear(46, 138).to(device), torch.nn.Linear(46, 97).to(device)
    end = torch.tensor([95, 96], device="cpu").to(device)
    text = torch.arange(8, device="cpu").view(1, 8).to(device)
    keys = values = torch.zeros(1, 2, 0, 23, device=device)
    ended = []
    for place in range(tokens):
        new = text if not place else text[:, -1:]
        query, key, value = qkv(embedding(new)).view(1, -1, 3, 2, 23).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        scores = head(mixed.transpose(1, 2).reshape(1, -1, 46))[:, -1, :].to(copy=True)
        text = torch.cat([text, scores.argmax(-1)[:, None]], -1)
        ended.append(torch.isin(text[:, -1], end).any().item())
        seen(place)
    return [*text[0].tolist(), *ended]


def test_a_text_token_by_token_is_two_programs(passed: Counter[str]) -> None:
    """The prompt, and a token: after the third nothing is inferred, and no pass runs, not even
    where the text is as long as a head is wide."""
    counts: list[tuple[int, int]] = []

    def seen(place: int) -> None:
        counts.append((s.stats()["ops_inferred"], passed["run_passes"]))

    with torch.no_grad(), lazygt.session(launcher="inline") as s:
        ours = written("lazygt", 20, seen)
    assert len(set(counts[2:])) == 1
    with torch.no_grad():
        assert ours == written("cpu", 20, lambda _: None)
