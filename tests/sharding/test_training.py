"""Models trained on real workers, cut along the batch, along their weights and both: the numbers
are eager torch's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lazygt
from tests.sharding import training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DATA, MODEL, BOTH = {"data": 2}, {"model": 2}, {"data": 2, "model": 2}
#: a batch of 4 on 3 ranks: the last one has nothing; one of 8: less than the others
UNEVEN = {"data": 3}


def agree(name: str, mesh: Mapping[str, int]) -> None:
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        losses, state, _ = training.train(name, mesh)
    eager_losses, eager_state = training.eager(name)
    for got, expected in zip(losses + state, eager_losses + eager_state, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "encoder", "gpt"])
def test_data_parallel_agrees_with_eager(name: str) -> None:
    agree(name, DATA)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_uneven_and_empty_blocks_agree_with_eager(name: str) -> None:
    agree(name, UNEVEN)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [MODEL, {"model": 3}, BOTH], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_cut_weights_agree_with_eager(name: str, mesh: Mapping[str, int]) -> None:
    agree(name, mesh)


def test_data_parallel_sums_each_gradient_once_and_nothing_more() -> None:
    torch.manual_seed(0)
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)) as s:
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
        )
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(256, 256)
        s.flush()
        for _ in range(2):
            x = lazygt.distribute(batch, {"data": Shard(0)})
            loss = (model(x) - x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        assert s.last_plan is not None
        found = s.last_plan.collectives
        assert all((c.kind, c.reduce_op, c.mesh_dim) == ("all_reduce", "sum", "data")
                   for c in found)  # fmt: skip
        loss_and_biases, weight = 4 * (1 + 256 + 512), 4 * 256 * 512
        assert [c.nbytes for c in found] == [weight, weight, loss_and_biases]
        assert all(c.source.startswith(__file__) for c in found)
        assert all(p.placements == (Replicate(),) for p in model.parameters())
        assert s.stats()["bytes_fetched"] == 0


def test_parameters_stay_the_objects_they_are() -> None:
    with lazygt.session(mesh=MODEL, workers=lazygt.Workers(threads=1)):
        layer = torch.nn.Linear(6, 5)
        before = layer.weight.cpu()
        opt = torch.optim.AdamW(layer.parameters(), lr=0.1)
        weight = layer.weight
        assert lazygt.parallelize_module(layer, None, {"weight": [Shard(0)]}) is layer
        assert layer.weight is weight
        assert weight.placements == (Shard(0),)
        assert torch.equal(weight.cpu(), before)
        for _ in range(2):
            layer(torch.ones(3, 6)).sum().backward()
            opt.step()
        assert weight.placements == (Shard(0),)
        assert opt.state[weight]["exp_avg"].placements == (Shard(0),)
        assert not torch.equal(weight.cpu(), before)
