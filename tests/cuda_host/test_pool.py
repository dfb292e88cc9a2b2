"""A pool of GPUs, and a client that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_host.control import Control
from tests.pool.serving import served

pytestmark = [pytest.mark.timeout(240), pytest.mark.anew]

CLIENT = """
import sys
import torch, lazygt

assert not torch.cuda.is_available()
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]), compile="off") as session:
    assert session.device_type == "cuda"
    with torch.autocast("cuda", torch.bfloat16):
        x = torch.randn(4, 4)
        y = x @ x
        z = y.softmax(0)
    z.cpu()
    print(y.dtype, z.dtype, (x @ x).dtype)
"""


def test_autocast_of_cuda_is_for_lazy_tensors_where_the_client_has_no_gpu(
    gpu: Control, tmp_path: Path
) -> None:
    with served(tmp_path, "--workers", "1", "--device", "cuda") as pool:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, pool.on, str(pool.key("alice"))],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.bfloat16 torch.float32 torch.float32\n"
    assert "Disabling" not in done.stderr
    assert gpu.kernels > 0
