"""A plan in other sizes: workers are told its template's name and a few numbers, and do no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt.errors import ProtocolError
from lazygt.graph.alias import COPY
from lazygt.runtime import plan
from lazygt.runtime.executors import kernels
from lazygt.runtime.messages import TO_WORKER, Ship
from lazygt.runtime.plan import Plan, PlanTemplate
from lazygt.runtime.wire import decode, encode
from lazygt.runtime.worker.worker import Worker
from tests.passes.tools import graph_of


class Sent:
    """The plan messages to the worker of an inline session."""

    def __init__(self, session: lazygt.Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ships: list[tuple[Ship, int, int]] = []
        handle = session._link._worker.handle

        def noted(frames: list[Any]) -> Any:
            message = decode(frames, TO_WORKER)
            if isinstance(message, Ship):
                self.ships.append((message, len(frames), sum(map(len, frames))))
            return handle(frames)

        monkeypatch.setattr(session._link._worker, "handle", noted)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs were decoded, verified, and their writes and lifetimes analysed."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    for name in ("decode_program", "verify", "analyse", "last_uses", "expand_fused"):
        counted(plan, name)
    counted(kernels, "check")
    return counts


def work(batch: int) -> torch.Tensor:
    x = torch.ones(batch, 24)
    for _ in range(6):
        x = (x.t() * 1.5).t().contiguous() + 1
    return x.sum()


def expected(batch: int) -> float:
    with torch.device("cpu"):
        return work(batch).item()


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as s:
        yield s


def test_another_size_is_a_name_and_numbers(
    session: lazygt.Session, monkeypatch: pytest.MonkeyPatch, done: Counter[str]
) -> None:
    sent = Sent(session, monkeypatch)
    assert work(20).item() == expected(20)
    done.clear()
    for batch in (21, 30, 19, 40):
        assert work(batch).item() == expected(batch)
    assert not done
    [(_, first_frames, first_bytes), *others] = sent.ships
    assert first_frames == 2
    assert first_bytes > 1000
    for ship, frames, size in others:
        assert frames == 1
        assert size < 100
        assert ship.template == others[0][0].template
    assert session.stats()["plans_sent"] == session.stats()["plans_built"] == 5


def test_sizes_seen_before_send_nothing(
    session: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in (20, 30):
        work(batch).item()
    sent = Sent(session, monkeypatch)
    for batch in (20, 30, 20):
        assert work(batch).item() == expected(batch)
    assert not sent.ships


def test_a_template_that_was_dropped_is_asked_for(
    session: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: its other sizes are numbers again."""
    sent = Sent(session, monkeypatch)
    work(20).item()
    session._link._worker.plans.executors.clear()
    assert not session._link._worker.plans.templates
    for batch in (30, 40, 20):
        assert work(batch).item() == expected(batch)
    assert [frames for _, frames, _ in sent.ships] == [2, 1, 2, 1, 2]


def test_a_template_lives_as_long_as_one_of_its_plans() -> None:
    """The limits of plans are its limits: two plans of one template, and one of another."""
    with lazygt.session(launcher="inline", planning=lazygt.Planning(max_plans=2)) as s:
        templates = s._link._worker.plans.templates
        work(20).item()
        work(30).item()
        assert len(templates) == 1
        torch.ones(5).exp().sum().item()
        assert len(templates) == 2
        torch.ones(5).sin().cos().sum().item()
        assert len(templates) == 2
        assert work(30).item() == expected(30)
        assert work(40).item() == expected(40)
        assert len(templates) == 1


def test_a_write_through_the_third_view_stays_in_place(session: lazygt.Session) -> None:
    """Which of a view op's results it is, and where its operand stands, are no sizes."""
    x = torch.ones(5, 4) * 2
    parts = x.unbind(1)
    parts[2].add_(1)
    parts[3].view(5, 1)[2:].mul_(2)
    assert x.sum().item() == 40 + 5 + 2 * 3
    decided = session.plans()[-1]
    assert COPY not in {mode for modes in decided.steps.writes.modes for mode in modes}
    template = PlanTemplate.decoded(decided.template.encoded)
    assert Plan(form=(template, decided.sizes)).steps == decided.steps


def ship(graph: Plan, sizes: tuple[int, ...], template: bool = True) -> list[Any]:
    name = plan.plan_name(graph.template.digest, sizes)
    message = Ship(name, True, graph.template.digest, sizes)
    return encode(message, [graph.template.encoded] if template else [])


CHAIN = Plan(
    graph_of("""
        %0: f32[20, 30] = input
        %1: f32[20, 30] = aten.exp.default(%0)
        return %1
        """)
)


@pytest.mark.parametrize("sizes", [(), (20,), (20, 20, 30), (20, 30, 600), (20, 1)])
def test_sizes_that_a_plan_cannot_have_are_refused(sizes: tuple[int, ...]) -> None:
    for told in (True, False):
        receiver = Worker()
        if told:
            receiver.handle(ship(CHAIN, CHAIN.sizes))
        with pytest.raises(ProtocolError, match="not the sizes of a plan"):
            receiver.handle(ship(CHAIN, sizes, not told))


def test_ranks_are_told_a_template_each() -> None:
    """What one rank has been sent, another has not."""
    records: Callable[..., Any] = lazygt.runtime.plan_records.PlanRecords
    both = records(2)

    def of(op: str, size: int) -> Plan:
        return Plan(
            graph_of(f"""
            %0: f32[{size}] = input
            %1: f32[{size}] = aten.{op}.default(%0)
            return %1
            """)
        )

    frames = [
        [len(message) for message in both.plan_messages(both.of(plans))]
        for plans in (
            [of("exp", 5), of("sin", 5)],
            [of("sin", 6), of("sin", 7)],
            [of("exp", 9)],
            [of("sin", 9), of("exp", 9)],
        )
    ]
    assert frames == [[2, 2], [2, 1], [1, 2], [1, 1]]
