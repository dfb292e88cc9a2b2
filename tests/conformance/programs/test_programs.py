"""Programs of other people's libraries give eager torch's bits, made on the CPU or in the session.

A program is skipped, by its name, where one of its packages is missing; ``make test-programs``
installs them all.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import lazygt
from tests.conformance.programs.catalogue import PROGRAMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    # what a library warns of is its users' affair
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made from their configurations; nothing is to be looked for elsewhere."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def need(packages: tuple[str, ...]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def bits(value: Any) -> Any:
    """A value in a form in which equal means the same type, shape and bits."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, float | np.floating):
        return np.float64(value).tobytes()
    return value


@pytest.mark.parametrize("made", ["moved", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_of_eager_torch(name: str, made: str) -> None:
    program = PROGRAMS[name]
    need(program.packages)
    eager = program.run("cpu")
    inside = made == "inside"
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=inside)
    ) as session:
        ours = {key: bits(value) for key, value in program.run("lazygt").items()}
        assert session.stats()["ops_recorded"] > 0
    assert ours.keys() == eager.keys()
    different = [key for key, value in eager.items() if ours[key] != bits(value)]
    assert not different


def test_comparison_sees_signs_and_types() -> None:
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))
    assert bits(torch.tensor([1])) != bits(torch.tensor([1], dtype=torch.int32))
    assert bits([0.0]) != bits([-0.0])
    assert bits({"a": torch.tensor(float("nan"))}) == bits({"a": torch.tensor(float("nan"))})
