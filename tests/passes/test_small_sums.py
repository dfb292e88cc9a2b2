"""Many small sums of one step: the norms of gradients, metrics that are read together. How often
ranks meet for them, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from tests.parallel.megatron import megatron
from tests.sharding.counting import GPT

pytestmark = pytest.mark.timeout(120)

WORDS, DIM, STEPS = 64, 32, 3
#: one a parameter
NORMS = 28
S0 = Shard(0)

Lay = Callable[[nn.Module], nn.Module]
LAYOUTS: dict[str, tuple[dict[str, int], Lay]] = {
    "fsdp": ({"data": 2}, lazygt.fully_shard),
    "fsdp of three": ({"data": 3}, lazygt.fully_shard),
    "megatron": ({"model": 2}, megatron),
    "megatron and fsdp": ({"data": 2, "model": 2}, lambda m: lazygt.fully_shard(megatron(m))),
}


def clip(model: nn.Module, foreach: bool) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)


#: The line from which the norm's collectives come.
CLIP = f"{__file__}:{clip.__code__.co_firstlineno + 1}"


def train(
    make: Lay, place: Callable[[torch.Tensor], torch.Tensor], foreach: bool, microbatches: int = 1
) -> list[torch.Tensor]:
    """The norm of each step, and all weights at the end.

    Args:
        make: lays a model out.
        place: a batch.
        microbatches: how many gradients are added up for a step.
    """
    torch.manual_seed(3)
    model = make(GPT(WORDS, DIM, 2).double())
    assert len(list(model.parameters())) == NORMS
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(STEPS):
        for _ in range(microbatches):
            x, y = torch.randint(WORDS, (2, 8, 6), generator=generator, device="cpu")
            F.cross_entropy(model(place(x)).flatten(0, 1), place(y).flatten()).backward()
        norms.append(clip(model, foreach))
        opt.step()
        opt.zero_grad()
    return [t.detach().cpu() for t in (*norms, *model.state_dict().values())]


def placed(mesh: Mapping[str, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a batch is placed: cut along ``data``."""
    cut = {"data": S0} if "data" in mesh else {}
    return lambda batch: lazygt.distribute(batch.to("lazygt"), cut)


def met_for_norms(s: lazygt.Session) -> list[tuple[str, str]]:
    """Kind and axis of the collectives of the clip, in the plan of a step, but for those of
    gradients that it is the first to need: they are larger than a number a parameter."""
    step = max(s.plans(), key=lambda plan: len(plan.collectives))
    return sorted(
        (one.kind, one.mesh_dim)
        for one in step.collectives
        if one.source == CLIP and one.nbytes <= NORMS * 8
    )


def meetings(layout: str, mesh: Mapping[str, int]) -> list[tuple[str, str]]:
    """Once an axis. Biases that are cut for ``model`` are not cut again for ``data``: they are
    reduced there, together with norms of others, and their own norms come after that."""
    later = ["model"] if layout == "megatron and fsdp" else []
    return [("all_reduce", axis) for axis in [*mesh, *later]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_meet_once_an_axis_for_the_norm_of_all_gradients(layout: str, foreach: bool) -> None:
    mesh, lay = LAYOUTS[layout]
    with lazygt.session(launcher="dry", mesh=mesh, compile="off") as s:
        train(lay, placed(mesh), foreach)
        assert met_for_norms(s) == meetings(layout, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("layout", ["fsdp of three", "megatron and fsdp"])
def test_norms_are_those_of_one_device(layout: str, foreach: bool) -> None:
    mesh, lay = LAYOUTS[layout]
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)) as s:
        found = train(lay, placed(mesh), foreach)
        assert met_for_norms(s) == meetings(layout, mesh)
    expected = train(lambda m: m, lambda t: t, foreach)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp of three", "megatron and fsdp"])
def test_sums_of_several_microbatches_are_those_of_one_device(layout: str) -> None:
    mesh, lay = LAYOUTS[layout]
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        found = train(lay, placed(mesh), True, microbatches=3)
    expected = train(lambda m: m, lambda t: t, True, microbatches=3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


METRICS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "mean": (torch.mean, 4),
    "root of a mean": (lambda t: t.square().mean().sqrt(), 4),
    "norm": (torch.linalg.vector_norm, 4),
    "norm of columns' means": (lambda t: t.mean(0).norm(), 512 * 4),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_are_read_together_are_one_all_reduce(name: str) -> None:
    metric, nbytes = METRICS[name]
    with lazygt.session(launcher="dry", mesh={"data": 2}) as s:
        x = lazygt.distribute(torch.randn(64, 512), {"data": S0})
        s.flush()
        metrics = [metric(x * scale) for scale in range(1, 11)]
        for each in metrics:
            each.item()
        assert s.last_plan is not None
        found = [(one.kind, one.nbytes) for one in s.last_plan.collectives]
        assert found == [("all_reduce", 10 * nbytes)]
