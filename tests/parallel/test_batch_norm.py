"""Batch norm on blocks of samples: one all-reduce a forward for the statistics of all, or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.placement import Shard as Cut
from lazygt.graph.text import parse_graph
from tests.sharding.world import run_sharded

CHANNELS, SAMPLES = 8, 24


def network() -> nn.Sequential:
    convolution = nn.Conv2d(3, CHANNELS, 3, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU())


def sent(
    ranks: int, lay: Callable[[nn.Module], object], backward: bool = False
) -> list[tuple[str, int]]:
    """The collectives of a training forward, or of what comes after it too."""
    with lazygt.session(
        launcher="dry", mesh={"data": ranks}, planning=lazygt.Planning(keep_stages=True)
    ) as s:
        model = network()
        lay(model)
        x = lazygt.distribute(torch.randn(SAMPLES, 3, 16, 16), {"data": Shard(0)})
        s.flush()
        y = model(x)
        if backward:
            y.square().mean().backward()
        s.flush()
        assert y.dim() == 4
        assert s.last_plan is not None
        graph = dict(s.stages(s.last_plan))["shard"]
    return [(one.kind, one.nbytes) for one in communications(graph)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_forward_is_one_all_reduce_and_gathers_nothing(ranks: int) -> None:
    assert sent(ranks, lazygt.data_parallel) == [("all_reduce", 2 * 8 * CHANNELS)]


def test_a_backward_adds_up_two_sums_and_the_gradients() -> None:
    kinds = sent(4, lazygt.data_parallel, backward=True)
    # of batch norm the sums, which its own gradients are as well; of the convolution two gradients
    assert {kind for kind, _ in kinds} == {"all_reduce"}
    assert len(kinds) == 1 + 2 + 2


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("ranks", "samples"), [(2, 6), (4, 6), (4, 3)])
def test_nothing_of_the_variance_is_lost_beside_a_large_mean(
    dtype: str, ranks: int, samples: int
) -> None:
    graph = parse_graph(f"""graph {{
      %0: {dtype}[{samples}, 5, 7] = input
      %1: {dtype}[1, 5, 1], %2: {dtype}[1, 5, 1] = aten.var_mean.correction(%0, [0, 2], correction=0, keepdim=True)
      return %1, %2
    }}""")  # noqa: E501
    value = torch.randn(samples, 5, 7) + torch.tensor([0, 1, 10, 1e2, -1e2]).view(1, 5, 1)
    value = value.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    made = run_sharded(graph, Mesh.parse(f"data={ranks}"), [Sharding((Cut(0),))], [value], [])
    exact = torch.var_mean(value.double(), [0, 2], correction=0, keepdim=True)
    for got, want in zip(made, exact, strict=True):
        # squares added up in float32 would be off by 6e-4
        rtol = 1e-5 if dtype == "f32" else 1.6e-2
        torch.testing.assert_close(got, want.to(value.dtype), rtol=rtol, atol=1e-6)


# -- the statistics of each block ----------------------------------------------------------------


class Trained(NamedTuple):
    losses: list[float]
    state: dict[str, Tensor]


def train(
    model: nn.Module, take: Callable[[Tensor], Tensor], run: Callable[..., Tensor]
) -> Trained:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(step), device="cpu")
        loss = run(model, take(x)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return Trained(losses, {name: t.detach().cpu() for name, t in model.state_dict().items()})


def as_ddp(model: nn.Module, x: Tensor) -> Tensor:
    """What two ranks of DDP compute: each its half, and rank 0's running statistics stay."""
    convolution, norm, relu = model
    first, second = x.chunk(2)
    y = relu(norm(convolution(first)))
    z = relu(F.batch_norm(convolution(second), None, None, norm.weight, norm.bias, True))
    return torch.cat([y, z])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_local_statistics_are_those_of_ddp(momentum: float | None) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = network()
        model[1].momentum = momentum
        return model

    expected = train(made(), lambda x: x, as_ddp)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        model = lazygt.data_parallel(made())
        lazygt.local_batch_norm(model)
        model = copy.deepcopy(model)  # copies are local too, with statistics of their own
        computed = train(
            model,
            lambda x: lazygt.distribute(x.to("lazygt"), {"data": Shard(0)}),
            lambda model, x: model(x),
        )
        model.eval()
        assert model(torch.zeros(3, 3, 6, 6)).shape == (3, CHANNELS, 6, 6)
    torch.testing.assert_close(computed, expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_local_statistics_wait_for_nobody(ranks: int) -> None:
    def lay(model: nn.Module) -> None:
        lazygt.local_batch_norm(lazygt.data_parallel(model))

    # what rank 0 keeps of them goes to all, as DDP broadcasts its buffers
    assert sent(ranks, lay) == [("all_reduce", 4 * CHANNELS)] * 2


def test_a_batch_that_cannot_be_shared_evenly_is_refused() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 4}):
        model = lazygt.local_batch_norm(network())
        refused = r"a batch of \[6, 8, 5, 5\] can't be shared evenly by the 4 ranks of axis 'data'"
        with pytest.raises(ValueError, match=refused):
            model(torch.zeros(6, 3, 5, 5))
        with pytest.raises(ValueError, match="Linear has no batch norm"):
            lazygt.local_batch_norm(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="has no axis 'model'"):
            lazygt.local_batch_norm(model, "model")
