"""What users do beside training, on real workers: the numbers are eager torch's, and values
stay where they were put."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.graph.placement import SingleRank
from lazygt.record.tensor import is_lazy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DATA, MODEL, PIPE = {"data": 2}, {"model": 2}, {"pipe": 2}
R = Replicate()


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(x))


def mlp(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def on_cpu(outputs: int = 3) -> nn.Sequential:
    with torch.device("cpu"):
        return mlp(outputs)


def in_stages(model: nn.Sequential) -> nn.Sequential:
    lazygt.stage(model[:2], 0)
    lazygt.stage(model[2:], 1)
    return model


def by_columns(model: nn.Sequential) -> nn.Sequential:
    lazygt.parallelize_module(
        model, None, {"0": lazygt.ColwiseParallel(), "2": lazygt.RowwiseParallel()}
    )
    return model


def numbers(*shape: int, device: str = "cpu") -> torch.Tensor:
    found = torch.linspace(-1, 1, torch.Size(shape).numel(), device="cpu").reshape(shape)
    return found.to(device)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().cpu().clone() for t in model.state_dict().values()]


def agree(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_cross_stages() -> None:
    def penalised(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    expected = penalised(mlp(1), numbers(4, 6))
    with lazygt.session(mesh=PIPE, workers=lazygt.Workers(threads=1)):
        agree(penalised(in_stages(mlp(1)), numbers(4, 6, device="lazygt")), expected)


@pytest.mark.parametrize("shipped", [False, True])
def test_loading_checkpoint_keeps_placement(shipped: bool) -> None:
    with lazygt.session(mesh={"pipe": 2, "data": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = lazygt.fully_shard(in_stages(mlp()))
        other = on_cpu().double().float()
        for p in other.parameters():
            p.data.mul_(2)
        if shipped:
            s.flush()
        model.load_state_dict(other.state_dict())
        assert model[0].weight.placements == (SingleRank(0), Shard(0))
        assert model[2].weight.placements == (SingleRank(1), Shard(0))
        agree(values(model), values(other))


def test_a_batch_written_in_place_stays_cut() -> None:
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)):
        x = lazygt.distribute(torch.empty(4, 6), [Shard(0)])
        for factor in (1, 2):
            x.copy_(numbers(4, 6) * factor)
            assert x.placements == (Shard(0),)
            assert torch.equal(x.cpu(), numbers(4, 6) * factor)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("mesh", "lay", "placement"),
    [
        pytest.param(DATA, lazygt.fully_shard, Shard(0), id="fsdp"),
        pytest.param(MODEL, by_columns, Shard(0), id="tensor"),
        pytest.param(PIPE, in_stages, SingleRank(0), id="stages"),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "lazygt"])
def test_a_loaded_optimizer_state_lies_as_the_parameters_do(
    mesh: dict[str, int], lay: Callable[[Any], Any], placement: Any, where: str
) -> None:
    def train(model: nn.Sequential, saved: Any, steps: int) -> Any:
        device = model[0].weight.device
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        if saved is not None:
            weights, state = torch.load(saved, map_location=where)
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        for _ in range(steps):
            opt.zero_grad()
            model(numbers(4, 6).to(device)).square().mean().backward()
            opt.step()
        if is_lazy(model[0].weight):
            assert opt.state[model[0].weight]["exp_avg"].placements == (placement,)
        file = io.BytesIO()
        torch.save((model.state_dict(), opt.state_dict()), file)
        file.seek(0)
        return file

    weights, _ = torch.load(train(mlp(), None, 4))
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        saved = train(lay(mlp()), None, 2)
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        found, _ = torch.load(train(lay(mlp()), saved, 2))
    agree(list(found.values()), list(weights.values()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [PIPE, DATA, None], ids=str)
@pytest.mark.parametrize("lay", [in_stages, by_columns])
def test_a_module_goes_on_in_another_session(
    lay: Callable[[nn.Sequential], nn.Sequential], mesh: dict[str, int] | None
) -> None:
    model = on_cpu()
    expected = [model(numbers(4, 6)).detach()]
    with lazygt.session(mesh={"pipe": 2, "model": 2}, workers=lazygt.Workers(threads=1)):
        lay(model.to("lazygt"))
        agree([model(numbers(4, 6, device="lazygt")).detach().cpu()], expected)
        model.to("cpu")
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(1 if mesh is None else 2, threads=1)):
        model.to("lazygt")
        if lay is in_stages and mesh == PIPE:
            lay(model)
        agree([model(numbers(4, 6, device="lazygt")).detach().cpu()], expected)
        model.to("cpu")
    agree([model(numbers(4, 6)).detach()], expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@pytest.mark.parametrize("lay", [in_stages, by_columns])
def test_copies_of_a_module_lie_as_it_does(
    lay: Callable[[nn.Sequential], nn.Sequential], copied: str
) -> None:
    with lazygt.session(mesh={"pipe": 2, "model": 2}, workers=lazygt.Workers(threads=1)):
        model = lay(mlp())
        if copied == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False).to("lazygt")
        other = on_cpu()
        for p in other.parameters():
            p.data.mul_(2)
        before = values(model)
        twin.load_state_dict(other.state_dict())
        x = numbers(4, 6)
        agree([twin(x.to("lazygt")).detach().cpu()], [other(x).detach()])
        if lay is in_stages:
            assert twin[0].weight.placements[0] == SingleRank(0)
        agree(values(model), before)


def test_a_tied_parameter_is_found_by_each_of_its_names() -> None:
    with lazygt.session(mesh=MODEL, workers=lazygt.Workers(threads=1)):
        for plan in (
            {"head.weight": {"model": Shard(0)}},
            {"head": lazygt.ColwiseParallel()},
            {"tokens": lazygt.VocabParallel()},
        ):
            model = Tied()
            expected = F.embedding(torch.tensor([1, 5], device="cpu"), values(model)[0])
            lazygt.parallelize_module(model, None, plan)
            assert model.tokens.weight.placements == (Shard(0),)
            agree([model.tokens(torch.tensor([1, 5])).detach().cpu()], [expected])


def test_parameter_that_is_view_is_refused_with_remedy() -> None:
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)):
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        with pytest.raises(ValueError, match=r"is a view of another tensor.*parameter\.data ="):
            lazygt.fully_shard(layer)
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()
        lazygt.fully_shard(layer)
        assert layer.parametrizations.weight.original0.placements == (Shard(0),)


def test_bare_placement_is_refused_with_remedy() -> None:
    refused = pytest.raises(TypeError, match=r"Shard\(dim=0\) is neither a list .* nor a dict")
    with lazygt.session(mesh=DATA, workers=lazygt.Workers(threads=1)), refused:
        lazygt.distribute(torch.ones(4), Shard(0))  # type: ignore[arg-type]
