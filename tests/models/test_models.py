"""Whole models train to the same bits as in eager torch."""

from __future__ import annotations

import pytest
import torch

import lazygt
from tests.models import zoo

STEPS = 20

#: What an optimizer's step, forward and backward need once things are steady: one plan. Besides it
#: the first two steps, and what comes after the last backward.
PLANS = 4


def assert_same_bits(
    lazy: tuple[list[torch.Tensor], list[torch.Tensor]],
    eager: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> None:
    for ours, theirs in zip(lazy, eager, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_bit_equal_to_eager(name: str, optimizer: str) -> None:
    data = zoo.batches(name, STEPS)
    eager = zoo.train(name, optimizer, data, "cpu")
    with lazygt.session(launcher="inline") as s:
        lazy = zoo.train(name, optimizer, data, "lazygt")
        stats = s.stats()
    assert_same_bits(lazy, eager)
    assert stats["plans_built"] <= PLANS
    assert stats["flushes"]["backward"] == STEPS
    assert stats["free_messages"] == stats["scalar_uploads"] == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "workers"), [("cnn", 1), ("gpt", 1), ("mlp", 2), ("lstm", 2)])
def test_bit_equal_on_worker_processes(name: str, workers: int) -> None:
    data = zoo.batches(name, STEPS)
    eager = zoo.train(name, "adamw", data, "cpu")
    with lazygt.session(workers=lazygt.Workers(workers, threads=1)) as s:
        lazy = zoo.train(name, "adamw", data, "lazygt")
        assert len(s.worker_pids) == workers
    assert_same_bits(lazy, eager)
