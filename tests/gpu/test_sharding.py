"""Several GPU workers: NCCL where each has a GPU of its own, the host where they share one."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lazygt
from tests.models import zoo
from tests.sharding import training

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]

needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
needs_four = pytest.mark.skipif(GPUS < 4, reason="needs four CUDA devices")


def agree(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(3)
    model = zoo.MODELS[name][0]()  # on the CPU: a GPU draws other numbers
    with lazygt.session(mesh=mesh, device="cuda"):
        losses, state, _ = training.train(name, mesh, model=model.to("lazygt"))
    eager_losses, eager_state = training.eager(name)
    for got, expected in zip(losses + state, eager_losses + eager_state, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def reductions_agree() -> None:
    whole = torch.randn(7, 6, device="cpu")
    flags = whole > 0.5
    with lazygt.session(mesh={"data": 2}, device="cuda") as s:
        x = lazygt.distribute(whole.to("lazygt"), [Shard(0)])
        for name in ("sum", "mean", "amax", "amin", "prod", "logsumexp"):
            made = getattr(x, name)(0)
            torch.testing.assert_close(made.cpu(), getattr(whole, name)(0), msg=name)
        marked = lazygt.distribute(flags.to("lazygt"), [Shard(0)])
        assert torch.equal(marked.any(0).cpu(), flags.any(0))
        assert torch.equal(marked.all(0).cpu(), flags.all(0))
        moved = lazygt.redistribute(x, [Shard(1)])
        assert torch.equal(moved.cpu(), whole)
        assert torch.equal(lazygt.redistribute(moved, [Replicate()]).cpu(), whole)
        assert s.stats()["plans_built"] > 0


@needs_two
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize("mesh", [{"data": 2}, {"model": 2}], ids=str)
def test_training_on_two_gpus_agrees_with_the_cpu(name: str, mesh: dict[str, int]) -> None:
    if "model" in mesh and name == "cnn":
        pytest.skip("no table of cut weights for it")
    agree(name, mesh)


@needs_four
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_grid_of_four_gpus_agrees_with_the_cpu(name: str) -> None:
    agree(name, {"data": 2, "model": 2})


@needs_two
def test_nccl_collectives_match_reference() -> None:
    reductions_agree()


@pytest.mark.skipif(GPUS != 1, reason="needs exactly one CUDA device, for two workers to share")
def test_two_workers_on_one_gpu_meet_through_the_host() -> None:
    reductions_agree()
    agree("mlp", {"data": 2})
