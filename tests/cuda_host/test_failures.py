"""Failing GPUs, and those that there are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import lazygt
from lazygt.host import gpus
from lazygt.observe import doctor
from tests.cuda_host.control import Control
from tests.cuda_host.training import train

pytestmark = pytest.mark.timeout(120)


def test_failed_kernel_restarts_worker_and_restores_values(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off") as session:
        kept = torch.ones(8, device="cpu").to("lazygt")
        train(session, 2)
        (before,) = session.worker_pids
        gpu.fail_after = 5
        train(session, 2)
        assert kept.tolist() == [1.0] * 8
        (after,) = session.worker_pids
        assert after != before
        (recovery,) = session.recoveries
        assert "it can't use its device any more: CUDA error: device-side assert" in recovery.why


def test_without_recovery_the_device_is_lost(gpu: Control) -> None:
    session = lazygt.session(device="cuda", compile="off", recovery="off").open()
    gpu.fail_after = 5
    with pytest.raises(lazygt.errors.DeviceLost, match="device-side assert"):
        train(session, 2)
    with pytest.raises(lazygt.WorkerDied):
        session.close()


def test_memory_runs_out(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off") as session:
        train(session, 1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(5 << 30, dtype=torch.uint8).sum().item()
        train(session, 1)


def test_a_taken_gpu_is_said(gpu: Control) -> None:
    gpu.refuse_context = 46  # cudaErrorDevicesUnavailable
    with (
        pytest.raises(lazygt.LazyGTError, match=r"(?s)busy or unavailable.*Processes on it"),
        lazygt.session(device="cuda", compile="off") as session,
    ):
        train(session, 1)


def test_a_failed_capture_changes_nothing(gpu: Control) -> None:
    gpu.fail_captures = 1
    with lazygt.session(device="cuda", compile=lazygt.Compile("off", cuda_graphs="now")) as session:
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            train(session, 12)
        train(session, 2)


def test_memory_that_cannot_be_registered_is_copied(gpu: Control) -> None:
    gpu.fail_register = 1
    with lazygt.session(device="cuda", compile="off"):
        x = torch.arange(1 << 20, device="cpu").to("lazygt")
        assert torch.equal(x.cpu(), torch.arange(1 << 20, device="cpu"))
    assert gpu.registered == 0


def test_registered_memory_goes_there_and_back(gpu: Control) -> None:
    with lazygt.session(device="cuda", compile="off"):
        x = torch.arange(1 << 20, device="cpu").to("lazygt")
        assert torch.equal(x.cpu(), torch.arange(1 << 20, device="cpu"))
    assert gpu.registered > 0


# -- no GPU ----------------------------------------------------------------------------------------

REFUSED = """
import lazygt
try:
    lazygt.session(device="cuda").open()
except (ValueError, lazygt.LazyGTError) as error:
    print(type(error).__name__, error)
"""


def said(**environment: str) -> str:
    """Return the output of a program that asks for a GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFUSED],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout


def test_hidden_gpus_are_told_from_none_and_from_an_old_driver(gpu: Control) -> None:
    assert "hides this host's 2 GPUs" in said(CUDA_VISIBLE_DEVICES="")
    gpu.devices = 0
    assert "this host has no GPU" in said()


def test_an_old_driver_is_said(gpu: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.driver = 12040
    gpus.host_gpus.cache_clear()
    assert "supports CUDA 12.4 at most" in gpus.why_none()


def test_doctor_counts_the_gpus(gpu: Control) -> None:
    assert "NCCL for sessions of up to 2 workers" in doctor.collectives().detail


def test_the_client_initializes_no_cuda(gpu: Control) -> None:
    program = (
        "import torch, lazygt\n"
        "with lazygt.session(device='cuda'): (torch.ones(4) * 2).tolist()\n"
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "False\n"
