"""Which backend ranks talk through, when that is worth a warning, and what a new group costs.

No GPU is needed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lazygt.errors import ProtocolError
from lazygt.observe import doctor
from lazygt.runtime import wire
from lazygt.runtime.collectives import group
from lazygt.runtime.collectives.backends import HOST, NCCL, backend_for, why_host
from lazygt.runtime.launch import start_plan
from lazygt.runtime.messages import (
    COLLECTIVE_ERROR,
    TO_CLIENT,
    Done,
    Failure,
    Fetched,
    Renew,
    Run,
)
from lazygt.runtime.wire import decode, encode
from lazygt.runtime.worker.worker import Worker


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(
    ("device", "workers", "gpus", "backend"),
    [
        ("cuda", 2, 2, NCCL),
        ("cuda", 2, 8, NCCL),
        ("cuda", 2, 1, HOST),
        ("cpu", 2, 8, HOST),
    ],
)
def test_a_gpu_for_each_rank_or_the_hosts_memory(
    device: str, workers: int, gpus: int, backend: str
) -> None:
    assert backend_for(device, workers, gpus) == backend
    assert bool(why_host(device, workers, gpus)) == (backend == HOST and device == "cuda")


def test_without_nccl_it_is_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_for("cuda", 2, 2) == HOST
    assert "no NCCL" in why_host("cuda", 2, 2)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(("gpus", "said"), [(1, True), (4, False)])
def test_workers_that_share_a_gpu_are_told_so(
    gpus: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    spec = start_plan.LinkSpec(world_size=4, mesh="workers=4", device="cuda")
    plan = start_plan.StartPlan(spec, tmp_path, "token")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec_of_group = plan._group()
    assert spec_of_group is not None
    assert (spec_of_group.backend == HOST) == said
    texts = [str(each.message) for each in caught]
    assert (
        texts
        == [
            "lazygt.session: 4 workers share 1 GPU, and NCCL takes one rank a GPU: collectives go "
            "through the host's memory, which is much slower. Use at most 1 worker here"
        ]
        * said
    )


@pytest.mark.parametrize("given", [None, "0"])
def test_kernels_of_several_communicators_have_an_order(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two axes may deadlock without; who sets the variable knows better."""
    monkeypatch.delenv(start_plan._NCCL_ORDER, raising=False)
    if given is not None:
        monkeypatch.setenv(start_plan._NCCL_ORDER, given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec = start_plan.LinkSpec(world_size=2, mesh="a=2", device="cuda")
    worker = start_plan.StartPlan(spec, tmp_path, "token").environment(1)
    assert worker[start_plan._NCCL_ORDER] == (given or "1")


@pytest.mark.usefixtures("nccl")
def test_doctor_reports_worker_limit_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check = doctor.collectives()
    assert check.status == "ok"
    assert "NCCL for sessions of up to 2 workers on GPUs, one each" in check.detail


def renewed(monkeypatch: pytest.MonkeyPatch, nccl: bool) -> list[bool]:
    """Which of the values 4, 5 and 6 a worker still has, where ranks may not have met from 5 on."""
    numbers: list[int] = []
    monkeypatch.setattr(group, "current", lambda: SimpleNamespace(nccl=nccl))
    monkeypatch.setattr(group, "renew", numbers.append)
    worker = Worker(world_size=2)
    for key in (4, 5, 6):
        worker.store.put(key, torch.ones(2))
    assert worker.handle([bytes(frame) for frame in encode(Renew(3, 5))]) == []
    assert numbers == [3]
    return [isinstance(worker.store.get(key), torch.Tensor) for key in (4, 5, 6)]


def test_values_after_failed_nccl_collective_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails on the device, where no exception says so; sockets raise one for each collective."""
    assert renewed(monkeypatch, nccl=True) == [True, False, False]
    assert renewed(monkeypatch, nccl=False) == [True, True, True]


@pytest.mark.parametrize("parted_from", [None, 1])
def test_value_after_abandoned_nccl_kernel_is_collective_error(
    parted_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of NCCL's that is given up leaves old bytes, which no exception says."""
    joined = SimpleNamespace(nccl=True, left=False, parted_from=parted_from)
    monkeypatch.setattr(group, "current", lambda: joined)
    worker = Worker(world_size=2)
    worker.store.put(4, torch.ones(2))
    (answer,) = worker.handle([bytes(frame) for frame in encode(Run(1, fetches=(4,)))])
    told = decode(answer, TO_CLIENT)
    assert isinstance(told, Done)
    (fetched,) = told.fetched
    if parted_from is None:
        assert isinstance(fetched, Fetched)
    else:
        assert isinstance(fetched, Failure)
        assert (fetched.kind, fetched.seq) == (COLLECTIVE_ERROR, 1)
        assert "rank 1 has left" in fetched.detail
        assert told.failures == [fetched]  # so that the client looks for the cause on other ranks


def test_a_renewal_that_is_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a Renew message"):
        Worker(world_size=2).handle([wire.pack((10, 3))])
