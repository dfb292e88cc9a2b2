"""Sessions on GPUs that are stubs."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import lazygt
from lazygt.recovery import recover
from tests.cuda_host.control import Control
from tests.cuda_host.training import train

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("launcher", ["inline", "process"])
def test_a_session_trains(gpu: Control, launcher: str) -> None:
    with lazygt.session(device="cuda", launcher=launcher, compile="off") as session:
        train(session)
    assert gpu.kernels > 100


def test_hot_plans_are_captured(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs="now")) as session:
        train(session, 12)
        assert session.stats()["cuda_graphs"] > 0, lazygt.why(session)
    assert gpu.captures > 0
    assert gpu.replays > 4


def test_synchronize_waits_for_the_kernels(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off") as session:
        x = torch.ones(8)
        session.synchronize()
        waits = gpu.waits
        gpu.busy_us = 20_000
        y = x * 2
        session.synchronize()
        assert gpu.waits > waits
        del y


def test_torchs_own_synchronize_waits_for_the_workers(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off"):
        x = torch.ones(8)
        waits = gpu.waits
        gpu.busy_us = 20_000
        y = x * 2
        torch.cuda.synchronize()
        assert gpu.waits > waits
        del y


def test_memory_is_the_allocators(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off") as session:
        x = torch.ones(1 << 20)
        (rank,) = session.memory().ranks
        assert rank.allocated >= x.nbytes


def test_autocast_has_the_dtypes_of_cuda(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off"), torch.autocast("cuda", torch.bfloat16):
        x = torch.randn(4, 4)
        assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).softmax(0).dtype is torch.float32


def test_snapshots_are_taken_and_restored(gpu: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "_LEAST_SECONDS", 0.0)
    with lazygt.session(
        device="cuda", compile="off", recovery=lazygt.Recovery(snapshot_cost=1.0)
    ) as session:
        x = torch.arange(1 << 16, device="cpu").to("lazygt")
        train(session, 8)
        assert session.stats()["snapshots"] > 0
        assert session.stats()["snapshot_bytes"] >= x.nbytes
        os.kill(session.worker_pids[0], signal.SIGKILL)
        assert torch.equal(x.cpu(), torch.arange(1 << 16, device="cpu"))
        (recovery,) = session.recoveries
        assert recovery.runs < sum(session.stats()["flushes"].values()), "all was done again"


def test_a_profile_times_each_op(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off") as session:
        train(session, 1)
        waits = gpu.waits
        gpu.busy_us = 2_000
        with lazygt.profile(session):
            train(session, 1)
        assert gpu.waits > waits + 10


def test_recurrent_layers_are_recorded_as_cudnns_op(gpu: Control) -> None:
    with lazygt.session(device="cuda", launcher="dry", compile="off") as session:
        output, _ = nn.LSTM(4, 3)(torch.randn(5, 2, 4))
        output.sum().backward()
        session.flush()
        ops = [node.op for plan in session.plans() for node in plan.steps.graph.nodes]
    assert ops.count("aten._cudnn_rnn.default") == 1
    assert ops.count("aten._cudnn_rnn_backward.default") == 1
