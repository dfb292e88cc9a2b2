"""The workers' process group stands: a plan with an all-reduce runs on two real workers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives

import lazygt

functional = torch.ops._c10d_functional
GROUP = "0"  # torch's name of the default group


@pytest.mark.timeout(120)
def test_two_workers_sum_their_values() -> None:
    assert functional_collectives is not None  # importing it registers the ops
    with lazygt.session(workers=2, threads=1) as s:
        x = torch.full((4,), 3.0)
        total = functional.wait_tensor(functional.all_reduce(x, "sum", GROUP))
        assert total.tolist() == [6.0] * 4
        assert len(set(s.worker_pids)) == 2


@pytest.mark.timeout(60)
def test_a_worker_alone_says_that_it_has_no_group() -> None:
    with lazygt.session(executor="inline"):
        x = torch.ones(4)
        y = functional.all_reduce(x, "sum", GROUP)
        with pytest.raises(lazygt.ExecutionError, match="there is no process group"):
            y.tolist()
        assert x.sum().item() == 4.0
