"""Where the client does the work that a session was opened for, a warning says so, once."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)


def train(device: str | None, steps: int) -> None:
    model = nn.Linear(2, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 2, device=device)).sum().backward()
        optimizer.step()


def said(caught: pytest.WarningsRecorder) -> list[str]:
    texts = [str(each.message) for each in caught if each.category is lazygt.IdleWarning]
    return [re.sub(r"/\S*/test_idle\.py:\d+", "HERE", text) for text in texts]


def test_an_optimizer_on_the_cpu() -> None:
    with pytest.warns(lazygt.IdleWarning) as caught, lazygt.session(launcher="inline"):
        train("cpu", steps=9)
    assert said(caught) == [
        "the optimizer that stepped at HERE trains parameters on the CPU of this process, not on "
        "the workers of the session made at HERE. Make the model in the session, or move it with "
        ".to('lazygt') before the optimizer is made; tell a framework the device "
        "(docs/frameworks.md). If it is meant so, open the session with "
        "tracing=Tracing(default_device=False)."
    ]


@pytest.mark.parametrize(
    ("device", "steps", "default_device"),
    [(None, 9, True), ("cpu", 2, True), ("cpu", 9, False)],
    ids=["on the workers", "a few steps on the CPU", "meant so"],
)
def test_used_or_empty_session_gives_no_warning(
    device: str | None, steps: int, default_device: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazygt.IdleWarning)
        with lazygt.session(
            launcher="inline", tracing=lazygt.Tracing(default_device=default_device)
        ):
            torch.ones(2).sum()
            train(device, steps)


NEVER_ENTERED = (
    "the session made at HERE was never entered: nothing goes to its workers, all is done by this "
    "process. Write `with lazygt.session() as s:` around the work."
)


def test_a_session_that_was_not_entered_says_so_when_an_optimizer_steps() -> None:
    s = lazygt.session(launcher="inline")
    with pytest.warns(lazygt.IdleWarning) as caught:
        train(None, steps=1)
    assert said(caught) == [NEVER_ENTERED]
    s.close()


def test_a_session_that_was_not_entered_says_so_when_it_is_asked_for_something() -> None:
    s = lazygt.session(launcher="inline")
    with pytest.warns(lazygt.IdleWarning) as caught:
        s.synchronize()
    assert said(caught) == [NEVER_ENTERED]
    s.close()


def test_a_session_that_was_not_entered_says_so_when_it_is_lost() -> None:
    def lose() -> None:
        lazygt.session(launcher="inline")
        gc.collect()

    with pytest.warns(lazygt.IdleWarning) as caught:
        lose()
    assert said(caught) == [NEVER_ENTERED]


def test_a_session_may_be_entered_later() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazygt.IdleWarning)
        s = lazygt.session(launcher="inline")
        torch.ones(2).sum()
        with s:
            train(None, steps=9)


RECORDED_NOTHING = (
    "the session made at HERE has ended and has recorded nothing: what was computed meanwhile was "
    "computed by this process. A device of torch's own, as of `'cuda' if torch.cuda.is_available() "
    "else 'cpu'`, is not the session's. Write device='lazygt', or leave the device out, and move "
    "what was made before the session with .to('lazygt'). If it is meant so, open the session with "
    "tracing=Tracing(default_device=False)."
)


def multiply() -> None:
    device = "cpu"  # without CUDA: "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.ones(3, 3, device=device)
    a @ a


def grade() -> None:
    MODEL(X).sum().backward()


MODEL, X = nn.Linear(2, 2), torch.ones(1, 2)


@pytest.mark.parametrize("work", [multiply, grade])
def test_a_session_that_recorded_nothing_says_so_once(work: Callable[[], None]) -> None:
    def program() -> None:
        with lazygt.session(launcher="inline") as s, s:
            work()
            work()

    with pytest.warns(lazygt.IdleWarning) as caught:
        program()
    assert said(caught) == [RECORDED_NOTHING]


def test_an_opened_session_that_recorded_nothing_says_so() -> None:
    s = lazygt.session(launcher="inline").open()
    multiply()
    with pytest.warns(lazygt.IdleWarning) as caught:
        s.close()
    s.close()
    assert said(caught) == [RECORDED_NOTHING]


def record_more() -> None:
    multiply()
    torch.ones(2).sum()


def upload() -> None:
    multiply()
    X.to("lazygt")


def number() -> None:
    multiply()
    torch.tensor(1.5)


def use_another() -> None:
    with lazygt.session(launcher="inline"):
        train(None, 1)


@pytest.mark.parametrize(
    "work", [int, record_more, upload, number, use_another], ids=lambda work: work.__name__
)
def test_a_session_that_was_of_use_or_had_nothing_to_do_says_nothing(
    work: Callable[[], object],
) -> None:
    grade()
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazygt.IdleWarning)
        with lazygt.session(launcher="inline"):
            work()
        with lazygt.session(launcher="inline", tracing=lazygt.Tracing(default_device=False)):
            multiply()


def fail() -> None:
    with lazygt.session(launcher="inline"):
        multiply()
        raise ZeroDivisionError


def test_an_error_is_not_joined_by_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazygt.IdleWarning)
        with pytest.raises(ZeroDivisionError):
            fail()
