"""A pool whose places are GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.pool.serving import SECONDS, served, start_client

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
HOLDS = """
import sys, torch, lazygt
with lazygt.session(pool=lazygt.PoolAccess(sys.argv[1], key=sys.argv[2]), workers=1) as s:
    print(torch.ones(4096).sum().item(), *s.worker_pids, flush=True)
    while True:
        torch.ones(4).sum().item()
"""


def visible_to(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (value,) = (word for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES="))
    return value.decode().partition("=")[2]


def test_each_session_computes_on_gpus_of_its_own(tmp_path: Path) -> None:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = listed.split(",") if listed else [str(number) for number in range(GPUS)]
    with served(tmp_path, "--workers", "2", "--device", "cuda") as pool:
        seen = []
        for name in ("alice", "bob"):
            client = start_client(HOLDS, pool.on, pool.key(name))
            seen.append((client, client.stdout.readline().split()))
        places = [pool.sessions(name)[0]["places"] for name in ("alice", "bob")]
        taken = [visible_to(int(pid)) for _, (_, pid) in seen]
        for client, (total, _) in seen:
            assert total == "4096.0"
            client.kill()
            client.wait(SECONDS)
            client.stdout.close()
    assert places == [[0], [1]]
    assert taken == [names[0], names[1 % len(names)]]
