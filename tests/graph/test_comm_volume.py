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


SIZES: dict[str, int] = {"layers": 3, "hidden": 8, "batch": 4, "sequence": 16}
#: B x S x H
TOKENS = 4 * 16 * 8


def test_a_ring_passes_keys_on() -> None:
    """All keys and values go by, twice; their gradients go home. Gradients of weights are reduced
    by all ranks that have the same weights."""
    step = TransformerStep(1_000, 4, 2, data=2, context=4, **SIZES)
    data, *ring = step.volumes()
    assert (data.ranks, data.ring) == (8, 2 * 4_000 * 7 // 8)
    assert [each.kind for each in ring] == ["send_recv"] * 3
    assert {each.times * each.elements for each in ring} == {3 * 2 * TOKENS}
    assert total(tuple(ring), "ring") == 3 * 3 * 2 * TOKENS * 2 * 3 // 4
    assert total(tuple(ring), "limit") == total(tuple(ring), "logical")


def test_ulysses_exchanges_heads() -> None:
    """Four tensors of B S H a layer each way, each rank a quarter of them."""
    step = TransformerStep(1_000, 4, 2, context=4, attention="ulysses", **SIZES)
    exchanged = step.volumes()[1:]
    assert {each.kind for each in exchanged} == {"all_to_all"}
    assert sum(each.times * each.elements for each in exchanged) == 3 * 8 * TOKENS
    assert total(exchanged, "ring") == 3 * 8 * (TOKENS // 4) * 2 * 3 // 4


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_fewer_keys_are_fewer_bytes(attention: str) -> None:
    whole, shared = (
        TransformerStep(1, 2, 2, context=4, attention=attention, kv_hidden=hidden, **SIZES)
        for hidden in (0, 2)
    )
    keys = [
        tuple(each for each in step.volumes() if "keys" in each.what or "their" in each.what)
        for step in (whole, shared)
    ]
    assert total(keys[0], "ring") == 4 * total(keys[1], "ring") > 0


def test_context_parallelism_divides_ring_volume_per_rank() -> None:
    plain = TransformerStep(1, 2, 2, tensor=2, pipeline=3, **SIZES).volumes()
    cut = TransformerStep(1, 2, 2, tensor=2, pipeline=3, context=4, **SIZES).volumes()
    for kind in ("tensor", "pipeline"):
        of_plain, of_cut = (
            tuple(each for each in volumes if each.parallelism == kind) for volumes in (plain, cut)
        )
        assert total(of_plain, "logical") == total(of_cut, "logical")
        assert total(of_plain, "ring") == 4 * total(of_cut, "ring")


@pytest.mark.parametrize(
    ("zero", "reshard", "times"),
    [(0, True, [1]), (1, True, [1, 1]), (2, True, [5, 1]), (3, False, [5, 5]), (3, True, [5] * 3)],
)
def test_microbatches(zero: int, reshard: bool, times: list[int]) -> None:
    """Gradients are reduced once, unless what adds them up is in blocks; the rest is of each."""
    parts = {"data": 8, "tensor": 2, "pipeline": 3, "context": 2, "expert": 4}
    step, one = (
        TransformerStep(1_000, 4, 2, zero=zero, reshard=reshard, microbatches=count, **parts,
                        **SIZES).volumes()
        for count in (5, 1)
    )  # fmt: skip
    data = [each for each in step if each.parallelism == "data"]
    assert [each.times for each in data] == times
    for many, single in zip(step, one, strict=True):
        share = many.times // single.times
        assert (many.logical, many.limit) == (share * single.logical, share * single.limit)
        assert many.ring == pytest.approx(share * single.ring, abs=share)
        assert share == 5 or many.parallelism == "data"


def test_a_rank_has_the_layers_of_its_stage() -> None:
    sizes = {"layers": 8, "hidden": 8, "batch": 4, "sequence": 16}
    whole = TransformerStep(1_000, 2, 2, tensor=2, **sizes).volumes()
    staged = TransformerStep(1_000, 2, 2, tensor=2, pipeline=4, **sizes).volumes()
    of_tensor = tuple(each for each in staged if each.parallelism == "tensor")
    assert total(of_tensor, "logical") == total(whole, "logical")
    assert total(of_tensor, "ring") * 4 == total(whole, "ring")


# -- what lazygt plans -------------------------------------------------------------------------


WIDTH, DEPTH = 128, 3


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


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("place", "stage"), [(data_parallel, 0), (zero, 1), (fsdp, 3)])
def test_a_planned_step_exchanges_as_much(
    place: Callable[[nn.Module], torch.optim.Optimizer], stage: int, microbatches: int
) -> None:
    """With a gradient of the input, too: else no weights are gathered for the first layer's.

    Gradients as small as these would be added up whole, were the cap not smaller.
    """
    mesh = {"data": 4}
    with lazygt.session(
        launcher="dry", mesh=mesh, compile="off", planning=lazygt.Planning(bucket_cap_mb=0.001)
    ) as s:
        net = model()
        optimizer = place(net)
        s.flush()
        xs = [lazygt.distribute(torch.randn(4096, WIDTH), {"data": lazygt.Shard(0)})
              for _ in range(microbatches)]  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            for x in xs:
                (net(x.requires_grad_()) * x).sum().backward()
            optimizer.step()
        assert s.last_plan is not None
        collectives = s.last_plan.collectives
    planned = Counter[str]()
    for each in collectives:
        planned[each.kind] += each.ring_bytes
    step = TransformerStep(
        DEPTH * WIDTH * WIDTH, 4, 4, data=4, zero=stage, microbatches=microbatches
    )
    expected = Counter[str]()
    for each in step.volumes():
        expected[each.kind] += each.ring
    assert planned == expected


def test_axes_are_named_for_a_kind() -> None:
    mesh = Mesh.parse("data=2,TP=2,stage=2,context=2,ep=2,rows=2")
    kinds = [parallelism_of(name) for name in mesh.names]
    assert kinds == ["data", "tensor", "pipeline", "context", "expert", ""]
