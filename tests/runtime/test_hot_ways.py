"""The hot ways: through how many files of lazygt the main thread goes for what a step is made of.

A reader who wants to know what happens there has to open them all, so their number is bounded.
What happens only twice a second (the watch over the workers), or once a plan, is not counted: each
way is gone several times, and the shortest counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(120)

HERE = os.path.dirname(lazygt.__file__) + os.sep
#: So often each way is gone: a few times until it is known, then until one meets no look around.
TIMES = 12

#: What recording goes through, flush or no flush.
RECORDING = frozenset(
    {"device", "recorder", "source", "tensor", "handlers", "views", "autograd", "interrupts"}
)


def entered(act: Callable[[], Any]) -> frozenset[str]:
    """The files of lazygt in which Python ran meanwhile, on this thread."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return frozenset(name.removeprefix(HERE) for name in files if name.startswith(HERE))


def names(files: frozenset[str]) -> set[str]:
    """What files are called, wherever they stand."""
    return {os.path.basename(file).removesuffix(".py") for file in files}


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def ways(request: pytest.FixtureRequest) -> dict[str, frozenset[str]]:
    """The files of each way, the shortest of several times."""
    taken: dict[str, list[frozenset[str]]] = {}

    def go(way: str, act: Callable[[], Any]) -> None:
        taken.setdefault(way, []).append(entered(act))

    with lazygt.session(workers=request.param) as session:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        heavy = torch.randn(600, 600)
        x = torch.randn(8, 16)
        for _ in range(TIMES):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            go("backward", loss.backward)
            go("step", optimizer.step)
            go("flush", session.flush)
            much = (heavy @ heavy @ heavy).sum()
            y = x + 1
            go("hit", lambda y=y: y + 1)
            go("item", much.item)  # which has to wait: for a while there is nothing to take
    return {way: min(files, key=len) for way, files in taken.items()}


def test_recording_a_hit_takes_four_files(ways: dict[str, frozenset[str]]) -> None:
    assert names(ways["hit"]) == {"device", "recorder", "source", "tensor"}


def test_an_item_takes_at_most_fourteen_files(ways: dict[str, frozenset[str]]) -> None:
    """A flush, a run, a wait and what comes back."""
    assert {"submit", "client", "process_link"} <= names(ways["item"])
    assert len(ways["item"]) <= 14, sorted(ways["item"])


def test_a_flush_takes_at_most_fourteen_files(ways: dict[str, frozenset[str]]) -> None:
    assert {"submit", "client", "process_link"} <= names(ways["flush"])
    assert len(ways["flush"]) <= 14, sorted(ways["flush"])


@pytest.mark.parametrize("way", ["backward", "step"])
def test_beyond_recording_ten_files_at_most(ways: dict[str, frozenset[str]], way: str) -> None:
    """A backward pass is recorded, and then shipped; an optimizer's step is recorded."""
    beyond = names(ways[way]) - RECORDING
    assert len(beyond) <= 10, sorted(beyond)


def test_nobody_looks(ways: dict[str, frozenset[str]]) -> None:
    """What only shows or explains has no place on a hot way, nor has what makes new plans."""
    for way, files in ways.items():
        looked = names(files) & {"history", "console", "timeline", "why", "planner", "provenance"}
        assert not looked, (way, looked)
        assert not [file for file in files if file.startswith(("observe", "passes"))], way
