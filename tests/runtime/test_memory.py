"""``s.memory()``: what each worker holds, as it says itself."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.host.processes import resident

pytestmark = pytest.mark.timeout(120)

WIDTH = 512
WEIGHTS = 2 * WIDTH * WIDTH * 4


def trained(wrap: Any = lambda model: None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two steps; gradients are there."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    wrap(model)
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        opt.zero_grad()
        x = torch.ones(8, WIDTH)
        if lazygt.current().mesh.world_size > 1:
            x = lazygt.distribute(x, {"data": Shard(0)})
        model(x).square().mean().backward()
        opt.step()
    return model, opt


@pytest.mark.parametrize("launcher", ["inline", "process"])
def test_on_one_worker(launcher: str) -> None:
    with lazygt.session(launcher=launcher) as s:
        kept = trained()
        batch = torch.ones(3, WIDTH) * 2
        told = s.memory()
        (memory,) = told.ranks
        assert memory.kinds["parameters"] == WEIGHTS
        assert memory.kinds["gradients"] == WEIGHTS
        assert memory.kinds["optimizer"] == 2 * WEIGHTS
        assert memory.kinds["other"] >= batch.nbytes
        assert told.living == memory.living == sum(memory.kinds.values())
        assert memory.living <= memory.allocated
        assert memory.allocated <= memory.peak
        assert memory.resident <= memory.peak
        pid = os.getpid() if launcher == "inline" else s.worker_pids[0]
        assert memory.peak == pytest.approx(resident(pid, "VmHWM"), rel=0.05)
        kept[1].zero_grad()
        assert s.memory().ranks[0].kinds["gradients"] == 0
        del kept
        assert s.memory().living < WEIGHTS


def test_blocks_lie_on_two_workers() -> None:
    with lazygt.session(mesh={"data": 2}) as s:
        _kept = trained(lazygt.fully_shard)
        told = s.memory()
    assert [memory.rank for memory in told.ranks] == [0, 1]
    for memory in told.ranks:
        assert memory.kinds["parameters"] == WEIGHTS // 2
        assert memory.kinds["optimizer"] == WEIGHTS
    assert told.peak == max(memory.peak for memory in told.ranks)


def test_parameters_that_nobody_trains_are_known() -> None:
    with lazygt.session(launcher="inline") as s:
        model = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        same = model.weight[1:]
        assert s.memory().ranks[0].kinds["parameters"] == WIDTH * WIDTH * 4
        assert same.shape == (WIDTH - 1, WIDTH)


def test_values_that_share_memory_count_once() -> None:
    with lazygt.session(launcher="inline") as s:
        x = torch.ones(WIDTH, WIDTH)
        before = s.memory().living
        views = [x[1:], x.t(), x.view(-1)]
        assert s.memory().living == before
        assert views[0].shape == (WIDTH - 1, WIDTH)


def test_a_dry_session_knows_sizes() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 2}) as s:
        _kept = trained(lazygt.fully_shard)
        assert s.memory().ranks[0].kinds["parameters"] == WEIGHTS // 2


def test_memory_report_prints_after_pending_errors() -> None:
    with lazygt.session(launcher="inline") as s:
        _kept = trained()
        text = str(s.memory())
        assert text.startswith("memory of the workers, as measured\nrank  parameters  gradients")
        assert "2.1 MB" in text
        bad = torch.ones(2)[torch.tensor([5])]
        with pytest.raises(lazygt.ExecutionError):
            s.memory()
        del bad
