"""Positions that change, in dims that are cut: one plan for all of them on every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt

pytestmark = pytest.mark.timeout(120)

PLACES = [(3, 0, 2), (0, 5, 1), (6, 2, 4), (5, 5, 0), (1, 1, 3), (2, 4, 4)]


def program(x: torch.Tensor) -> list[object]:
    """Reads and writes of parts; nothing is added up in another order."""
    read: list[object] = []
    for turn, (i, j, k) in enumerate(PLACES):
        row, part = x[i] * 2, x[k : k + 3, j]
        read.append((row.tolist(), part.tolist(), torch.roll(x, i, 0)[j].tolist()))
        x[i, j] = turn
        x[k : k + 2].mul_(3)
        leaf = x.detach().clone().requires_grad_()
        (leaf[i] * row).sum().backward()
        assert leaf.grad is not None
        read.append(leaf.grad.tolist())
    return [*read, x.tolist()]


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_sharded_dim_match_eager(dim: int) -> None:
    whole = torch.arange(84.0, device="cpu").view(7, 6, 2)
    eager = program(whole.clone())
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(whole.to("lazygt"), {"data": Shard(dim)}, fixed=True)
        assert program(x) == eager
        assert s.stats()["plans_built"] <= 15
        built = s.stats()["plans_built"]
        program(lazygt.distribute(whole.to("lazygt"), {"data": Shard(dim)}, fixed=True))
        assert s.stats()["plans_built"] <= built + 2, "more positions, more plans"
