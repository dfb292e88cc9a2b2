"""The threshold and the buffers of CUDA IPC, with memory that stands in for a GPU's."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import lazygt
from lazygt.transfer import CudaIpcTransferReceiver, CudaIpcTransferSender
from lazygt.transfer.sender import GIB
from lazygt.transfer.transports.cuda_ipc import (
    THRESHOLD_VARIABLE,
    plain_segments,
    threshold_setting,
)
from tests.transfer.child import SENDERS, CountingDevice, checksums, weights

pytestmark = pytest.mark.timeout(60)
KIB = 1 << 10


def sender_and_receivers(threshold: int, count: int, device: CountingDevice, models: int = 1):
    """Send some models; the sender's device, requests of each transfer, and what arrived."""
    requests, arrived = [], []
    with CudaIpcTransferSender(
        threshold_gb=threshold / GIB, device=device, verify="crc32"
    ) as sender:
        receivers = [
            CudaIpcTransferReceiver(sender.address, name=str(number), device=CountingDevice())
            for number in range(count)
        ]
        sender.wait_for_receivers(count, 10.0)
        for version in range(1, models + 1):
            report = lazygt.transfer_weights(weights(version), sender, timeout=20.0)
            requests.append(report.requests)
            for receiver in receivers:
                with receiver.reading() as (_, params):
                    arrived.append(checksums(params) == checksums(weights(version)))
        for receiver in receivers:
            receiver.close()
    assert all(arrived)
    return requests


@pytest.mark.parametrize(
    ("threshold", "requests"),
    [
        # chunks of 12.5, 2.5, 35.5, 0.25 and 0.25 KiB, aligned
        (1 << 30, 1),
        (64 * KIB, 1),
        (50 * KIB, 2),
        (16 * KIB, 5),
        (8 * KIB, 9),
        (0, 5),
    ],
)
def test_number_of_copy_requests(threshold: int, requests: int) -> None:
    assert sender_and_receivers(threshold, 1, CountingDevice()) == [requests]


@pytest.mark.parametrize("threshold", [8 * KIB, 16 * KIB, 1 << 30])
def test_memory_is_two_buffers_of_the_threshold(threshold: int) -> None:
    device = CountingDevice()
    sender_and_receivers(threshold, 2, device, models=4)
    model = 13 * KIB + 3 * KIB + 36 * KIB + KIB
    assert device.allocated <= 2 * min(threshold, model)


def test_padding_of_pieces_fits_the_buffers_without_a_threshold() -> None:
    """Three rows of odd bytes are pieces of their own, each padded."""
    model = {"w": torch.randn(3, (5 << 18) + 1)}
    with (
        CudaIpcTransferSender(threshold_gb=0, device=CountingDevice(), verify="crc32") as sender,
        CudaIpcTransferReceiver(sender.address, device=CountingDevice()) as receiver,
    ):
        sender.wait_for_receivers(1, 10.0)
        assert lazygt.transfer_weights(model, sender, timeout=20.0).requests == 1
        with receiver.reading() as (_, params):
            assert torch.equal(params["w"], model["w"])


def test_a_buffer_is_exported_once_for_each_receiver() -> None:
    device = CountingDevice()
    sender_and_receivers(8 * KIB, 3, device, models=5)
    assert device.exports == 2 * 3


def test_a_bigger_model_gets_bigger_buffers() -> None:
    device = CountingDevice()
    with CudaIpcTransferSender(device=device, verify="crc32") as sender:
        with CudaIpcTransferReceiver(sender.address, device=CountingDevice()) as receiver:
            sender.wait_for_receivers(1, 10.0)
            lazygt.transfer_weights({"w": torch.ones(100)}, sender, timeout=10.0)
            assert device.allocated == 2 * 512
            with receiver.reading() as (_, params):
                assert params["w"].sum() == 100
        with CudaIpcTransferReceiver(sender.address, device=CountingDevice()) as receiver:
            sender.wait_for_receivers(1, 10.0)
            lazygt.transfer_weights({"w": torch.ones(1000)}, sender, timeout=10.0)
            with receiver.reading() as (_, params):
                assert params["w"].sum() == 1000


def test_the_threshold_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threshold_setting(None) == GIB
    monkeypatch.setenv(THRESHOLD_VARIABLE, "0.5")
    assert threshold_setting(None) == GIB // 2
    assert threshold_setting(2.0) == 2 * GIB
    monkeypatch.setenv(THRESHOLD_VARIABLE, "half")
    with pytest.raises(ValueError, match="weight_transfer_threshold_cuda_ipc_GB='half'"):
        threshold_setting(None)


@pytest.mark.parametrize("wrong", [-1.0, 1e-9, float("nan"), float("inf"), "half"])
@pytest.mark.parametrize("strategy", ["cuda-ipc", "shared-memory"])
def test_a_threshold_must_make_sense(strategy: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"threshold_gb={wrong!r}: expected GiB, 0"):
        SENDERS[strategy](threshold_gb=wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_error_names_alternative() -> None:
    with pytest.raises(RuntimeError, match="use SharedMemoryTransferSender"):
        CudaIpcTransferSender()


@pytest.mark.parametrize("given", ["expandable_segments:True", "max_split_size_mb:64", ""])
def test_buffers_lie_in_no_expandable_segment(given: str) -> None:
    """A process that is no child may not map one; all other settings stay, and come back."""
    before = torch._C._accelerator_getAllocatorSettings()
    with_others = f"{given},garbage_collection_threshold:0.8" if given else before
    torch._C._accelerator_setAllocatorSettings(with_others)
    try:
        with suppress(MemoryError), plain_segments():
            inside = torch._C._accelerator_getAllocatorSettings()
            raise MemoryError
        assert inside == with_others.replace("True", "False")
        assert torch._C._accelerator_getAllocatorSettings() == with_others
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
