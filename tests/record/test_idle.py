"""Where the client does the work that a session was opened for, a warning says so, once."""

from __future__ import annotations

import gc
import re
import warnings

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
        "(docs/frameworks.md). If it is meant so, open the session with default_device=False."
    ]


@pytest.mark.parametrize(
    ("device", "steps", "default_device"),
    [(None, 9, True), ("cpu", 2, True), ("cpu", 9, False)],
    ids=["on the workers", "a few steps on the CPU", "meant so"],
)
def test_nothing_to_say(device: str | None, steps: int, default_device: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazygt.IdleWarning)
        with lazygt.session(launcher="inline", default_device=default_device):
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
