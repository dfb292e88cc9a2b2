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
from lazygt.record.tensor import NATIVE

pytestmark = pytest.mark.timeout(120)

HERE = os.path.dirname(lazygt.__file__) + os.sep
#: So often each way is gone: a few times until it is known, then until one meets no look around.
TIMES = 12

#: What an optimizer's step goes through; a sharded one is shipped at its end.
RECORDING = frozenset(
    {"device", "recorder", "source", "tensor", "trace", "views", "factories", "submission"}
    | {"rollback", "reports"}
)
#: Where C++ records, it goes between that and the rest.
BETWEEN = frozenset({"record/bridge.py"} if NATIVE is not None else ())


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
            session.synchronize()  # else a rank that nobody waited for may still answer
            optimizer.zero_grad()
            busy = heavy @ heavy @ heavy  # so that no answer is there to be taken on the way
            loss = model(x).square().mean()
            go("backward", loss.backward)
            go("step", optimizer.step)
            go("flush", session.flush)
            much = (busy @ heavy @ heavy).sum()
            y = x + 1
            go("hit", lambda y=y: y + 1)
            go("item", much.item)  # which has to wait: for a while there is nothing to take
    return {way: min(files, key=len) for way, files in taken.items()}


def test_recording_a_hit_takes_four_files_or_none(ways: dict[str, frozenset[str]]) -> None:
    """Where C++ records, no Python runs."""
    four = {"device", "recorder", "source", "tensor"}
    assert names(ways["hit"]) == (four if NATIVE is None else set())


@pytest.mark.parametrize(
    ("way", "most"), [("item", 15), ("flush", 13), ("backward", 14)], ids=lambda value: str(value)
)
def test_path_of_shipped_op_has_few_files(
    ways: dict[str, frozenset[str]], way: str, most: int
) -> None:
    """What is recorded becomes a run: named, noted for a recovery, sent, and waited for where
    somebody wants a value."""
    assert {"submission", "client", "process_link"} <= names(ways[way])
    assert len(ways[way] - BETWEEN) <= most, sorted(ways[way])


def test_an_optimizers_step_takes_eleven_files(ways: dict[str, frozenset[str]]) -> None:
    """It is recorded: handles, views that are written, a number that torch itself makes, and what
    the optimizer keeps in the client, for when the step is undone."""
    # a process that has used torch.compile asks in each step whether to compile
    wrapped = hasattr(torch.optim.AdamW._init_group, "_torchdynamo_orig_callable")
    asked = {"torch_compile"} if wrapped else set()
    assert names(ways["step"] - BETWEEN) <= RECORDING | asked, sorted(ways["step"])


def test_hot_paths_skip_observation_and_passes(ways: dict[str, frozenset[str]]) -> None:
    """What only shows or explains has no place on a hot way, nor has what makes new plans."""
    for way, files in ways.items():
        looked = names(files) & {"history", "console", "timeline", "why", "planner", "idle"}
        assert not looked, (way, looked)
        assert not [file for file in files if file.startswith(("observe", "passes"))], way
