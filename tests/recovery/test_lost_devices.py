"""A kernel that ends all of its process's on the device: its op fails, and the session goes on.

There is no GPU here: a function makes its worker one that has lost its device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazygt
from lazygt.errors import DeviceLost, ExecutionError
from lazygt.recovery import recover
from lazygt.runtime.executors import kernels

pytestmark = pytest.mark.timeout(120)

WHY = "CUDA error: device-side assert triggered"


def lose(device: torch.device) -> None:
    """Raise what torch does when it waits for a device, or asks one to do anything."""
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def asserts(x: torch.Tensor) -> torch.Tensor:
    """An op whose kernel ends its device while it is awaited."""
    if "LAZYGT_WORKER" in os.environ:
        kernels.is_lost = lambda device: True
        lose(x.device)
    return x * 2


def asserts_later(x: torch.Tensor) -> torch.Tensor:
    """An op that returns when its kernel, which ends its device, is launched."""
    if "LAZYGT_WORKER" in os.environ:
        kernels.is_lost, kernels.synchronize = (lambda device: True), lose
    return x * 2


def test_the_op_fails_and_values_of_before_live_on() -> None:
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        torch.manual_seed(0)
        before = torch.rand(4)
        expected = before.tolist()
        weight = torch.ones(4)
        bad = lazygt.apply(asserts, before)
        weight.add_(bad)
        with pytest.raises(ExecutionError, match=f"asserts.*failed on worker 0.*{WHY}") as caught:
            weight.sum().item()
        assert isinstance(caught.value, torch.AcceleratorError)
        assert f"recorded at {__file__}" in str(caught.value)
        assert before.tolist() == expected
        assert weight.tolist() == [1, 1, 1, 1], "it is as it was before the op"
        (recovery,) = s.recoveries
        assert recovery.ranks == (0,)
        assert f"can't use its device any more: {WHY}" in recovery.why
        with pytest.raises(ExecutionError, match=WHY):
            bad.sum().item()
        assert (before * 2).tolist() == [each * 2 for each in expected]
        assert len(s.recoveries) == 1


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[lazygt.Session]:
    """A session whose client takes its worker's device for one that launches ahead."""
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        monkeypatch.setattr(s._client, "_launches_ahead", True)
        yield s


@pytest.mark.parametrize("by", ["synchronize", "snapshot"])
def test_failed_op_of_answered_run_is_found(ahead: lazygt.Session, by: str) -> None:
    weight, before = torch.ones(4), torch.arange(4.0)
    ahead.synchronize()
    bad = lazygt.apply(asserts_later, before)
    weight.add_(bad)
    ahead.flush()
    other = before + 1
    ahead.flush()
    with pytest.raises(ExecutionError, match=f"asserts_later.*failed on worker 0.*{WHY}") as caught:
        if by == "snapshot":
            recovery = ahead._client.recovery
            assert recovery is not None
            ahead._client._snap(recovery)
        ahead.synchronize()
    assert f"recorded at {__file__}" in str(caught.value)
    assert (before.tolist(), other.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert weight.tolist() == [1, 1, 1, 1]
    assert len(ahead.recoveries) == 1
    assert ahead._client.recovery is not None


def test_two_ranks_that_lose_their_devices() -> None:
    with lazygt.session(workers=lazygt.Workers(2, threads=1)) as s:
        before = torch.arange(4.0)
        s.synchronize()
        with pytest.raises(ExecutionError, match=f"asserts.*{WHY}"):
            lazygt.apply(asserts, before).sum().item()
        assert before.tolist() == [0, 1, 2, 3]
        (recovery,) = s.recoveries
        assert set(recovery.ranks) == {0, 1}


def asserts_once(x: torch.Tensor, path: str) -> torch.Tensor:
    """As ``asserts``, where it was not called before."""
    if "LAZYGT_WORKER" in os.environ and not Path(path).exists():
        Path(path).touch()
        kernels.is_lost = lambda device: True
        lose(x.device)
    return x * 2


def test_transient_device_loss_is_only_delay(tmp_path: Path) -> None:
    with lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.apply(asserts_once, torch.ones(2), str(tmp_path / "once"))
        assert x.tolist() == [2, 2]
        assert len(s.recoveries) == 1


def test_devices_that_are_lost_again_and_again_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recover, "_MAX_RESTORE_DEATHS", 2)
    with pytest.raises(DeviceLost), lazygt.session(workers=lazygt.Workers(threads=1)) as s:
        for _ in range(4):
            kept = lazygt.apply(asserts, torch.ones(2))
            s.flush()
        kept.sum().item()


def test_without_recovery_the_values_are_lost() -> None:
    text = (
        rf"worker 0 \(pid \d+\) died: it can't use its device any more: {WHY}. This was met at "
        rf".*asserts.*recorded at {__file__}:\d+. Kernels run while others are launched, so an "
        rf"earlier op may be the cause: .*CUDA_LAUNCH_BLOCKING=1.* Its values are lost: leave the "
        rf"session and open a new one."
    )
    with (
        pytest.raises(DeviceLost, match=text),
        lazygt.session(workers=lazygt.Workers(threads=1), recovery="off") as s,
    ):
        before = torch.ones(2)
        with pytest.raises(lazygt.WorkerDied, match=text):
            lazygt.apply(asserts, before).sum().item()
        with pytest.raises(DeviceLost):
            before.tolist()
        s.synchronize()


def test_an_inline_session_says_that_the_process_is_of_no_more_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAZYGT_WORKER", "1")
    monkeypatch.setattr(kernels, "is_lost", lambda device: False)  # as it is again afterwards
    with lazygt.session(launcher="inline") as s:
        with pytest.raises(ExecutionError, match=f"{WHY}\n  This process can't use") as caught:
            lazygt.apply(asserts, torch.ones(2)).sum().item()
        assert str(caught.value).count("start the program again") == 1
        assert s.recoveries == []


class Stream:
    """A stream that answers as one does of which kernels failed, are at work, or have ended."""

    def __init__(self, ended: bool | None) -> None:
        self.ended = ended

    def query(self) -> bool:
        if self.ended is None:
            lose(torch.device("cuda"))
        return bool(self.ended)


@pytest.mark.parametrize("ended", [None, False, True])
def test_only_a_device_that_answers_with_an_error_is_lost(
    ended: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        @staticmethod
        def current_stream(device: torch.device) -> Stream:
            return Stream(ended)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert kernels.is_lost(torch.device("cuda")) == (ended is None)
    assert not kernels.is_lost(torch.device("cpu"))
