"""CUDA IPC and NCCL between real processes; skipped where there are no GPUs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from lazygt.transfer import (
    BroadcastTransferSender,
    CudaIpcTransferSender,
    ReceiverDied,
    ReceiverRefused,
    Sender,
    SharedMemoryTransferSender,
)
from lazygt.transfer.copier import Copier, as_bytes, xor64
from lazygt.transfer.sender import GIB
from tests.transfer.child import Accident, Reader, checksums, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(version: int) -> dict[str, torch.Tensor]:
    """`weights`, on the GPU, with the tie kept."""
    model = {name: value.cuda() for name, value in weights(version).items()}
    model["head.weight"] = model["embed.weight"]
    return model


@pytest.fixture
def sender() -> Iterator[Sender]:
    with CudaIpcTransferSender(threshold_gb=8 * 1024 / GIB) as made:
        yield made


def reader(sender: Sender, kind: str, number: int = 0) -> closing[Reader]:
    made = Reader(kind, sender.address, f"reader {number}")
    sender.wait_for_receivers(number + 1, 60.0)
    return closing(made)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("verify", ["xor64", "crc32", "none"])
def test_packed_buffers_reach_other_processes(sender: Sender, place: str, verify: str) -> None:
    sender.verify = verify
    with reader(sender, "gpu") as one, reader(sender, "gpu", 1) as two:
        for version in (1, 2, 3):
            model = weights(version) if place == "cpu" else on_gpu(version)
            report = lazygt.transfer_weights(model, sender, timeout=60.0)
            assert (report.requests, report.aliases) == (9, 1)
            for there in (one, two):
                assert there.ask("checksums") == (version, checksums(weights(version)))


def test_a_killed_receiver_is_named_and_others_go_on(sender: Sender) -> None:
    with reader(sender, "gpu") as dies, reader(sender, "gpu", 1) as lives:
        lazygt.transfer_weights(on_gpu(1), sender, timeout=60.0)
        with pytest.raises(ReceiverDied, match="'reader 0'"):
            sender.send(Accident(2, 2, lambda: dies.signal(signal.SIGKILL)), timeout=60.0)
        assert lives.ask("checksums") == (1, checksums(weights(1)))
        lazygt.transfer_weights(on_gpu(2), sender, timeout=60.0)
        assert lives.ask("checksums") == (2, checksums(weights(2)))


def test_a_flipped_byte_on_the_gpu(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(sender, "gpu") as there:
        lazygt.transfer_weights(on_gpu(1), sender, timeout=60.0)
        copy_all = Copier._copy_all

        def flip(copier, request, copies):
            checks = copy_all(copier, request, copies)
            as_bytes(copies[0].target)[5] ^= 1
            torch.cuda.synchronize()
            return checks

        with monkeypatch.context() as patch:
            patch.setattr(Copier, "_copy_all", flip)
            with pytest.raises(ReceiverRefused, match="are not what was sent"):
                lazygt.transfer_weights(on_gpu(2), sender, timeout=60.0)
        assert there.ask("checksums") == (1, checksums(weights(1)))


def test_memory_is_flat_over_many_transfers(sender: Sender) -> None:
    with reader(sender, "gpu"):
        model = on_gpu(1)
        lazygt.transfer_weights(model, sender, timeout=60.0)
        before = torch.cuda.memory_allocated()
        for _ in range(100):
            lazygt.transfer_weights(model, sender, timeout=60.0)
        assert torch.cuda.memory_allocated() == before


def test_xor_is_the_same_on_both_devices() -> None:
    data = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    assert xor64(data) == xor64(data.cuda())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU a process")
def test_nccl_broadcasts_between_gpus() -> None:
    with BroadcastTransferSender(device="cuda:0") as sender, reader(sender, "nccl") as there:
        for version in (1, 2, 3):
            lazygt.transfer_weights(on_gpu(version), sender, timeout=60.0)
            assert there.ask("checksums") == (version, checksums(weights(version)))


def test_gpu_workers_write_their_own_blocks() -> None:
    with (
        SharedMemoryTransferSender() as made,
        closing(Reader("shared-memory", made.address, "whole")) as reader,
        lazygt.session(mesh={"data": 2}, device="cuda", workers=lazygt.Workers(threads=1)) as s,
    ):
        made.wait_for_receivers(1, 30.0)
        model = torch.nn.Linear(300, 201)
        lazygt.parallelize_module(model, None, {"weight": [Shard(0)], "bias": [Shard(0)]})
        s.synchronize()
        fetched = s.stats()["bytes_fetched"]
        report = lazygt.transfer_weights(model, made, timeout=30.0)
        assert s.stats()["bytes_fetched"] == fetched
        assert set(report.written) == {0, 1}
        expected = {name: p.detach().cpu() for name, p in model.state_dict().items()}
        assert reader.ask("checksums") == (1, checksums(expected))


@pytest.mark.parametrize("kind", ["gpu", "host"])
def test_gpu_workers_send_their_own_blocks(kind: str) -> None:
    """Two workers on one GPU lend their buffers, or broadcast through the host."""
    placements = {"weight": {"model": Shard(1)}}
    with (
        CudaIpcTransferSender() if kind == "gpu" else BroadcastTransferSender() as made,
        closing(Reader(kind, made.address, "whole")) as whole,
        closing(
            Reader(kind, made.address, "half", mesh="model=2", rank=1, placements=placements)
        ) as half,
        lazygt.session(mesh={"data": 2}, device="cuda", workers=lazygt.Workers(threads=1)) as s,
    ):
        made.wait_for_receivers(2, 60.0)
        model = torch.nn.Linear(300, 201)
        lazygt.parallelize_module(model, None, {"weight": [Shard(0)], "bias": [Shard(0)]})
        s.synchronize()
        fetched = s.stats()["bytes_fetched"]
        for _ in range(3):
            report = lazygt.transfer_weights(model, made, timeout=60.0)
        assert s.stats()["bytes_fetched"] == fetched
        assert set(report.written) == {0, 1}
        expected = {name: p.detach().cpu() for name, p in model.state_dict().items()}
        assert whole.ask("checksums") == (3, checksums(expected))
        expected["weight"] = expected["weight"].chunk(2, 1)[1]
        assert half.ask("checksums") == (3, checksums(expected))
