"""torch's functional collectives in a session: what they need, and what to write instead."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.tensor import Shard

import lazygt

functional = torch.ops._c10d_functional
GROUP = "0"  # torch's name of the default group


@pytest.mark.timeout(120)
def test_workers_on_cpus_have_no_process_group_of_torchs() -> None:
    assert functional_collectives is not None  # importing it registers the ops
    with lazygt.session(workers=lazygt.Workers(2, threads=1)):
        x = torch.full((4,), 3.0)
        total = functional.all_reduce(x, "sum", GROUP)
        with pytest.raises(lazygt.ExecutionError, match=r"place values with lazygt\.distribute"):
            total.tolist()
        placed = lazygt.distribute(x, [Shard(0)])
        assert placed.sum().item() == 12.0


@pytest.mark.timeout(60)
def test_a_worker_alone_says_that_it_has_no_group() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.ones(4)
        y = functional.all_reduce(x, "sum", GROUP)
        with pytest.raises(lazygt.ExecutionError, match="there is no process group"):
            y.tolist()
        assert x.sum().item() == 4.0
