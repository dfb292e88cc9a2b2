"""What a placed parameter is given later: by a conversion, by ``.data = ...``, as a copy of its
module."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.graph.placement import SingleRank

DIM = 64
S0, R = Shard(0), Replicate()


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2, "pipe": 2}) as s:
        yield s


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def in_stages(model: nn.Sequential) -> nn.Sequential:
    lazygt.stage(model[0], 0)
    lazygt.stage(model[2], 1)
    return model


def whole_in_stages(model: nn.Sequential) -> nn.Sequential:
    lazygt.data_parallel(in_stages(model))
    return model


def new_data(model: nn.Sequential) -> nn.Sequential:
    for p in model.parameters():
        p.data = torch.ones_like(p)
    return model


def exchanged(session: lazygt.Session, model: nn.Module) -> Counter[tuple[str, int, str]]:
    """What a step sends, in elements."""
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        x = lazygt.distribute(torch.ones(512, DIM, dtype=dtype), {"data": S0})
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    session.synchronize()
    assert session.last_plan is not None
    size = dtype.itemsize
    return Counter((c.kind, c.nbytes // size, c.mesh_dim) for c in session.last_plan.collectives)


@pytest.mark.parametrize("lay", [lazygt.fully_shard, lazygt.data_parallel, whole_in_stages])
@pytest.mark.parametrize(
    "change", [nn.Module.double, nn.Module.bfloat16, new_data, copy.deepcopy],
    ids=["double", "bfloat16", "data", "deepcopy"],
)  # fmt: skip
def test_new_values_keep_collectives_of_step(
    session: lazygt.Session,
    lay: Callable[[nn.Module], nn.Module],
    change: Callable[[nn.Module], nn.Module],
) -> None:
    expected = exchanged(session, lay(mlp()))
    assert expected
    assert exchanged(session, change(lay(mlp()))) == expected


def test_values_with_a_place_of_their_own_keep_it(session: lazygt.Session) -> None:
    layer = lazygt.fully_shard(in_stages(mlp()))[2]
    layer.weight.data = lazygt.distribute(torch.ones(DIM, 4 * DIM), {"data": Shard(1)})
    assert layer.weight.placements == (Shard(1), R)
    layer.bias.data = layer.bias.data.clone()
    assert layer.bias.placements == (S0, SingleRank(1))


def test_values_of_another_shape_lie_as_they_were_computed(session: lazygt.Session) -> None:
    layer = lazygt.fully_shard(nn.Linear(DIM, DIM))
    layer.bias.data = torch.ones(())
    assert layer.bias.placements == (R, R)
