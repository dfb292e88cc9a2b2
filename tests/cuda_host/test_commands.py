"""Commands that measure or predict GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt import calibrate
from lazygt.cli.app import app
from lazygt.observe import doctor
from tests.cuda_host.control import Control

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import torch, lazygt

with lazygt.session():
    x = torch.ones(64, 64)
    for _ in range(3):
        x = x @ x
        lazygt.current().flush()
"""


MEASURED = """
from lazygt import calibrate

machine = calibrate.measure("cuda", calibrate.SMALLEST)
for key in ("memory.capacity", "collectives.ranks"):
    print(key, int(machine.figures[key].value))
"""


def done(*command: str, visible: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that sees some of the GPUs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip


def test_a_machine_of_one_gpu_is_measured(gpu: Control) -> None:
    gpu.busy_us = 20
    told = done("-c", MEASURED, visible="0")
    assert told.stdout == "memory.capacity 4295000000\ncollectives.ranks 1\n", told.stderr
    assert gpu.kernels > 100
    assert gpu.collectives == 0, "NCCL takes one rank a GPU"


def test_collectives_of_nccl_are_timed_until_the_gpus_have_done_them(gpu: Control) -> None:
    with lazygt.session(device="cuda", workers=2, compile="off"):
        start = torch.zeros(3)
        for kind in calibrate.KINDS:
            met = gpu.collectives
            lazygt.apply(calibrate.seconds, start, "workers", "local", kind, 4096).item()
            assert gpu.collectives - met >= 2 * 2 * (3 + 1), kind


def test_a_prediction_of_gpus_is_refused_a_check_without_one(gpu: Control, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["simulate", "--check", "--machine", "h100", str(script)]
    told = done("-m", "lazygt.cli", *command, visible="")
    assert told.returncode == 2
    assert "which has no CUDA device" in told.stdout + told.stderr


def test_launches_run_ahead_of_a_gpu_in_a_prediction(gpu: Control, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shown = CliRunner().invoke(app, ["simulate", "--machine", "h100", str(script)])
    assert shown.exit_code == 0, shown.output
    assert "A step on" in shown.output


def test_doctor_says_that_torch_has_no_nccl(gpu: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    check = doctor.collectives()
    assert (check.status, check.advice) == ("warn", "several GPUs, but torch has no NCCL")


def test_autocast_of_cuda_is_of_the_session_where_the_client_has_no_gpu(gpu: Control) -> None:
    program = (
        "import torch, lazygt\n"
        "with lazygt.session(device='cuda', launcher='dry'), torch.autocast('cuda'):\n"
        "    x = torch.ones(4, 4)\n"
        "    print((x @ x).dtype)\n"
    )
    assert done("-c", program, visible="").stdout == "torch.float16\n"
