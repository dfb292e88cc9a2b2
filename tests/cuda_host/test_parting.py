"""Ranks with NCCL of which one can't take part: they part, say so, and meet again."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from tests.cuda_host.control import Control

pytestmark = pytest.mark.timeout(180)


def gathered(value: torch.Tensor) -> torch.Tensor:
    """A value, half of which lies on each rank, as all ranks have it."""
    return lazygt.redistribute(lazygt.distribute(value, {"data": Shard(0)}), {})


def numbers() -> torch.Tensor:
    """Eight numbers that need no kernel."""
    return torch.arange(8.0, device="cpu").to("lazygt")


def test_a_rank_without_memory_is_named_and_all_meet_again(gpu: Control) -> None:
    """The other rank's kernel is given up, which leaves the old bytes in what it was to fill."""
    with lazygt.session(device="cuda", mesh={"data": 2}, compile="off") as session:
        kept = gathered(numbers())
        large = torch.zeros(1 << 26, dtype=torch.uint8)
        session.synchronize()
        gpu.full = 2
        lost = gathered(large)
        here = re.escape(__file__)
        with pytest.raises(lazygt.ExecutionError, match=f"(?s)on worker 1: .*memory.*{here}"):
            lost[0].item()
        gpu.full = 0
        with pytest.raises(lazygt.ExecutionError, match="the ranks parted while it was being"):
            lost[0].item()
        assert kept.tolist() == list(range(8))
        collectives = gpu.collectives
        assert gathered(numbers()).tolist() == list(range(8))
        assert gpu.collectives > collectives
        assert not session.recoveries
