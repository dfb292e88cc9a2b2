"""An axis of one rank costs nothing: no collective, no other program than without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt

DIM = 64


def _megatron(model: nn.Module) -> None:
    styles = {"0": lazygt.ColwiseParallel(), "2": lazygt.RowwiseParallel()}
    lazygt.parallelize_module(model, "model", styles)


def _fully_sharded(model: nn.Module) -> None:
    lazygt.fully_shard(model, "model")


def _plain(model: nn.Module) -> None:
    pass


def _train(lay: Callable[[nn.Module], None], device: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
    model[0].weight.data = model[0].weight.data.t().contiguous().t().clone()  # not row-major
    lay(model)
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x = torch.randn(32, DIM)
        if device is None:
            x = lazygt.distribute(x, {"data": Shard(0)})
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model


def _sent(
    mesh: Mapping[str, int], lay: Callable[[nn.Module], None]
) -> tuple[list[tuple[str, int, str]], int]:
    """The collectives of a step, and how many nodes its program has."""
    with lazygt.session(launcher="dry", mesh=mesh) as s:
        _train(lay)
        assert s.last_plan is not None
        collectives = [(one.kind, one.nbytes, one.mesh_dim) for one in s.last_plan.collectives]
        return collectives, len(s.last_plan.graph.nodes)


@pytest.mark.parametrize("lay", [_megatron, _fully_sharded])
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 1}, {"model": 1, "data": 2}])
def test_the_program_is_that_of_the_other_axes(
    lay: Callable[[nn.Module], None], mesh: dict[str, int]
) -> None:
    with_axis, without = _sent(mesh, lay), _sent({"data": 2}, _plain)
    assert with_axis[0] == without[0]
    assert {axis for *_, axis in with_axis[0]} == {"data"}


def test_placement_along_axis_of_one_is_kept() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 2, "model": 1}):
        model = _train(_megatron)
        assert model[0].weight.placements == (Replicate(), Shard(0))
        assert model[2].weight.placements == (Replicate(), Shard(1))


@pytest.mark.timeout(120)
def test_the_numbers_are_those_of_one_device() -> None:
    expected = [p.detach() for p in _train(_plain, "cpu").parameters()]
    with lazygt.session(mesh={"data": 2, "model": 1}, workers=lazygt.Workers(threads=1)):
        computed = [p.detach().cpu() for p in _train(_megatron).parameters()]
    for got, want in zip(computed, expected, strict=True):
        torch.testing.assert_close(got, want)
