"""Known runs: what the extension answers is what Python answers, and it answers what it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazygt
from lazygt import native
from lazygt.config import Config
from lazygt.runtime import wire
from lazygt.runtime.messages import TO_CLIENT, TO_WORKER, Run
from lazygt.runtime.wire import decode, encode
from lazygt.runtime.worker import inline
from lazygt.runtime.worker.inline import InlineLink
from lazygt.runtime.worker.worker import Worker

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.load().module is None, reason="there is no extension"),
]


class Shadowed(InlineLink):
    """Whatever is sent goes to a second worker, too, which does it all in Python."""

    def __init__(self, worker: Worker, packs: bool) -> None:
        super().__init__(worker)
        self.encode = encode if packs else wire.hand_over  # type: ignore[method-assign]
        self.shadow = Worker(
            config=Config.load(plan_code="native"), inline=True, encode=worker._encode
        )
        self.shadow.known_runs = None
        self.runs = self.in_python = 0
        self._count(worker)

    def native_fetcher(self, make: Any, *whose: Any) -> Any:
        """None: C++'s runs would pass by the second worker."""
        return None

    def _count(self, worker: Worker) -> None:
        run = worker._run

        def counted(*args: Any) -> Any:
            self.in_python += 1
            return run(*args)

        worker._run = counted  # type: ignore[method-assign]

    def send(self, rank: int, frames: Any) -> None:
        self.runs += isinstance(decode(frames, TO_WORKER), Run)
        before = torch.default_generator.get_state()
        super().send(rank, frames)
        ours = list(self._replies)[-1:]
        torch.default_generator.set_state(before)
        theirs = self.shadow.handle(list(frames))[-1:]
        assert list(map(plain, ours)) == list(map(plain, theirs))
        assert self._worker.store.values.keys() == self.shadow.store.values.keys()


def plain(frames: Any) -> Any:
    return decode(frames, TO_CLIENT), [bytes(frame) for frame in frames[1:]]


@pytest.fixture(params=[True, False], ids=["packed", "handed-over"])
def shadowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Shadowed]:
    """The links of the sessions that are opened."""
    links: list[Shadowed] = []

    def link(worker: Worker) -> Shadowed:
        links.append(Shadowed(worker, request.param))
        return links[-1]

    monkeypatch.setattr(inline, "InlineLink", link)
    return links


def numbers(session: lazygt.Session) -> None:
    x = torch.arange(4.0)
    for k in range(20):
        assert x.sum().item() == 6.0
        assert (x * 2).max().item() == 6.0
        assert (x.to(torch.int64) - k).min().item() == -k
        assert x.gt(k).any().item() is (k < 3)
    for dtype in wire.NUMBERS:
        for _ in range(3):
            x.to(dtype).prod().item()


def steps_in_place(session: lazygt.Session) -> None:
    weight, kept = torch.ones(3), []
    for rate in (0.1, -2, 3.5, 2**40, -(2**62), 0.25):
        weight.mul_(0.5).add_(rate)
        kept.append(weight.clone())
        session.flush()
    weight.sum().item()
    view = weight[1:]
    for _ in range(5):
        view.add_(1)
        session.flush()
        del kept[:1]
    torch.stack([view, view]).tolist()


def inputs_that_change_places(session: lazygt.Session) -> None:
    values = [torch.full((2,), float(k)) for k in range(5)]
    for k in range(30):
        a, b = values[k % 5], values[(k * k) % 5]
        assert (a * b).sum().item() == 2.0 * (k % 5) * ((k * k) % 5)
        if k % 7 == 0:
            values[k % 5] = a + 0


def failures(session: lazygt.Session) -> None:
    table = torch.arange(3.0)
    for k in (0, 1, 2, 7, 1):
        index = torch.tensor([k])
        if k == 7:
            with pytest.raises(lazygt.ExecutionError):
                (table[index] + 1).sum().item()
        else:
            assert (table[index] + 1).sum().item() == k + 1


def what_depends_on_values(session: lazygt.Session) -> None:
    x = torch.arange(6.0)
    for k in range(5):
        assert x[x > k].tolist() == [float(n) for n in range(k + 1, 6)]
        assert torch.nonzero(x > k).shape == (5 - k, 1)


def draws(session: lazygt.Session) -> None:
    torch.manual_seed(0)
    for _ in range(4):
        torch.rand(3).sum().item()
        torch.zeros(3).sum().item()


def other_values(session: lazygt.Session) -> None:
    x = torch.arange(6.0).view(2, 3)
    for _ in range(4):
        x.sum(0).tolist()
        x[:1, :1].sum(0, keepdim=True).item()
        torch.complex(x, x).sum().item()
        x.to(torch.bfloat16).sum().item()


PROGRAMS: tuple[Callable[[lazygt.Session], None], ...] = (
    numbers, steps_in_place, inputs_that_change_places, failures, what_depends_on_values, draws,
    other_values,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_answers_are_pythons(
    shadowed: list[Shadowed], program: Callable[[lazygt.Session], None]
) -> None:
    with lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code="native")) as session:
        program(session)


def test_known_run_bypasses_python(shadowed: list[Shadowed]) -> None:
    with lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code="native")):
        x = torch.arange(4.0)
        for _ in range(100):
            x.sum().item()
    assert shadowed[0].runs > 100
    assert shadowed[0].in_python < 10


def test_other_message_invalidates_known_run(shadowed: list[Shadowed]) -> None:
    """A plan may be forgotten, swapped or sent anew: whatever comes, Python looks again."""
    with lazygt.session(
        launcher="inline",
        compile=lazygt.Compile(plan_code="native"),
        planning=lazygt.Planning(max_plans=2),
    ):
        x = torch.arange(4.0)
        for size in (1, 2, 3, 1, 2, 3, 1, 1, 1):
            for _ in range(4):
                assert x[:size].sum().item() == sum(range(size))


def test_values_of_a_worker_that_was_closed_are_gone() -> None:
    with lazygt.session(launcher="inline", compile=lazygt.Compile(plan_code="native")) as session:
        x = torch.arange(4.0)
        for _ in range(4):
            x.sum().item()
        worker = session._link._worker  # type: ignore[attr-defined]
        assert len(worker.store)
    assert not len(worker.store)
