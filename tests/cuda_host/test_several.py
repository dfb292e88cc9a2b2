"""Two GPUs: NCCL's collectives, and weights that go to another process."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.transfer import BroadcastTransferSender, CudaIpcTransferSender, Sender
from lazygt.transfer.transports.cuda_ipc import CudaDevice, HostDevice, shared_device
from tests.cuda_host.control import Control
from tests.support.timeouts import patience
from tests.transfer.child import Reader, weights
from tests.transfer.conftest import _fork_server  # noqa: F401 - a fixture of all tests here

pytestmark = pytest.mark.timeout(180)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step of sharded training; the loss is read."""
    x = lazygt.distribute(torch.randn(8, 16), {"data": Shard(0)})
    loss = F.mse_loss(model(x), torch.zeros(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()


@pytest.mark.parametrize("shard", [lazygt.data_parallel, lazygt.fully_shard])
def test_two_workers_meet_by_nccl(gpu: Control, shard: object) -> None:
    with lazygt.session(device="cuda", mesh={"data": 2}, compile="off"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        shard(model)  # type: ignore[operator]
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer)
    assert gpu.collectives > 0


def test_blocks_of_two_ranks_are_gathered(gpu: Control) -> None:
    """The stub of NCCL moves bytes, so the numbers are right where no kernel is needed."""
    with lazygt.session(device="cuda", mesh={"data": 2}, compile="off"):
        x = lazygt.distribute(torch.arange(8.0, device="cpu").to("lazygt"), {"data": Shard(0)})
        whole = lazygt.redistribute(x, {})
        assert whole.tolist() == list(range(8))
    assert gpu.collectives > 0


def test_stages_of_a_pipeline_send_both_ways_at_once(gpu: Control) -> None:
    """Messages are larger than what NCCL takes before a receiver is there."""
    with lazygt.session(device="cuda", mesh={"pipe": 2}, compile="off"):
        model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 4))
        lazygt.stage(model[:2], 0, mesh_dim="pipe")
        lazygt.stage(model[2:], 1, mesh_dim="pipe")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                loss = model(torch.randn(1024, 16)).square().mean()
                loss.backward()
            optimizer.step()
            loss.item()
    assert gpu.collectives >= 2 * 2 * 4 * 2


def test_more_workers_than_gpus_meet_through_the_host(gpu: Control) -> None:
    with pytest.warns(RuntimeWarning, match="4 workers share 2 GPUs"):
        session = lazygt.session(device="cuda", mesh={"data": 4}, compile="off")
    with session:
        model = nn.Sequential(nn.Linear(16, 4))
        lazygt.data_parallel(model)
        step(model, torch.optim.SGD(model.parameters(), 0.1))
    assert gpu.collectives == 0


def sent(sender: Sender, kind: str) -> None:
    """Send weights that lie on a GPU to another process."""
    with sender, closing(Reader(kind, sender.address, "reader")) as reader:
        sender.wait_for_receivers(1, 60.0)
        model = {name: value.cuda() for name, value in weights(1).items()}
        lazygt.transfer_weights(model, sender, timeout=60.0)
        assert reader.ask("checksums")[0] == 1


def test_a_process_lends_memory_of_its_gpu(gpu: Control) -> None:
    assert isinstance(shared_device(torch.device("cuda", 1)), CudaDevice)
    assert isinstance(shared_device(torch.device("cpu")), HostDevice)


def test_after_a_failed_op_the_ranks_form_a_new_group_of_nccl(gpu: Control) -> None:
    """NCCL does not say which values ranks have met for, so those of that time count as failed."""
    with lazygt.session(device="cuda", mesh={"data": 2}, compile="off", recovery="off") as session:
        x = lazygt.distribute(torch.arange(8.0, device="cpu").to("lazygt"), {"data": Shard(0)})
        session.flush()
        with pytest.raises(torch.OutOfMemoryError):
            lazygt.distribute(
                torch.empty(8 << 30, dtype=torch.uint8), {"data": Shard(0)}
            ).sum().item()
        met = gpu.collectives
        assert lazygt.redistribute(x, {}).tolist() == list(range(8))
        assert gpu.collectives > met


def test_weights_go_by_cuda_ipc(gpu: Control) -> None:
    sent(CudaIpcTransferSender(threshold_gb=8 / (1 << 20), verify="none"), "gpu")
    assert gpu.opened > 0


def test_workers_lend_buffers_on_their_gpus(gpu: Control) -> None:
    """Each worker packs its blocks on its GPU; nothing of them goes through the client."""
    sender = CudaIpcTransferSender(verify="none")
    with (
        sender,
        closing(Reader("gpu", sender.address, "reader")) as reader,
        lazygt.session(mesh={"data": 2}, device="cuda", compile="off") as session,
    ):
        sender.wait_for_receivers(1, 60.0)
        model = nn.Linear(300, 202)
        lazygt.parallelize_module(model, None, {"weight": [Shard(0)], "bias": [Shard(0)]})
        session.synchronize()
        fetched = session.stats()["bytes_fetched"]
        report = lazygt.transfer_weights(model, sender, timeout=60.0)
        assert set(report.written) == {0, 1}
        assert session.stats()["bytes_fetched"] == fetched
        assert reader.ask("checksums")[0] == 1
    assert gpu.opened >= 2, "the reader maps a buffer of each worker's GPU"


def test_weights_go_by_nccl(gpu: Control) -> None:
    sent(BroadcastTransferSender(device="cuda:0", verify="none"), "nccl")
    assert gpu.collectives > 0


def test_a_rank_that_dies_in_a_collective_of_nccl_is_missed_at_once(gpu: Control) -> None:
    """The other one waits for its stream, and that for the dead rank."""
    with lazygt.session(device="cuda", mesh={"data": 2}, compile="off") as session:
        kept = torch.arange(8.0, device="cpu").to("lazygt")
        model = nn.Sequential(nn.Linear(16, 4))
        lazygt.data_parallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer)
        os.kill(session.worker_pids[1], signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (session.worker_pids[1], signal.SIGKILL)).start()
        begin = time.monotonic()
        step(model, optimizer)
        assert time.monotonic() - begin < patience(40.0)
        assert kept.tolist() == list(range(8))
        assert [recovery.ranks for recovery in session.recoveries] == [(1,)]
