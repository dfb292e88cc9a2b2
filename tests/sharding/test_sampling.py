"""Logits cut by words are sampled where they lie: pairs of value and place are gathered."""

from __future__ import annotations

import pytest
import torch

import lazygt
from lazygt.graph.placement import Shard

WORDS, ROWS = 32000, 4
Tensor = torch.Tensor

pytestmark = pytest.mark.timeout(120)


def sampled(logits: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    best = logits.topk(5)
    return [
        torch.multinomial(logits.softmax(-1), 1),
        logits.argmax(-1),
        *best,
        best.indices.gather(-1, torch.multinomial(best.values.softmax(-1), 1)),
        torch.rand(3),
    ]


def test_samples_are_those_of_one_device_and_logits_stay() -> None:
    logits = torch.randn(ROWS, WORDS, generator=torch.Generator().manual_seed(0))
    expected = [t.clone() for t in sampled(logits)]
    with lazygt.session(mesh={"words": 2}, workers=lazygt.Workers(threads=1)) as s:
        lazy = lazygt.distribute(logits.to("lazygt"), [Shard(1)])
        s.flush()
        drawn = sampled(lazy)
        s.flush()
        assert s.last_plan is not None
        sent = sum(one.nbytes for one in s.last_plan.collectives)
        for a, b in zip(drawn, expected, strict=True):
            assert torch.equal(a.cpu(), b)
    pair = 8 * 2 * ROWS  # four bytes of a number, four of its place
    assert sent == pair + pair + 5 * pair + 2 * ROWS * 4  # and the largest and the sum of softmax


@pytest.mark.parametrize(("wrong", "text"), [(float("nan"), "inf"), (0.0, "sum of probabilities")])
def test_invalid_weights_are_refused_as_in_torch(wrong: float, text: str) -> None:
    with lazygt.session(mesh={"words": 2}, workers=lazygt.Workers(threads=1)) as s:
        weights = torch.rand(ROWS, WORDS)
        weights[1] = wrong
        weights = lazygt.distribute(weights, [Shard(1)], fixed=True)
        s.flush()
        with pytest.raises(RuntimeError, match=text):
            torch.multinomial(weights, 1).cpu()
