"""Sync points wait for kernels, where a device is still at work when they have been launched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import lazygt
from lazygt.runtime.arenas import Arena, create_memory
from lazygt.runtime.executors import kernels
from lazygt.runtime.messages import Snap, Snapped
from lazygt.runtime.wire import encode
from lazygt.runtime.worker.worker import Worker

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were waited for."""
    seen: list[torch.device] = []
    monkeypatch.setattr(kernels, "synchronize", seen.append)
    return seen


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[lazygt.Session]:
    """A session whose client takes its worker's device for one that launches ahead."""
    with lazygt.session(launcher="inline", compile="off") as s:
        monkeypatch.setattr(s._client, "_launches_ahead", True)
        yield s


def test_a_device_finishes_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("synchronize"))
    module = SimpleNamespace(current_stream=lambda device: waited.append(device) or stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    kernels.synchronize(torch.device("cpu"))
    assert waited == []
    kernels.synchronize(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1), "synchronize"]


def test_synchronize_waits_once_and_a_flush_does_not(
    on_gpu: lazygt.Session, waits: list[torch.device]
) -> None:
    x = torch.ones(3)
    on_gpu.flush()
    x = x + 1
    assert x.sum().item() == 6
    assert waits == []
    on_gpu.synchronize()
    torch.lazygt.synchronize()  # type: ignore[attr-defined]
    assert len(waits) == 2


def test_synchronize_waits_after_recorded_ops_and_before_reply(
    on_gpu: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = on_gpu._link._worker, []  # type: ignore[attr-defined]
    x = torch.ones(3) * 2
    monkeypatch.setattr(
        kernels, "synchronize", lambda device: seen.extend(worker.store.values.values())
    )
    on_gpu.synchronize()
    assert [value.tolist() for value in seen] == [x.tolist()]


def test_synchronize_on_cpu_sends_no_message(waits: list[torch.device]) -> None:
    with lazygt.session(launcher="inline", compile="off") as s:
        torch.ones(3)
        s.synchronize()
        before = s.stats()["messages_sent"]
        s.synchronize()
        assert s.stats()["messages_sent"] == before
    assert waits == []


def test_a_profiled_run_begins_when_all_before_it_has_ended(
    on_gpu: lazygt.Session, waits: list[torch.device]
) -> None:
    x = torch.ones(3)
    on_gpu.flush()
    with lazygt.profile(on_gpu):
        y = x + 1
        on_gpu.flush()
        assert len(waits) == 2, "before the run, and after its only node"
    assert y.tolist() == [2, 2, 2]


def test_snapshot_is_reported_once_its_values_are_computed(waits: list[torch.device]) -> None:
    worker = Worker(snapshots=Arena.own(create_memory(1 << 20)))
    ((told,),) = worker.handle(encode(Snap(1)))
    assert len(waits) == 1
    assert Snapped.begins(told)


def test_user_code_that_synchronizes_cuda_waits_for_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lazygt.session(launcher="dry", device="cuda") as s:
        assert s.device_type == "cuda"
        torch.ones(3) + 1
        torch.cuda.synchronize()  # there is no GPU here
        assert s.stats()["flushes"] == {"synchronize()": 1}
