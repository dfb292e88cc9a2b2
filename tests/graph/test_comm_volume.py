"""What a training step exchanges by formula: the worked cases, and what lazygt plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazygt
from lazygt.graph.comm_volume import TransformerStep, Volume, parallelism_of
from lazygt.graph.mesh import Mesh


def total(volumes: tuple[Volume, ...], what: str) -> int:
    return sum(getattr(each, what) for each in volumes)


# -- worked cases: elements, and bytes of a dtype ----------------------------------------------


@pytest.mark.parametrize(
    ("params", "itemsize", "logical", "limit"),
    [(7e9, 4, 28e9, 56e9), (13e9, 4, 52e9, 104e9), (7e9, 2, 14e9, 28e9)],
)
def test_data_parallel(params: float, itemsize: int, logical: float, limit: float) -> None:
    volumes = TransformerStep(int(params), itemsize, 2, data=64).volumes()
    assert total(volumes, "logical") == logical
    assert total(volumes, "limit") == limit
    assert total(volumes, "ring") == limit * 63 // 64


def test_tensor_parallel() -> None:
    """4 x 16 x 2048 x 4096 x 32 are 17.2e9 elements, and in bf16 34.4 GB; a ring doubles both."""
    step = TransformerStep(
        7_000_000_000, 2, 2, tensor=8, layers=32, hidden=4096, batch=16, sequence=2048
    )
    volumes = step.volumes()
    assert [each.times for each in volumes] == [64, 64]
    assert sum(each.times * each.elements for each in volumes) == 17_179_869_184
    assert total(volumes, "logical") == 34_359_738_368
    assert total(volumes, "limit") == 68_719_476_736
    assert total(volumes, "ring") == 68_719_476_736 * 7 // 8


def test_a_model_of_13_billion() -> None:
    """8 B S D = 5.37e9 elements a layer and 214.7e9 for 40 layers: 429 GB in bf16."""
    step = TransformerStep(
        13_000_000_000, 4, 2, data=64, tensor=8, layers=40, hidden=5120, batch=32, sequence=4096
    )
    data, *tensor = step.volumes()
    assert data.limit == 104_000_000_000
    assert data.ring == 104_000_000_000 // 8 * 63 // 64  # of an eighth of the parameters
    assert sum(2 * each.times * each.elements for each in tensor) == 214_748_364_800
    assert 2 * 4 * tensor[0].elements == 5_368_709_120
    assert total(tuple(tensor), "limit") == 429_496_729_600


def test_pipeline_parallel() -> None:
    """134e6 elements a boundary, 402e6 over three, each way; nothing is doubled."""
    step = TransformerStep(
        7_000_000_000, 2, 2, pipeline=4, layers=32, hidden=4096, batch=16, sequence=2048
    )
    there, back = step.volumes()
    assert there.elements == back.elements == 134_217_728
    assert there.times * there.elements == 402_653_184
    assert there.logical == there.limit == 805_306_368
    assert there.ring == 268_435_456


@pytest.mark.parametrize(
    ("zero", "reshard", "kinds", "factor"),
    [
        (0, True, ["all_reduce"], 2),
        (1, True, ["reduce_scatter", "all_gather"], 2),
        (2, True, ["reduce_scatter", "all_gather"], 2),
        (3, False, ["all_gather", "reduce_scatter"], 2),
        (3, True, ["all_gather", "all_gather", "reduce_scatter"], 3),
    ],
)
def test_zero(zero: int, reshard: bool, kinds: list[str], factor: int) -> None:
    """Each costs what an all-reduce does, but for the second gather."""
    volumes = TransformerStep(1_000, 4, 4, data=8, zero=zero, reshard=reshard).volumes()
    assert [each.kind for each in volumes] == kinds
    assert total(volumes, "ring") == factor * 4_000 * 7 // 8
    assert total(volumes, "limit") == factor * 4_000
    assert total(volumes, "logical") == len(kinds) * 4_000


def test_sequence_parallel_sends_as_much() -> None:
    sizes = {"layers": 2, "hidden": 8, "batch": 4, "sequence": 16}
    plain, cut = (
        TransformerStep(1, 2, 2, tensor=4, sequence_parallel=parallel, **sizes).volumes()
        for parallel in (False, True)
    )
    assert [each.kind for each in cut] == ["reduce_scatter", "all_gather"] * 2
    assert total(plain, "ring") == total(cut, "ring")


def test_expert_parallel() -> None:
    """There and back, forward and backward, each token to two experts."""
    sizes = {"layers": 3, "hidden": 8, "batch": 4, "sequence": 16, "experts_per_token": 2}
    there, back = TransformerStep(1, 2, 2, expert=4, **sizes).volumes()
    assert (there.kind, there.times, there.elements) == ("all_to_all", 6, 2 * 4 * 16 * 8)
    assert there == back._replace(what=there.what)
    assert there.ring == 6 * 2 * 2 * 4 * 16 * 8 * 3 // 4


def test_a_rank_has_the_layers_of_its_stage() -> None:
    sizes = {"layers": 8, "hidden": 8, "batch": 4, "sequence": 16}
    whole = TransformerStep(1_000, 2, 2, tensor=2, **sizes).volumes()
    staged = TransformerStep(1_000, 2, 2, tensor=2, pipeline=4, **sizes).volumes()
    of_tensor = tuple(each for each in staged if each.parallelism == "tensor")
    assert total(of_tensor, "logical") == total(whole, "logical")
    assert total(of_tensor, "ring") * 4 == total(whole, "ring")


# -- what lazygt plans -------------------------------------------------------------------------


WIDTH, DEPTH = 64, 3


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def data_parallel(net: nn.Module) -> torch.optim.Optimizer:
    lazygt.data_parallel(net)
    return torch.optim.SGD(net.parameters(), lr=0.1)


def zero(net: nn.Module) -> torch.optim.Optimizer:
    lazygt.data_parallel(net)
    return lazygt.shard_optimizer_state(torch.optim.AdamW(net.parameters()))


def fsdp(net: nn.Module) -> torch.optim.Optimizer:
    lazygt.fully_shard(net)
    return torch.optim.AdamW(net.parameters())


@pytest.mark.parametrize(("place", "stage"), [(data_parallel, 0), (zero, 1), (fsdp, 3)])
def test_a_planned_step_exchanges_as_much(
    place: Callable[[nn.Module], torch.optim.Optimizer], stage: int
) -> None:
    """With a gradient of the input, too: else no weights are gathered for the first layer's."""
    mesh = {"data": 4}
    with lazygt.session(launcher="dry", mesh=mesh, compile="off") as s:
        net = model()
        optimizer = place(net)
        s.flush()
        x = lazygt.distribute(torch.randn(4096, WIDTH), {"data": lazygt.Shard(0)})
        for _ in range(2):
            optimizer.zero_grad()
            (net(x.requires_grad_()) * x).sum().backward()
            optimizer.step()
        assert s.last_plan is not None
        collectives = s.last_plan.collectives
    planned = Counter[str]()
    for each in collectives:
        planned[each.kind] += each.ring_bytes
    step = TransformerStep(DEPTH * WIDTH * WIDTH, 4, 4, data=4, zero=stage)
    expected = Counter[str]()
    for each in step.volumes():
        expected[each.kind] += each.ring
    assert planned == expected


def test_axes_are_named_for_a_kind() -> None:
    mesh = Mesh.parse("data=2,TP=2,stage=2,context=2,ep=2,rows=2")
    kinds = [parallelism_of(name) for name in mesh.names]
    assert kinds == ["data", "tensor", "pipeline", "context", "expert", ""]
