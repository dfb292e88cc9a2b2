"""FSDP: which parameters make a unit, how they are stored, and what a step exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.parallel.fsdp import fsdp_units
from lazygt.record.tensor import storage_of
from lazygt.settings import grouped
from tests.sharding.counting import GPT, Block

WORDS, DIM = 20, 32
S0, S1, R = Shard(0), Shard(1), Replicate()


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2, "model": 2}) as s:
        yield s


def units(wrap: object) -> list[str]:
    with torch.device("meta"):
        return sorted(set(fsdp_units(GPT(WORDS, DIM, 3), wrap).values()))  # type: ignore[arg-type]


def test_units_are_blocks() -> None:
    assert units("auto") == units("block") == ["blocks.0", "blocks.1", "blocks.2", "rest"]
    assert units("one") == units("block2") == ["rest"]
    assert units(lambda name, module: name.endswith("attn")) == [
        "blocks.0.attn", "blocks.1.attn", "blocks.2.attn", "rest",
    ]  # fmt: skip


def test_without_blocks_units_are_children() -> None:
    with torch.device("meta"):
        mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        assert set(fsdp_units(mlp, "auto").values()) == {"0", "2"}
        with pytest.raises(ValueError, match="Sequential has no repeated blocks"):
            fsdp_units(mlp, "block")
        with pytest.raises(ValueError, match="wrap='blocks': expected 'auto', 'block', 'one'"):
            fsdp_units(mlp, "blocks")  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [-1, float("nan")])
def test_only_modules_with_a_cap_that_can_be_are_sharded(
    session: lazygt.Session, cap: float
) -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(TypeError, match=f"takes a module, not a {type(layer.weight).__name__};"):
        lazygt.fully_shard(layer.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"bucket_cap_mb={cap}.*: expected at least 0"):
        lazygt.fully_shard(layer, bucket_cap_mb=cap)
    assert all(not isinstance(p, Shard) for p in layer.weight.placements)


def test_gradients_that_are_read_before_the_update_are_kept_in_blocks(
    session: lazygt.Session,
) -> None:
    layer = nn.Linear(64, 32, bias=False)
    lazygt.fully_shard(layer)
    for _ in range(2):  # the second one is added to the first
        x = lazygt.distribute(torch.randn(8, 64), {"data": S0})
        loss = layer(x).square().sum()
        loss.backward()
        loss.item()
        assert session.last_plan is not None
        sent = {(one.kind, one.nbytes) for one in session.last_plan.collectives}
        assert sent == {
            ("all_gather", 64 * 32 * 4), ("reduce_scatter", 64 * 32 * 4), ("all_reduce", 4),
        }  # fmt: skip
        assert layer.weight.grad is not None
        assert layer.weight.grad.placements == (S0, R)


@pytest.mark.parametrize(
    ("cap", "collectives"),
    # two gathers of 8 weights of 1 MiB, the second without the first layer's, and one reduction
    [(1, (8 + 7, 8)), (2, (4 + 4, 4)), (4, (2 + 2, 2)), (200, (1 + 1, 1))],
)
@pytest.mark.parametrize("by", ["session", "call"])
def test_a_cap_that_is_asked_for_holds_for_gathers_and_for_reductions(
    by: str, cap: int, collectives: tuple[int, int]
) -> None:
    asked = {"bucket_cap_mb": cap}
    with lazygt.session(
        **grouped({"launcher": "dry", "mesh": {"data": 2}, **(asked if by == "session" else {})})
    ) as s:
        layers = [m for _ in range(8) for m in (nn.Linear(512, 512, bias=False), nn.ReLU())]
        model = nn.Sequential(*layers)
        lazygt.fully_shard(model, wrap="one", **(asked if by == "call" else {}))  # type: ignore[arg-type]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        s.flush()
        x = lazygt.distribute(torch.randn(8, 512), {"data": S0})
        model(x).square().mean().backward()
        opt.step()
        assert s.last_plan is not None
        kinds = [one.kind for one in s.last_plan.collectives]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == collectives


def test_small_parameters_stay_whole(session: lazygt.Session) -> None:
    module = nn.ParameterList([torch.tensor(1.0), torch.ones(1, 3), torch.ones(1), torch.ones(5)])
    lazygt.fully_shard(module)
    found = [parameter.placements[0] for parameter in module]
    assert found == [R, S1, R, S0]


def test_the_first_call_that_takes_a_parameter_counts(session: lazygt.Session) -> None:
    model = GPT(WORDS, DIM, 1)
    lazygt.fully_shard(model.blocks[0], bucket_cap_mb=1)
    lazygt.fully_shard(model, bucket_cap_mb=2)
    session.flush()
    found = {storage_of(p).remote.sharding.unit.cap_bytes >> 20 for p in model.blocks.parameters()}
    assert found == {1}
    assert storage_of(model.head.weight).remote.sharding.unit.cap_bytes >> 20 == 2


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 4}], ids=str)
def test_workers_exchange_counted_bytes(mesh: Mapping[str, int]) -> None:
    with lazygt.session(
        mesh=mesh, workers=lazygt.Workers(threads=1), planning=lazygt.Planning(keep_stages=True)
    ) as s:
        torch.manual_seed(3)
        model = lazygt.fully_shard(Block(DIM, 16))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        s.flush()
        for _ in range(3):
            x = lazygt.distribute(torch.ones(8, 6, DIM), {"data": S0})
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
        s.synchronize()
        assert s.last_plan is not None
        asked = communications(dict(s.stages(s.last_plan))["shard"])
        sent = s.last_plan.collectives
    for kind in ("all_gather", "reduce_scatter"):
        each, together = (sum(c.nbytes for c in found if c.kind == kind) for found in (asked, sent))
        assert each == together
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    counted: Counter[str] = Counter()
    for c in asked:
        counted[c.kind] += c.nbytes
    assert counted["reduce_scatter"] == nbytes
    assert len(sent) < len(asked)  # they travel together


# -- FSDP2's other arguments ---------------------------------------------------------------------


def lies(*layers: nn.Linear) -> list[object]:
    return [layer.weight.placements[0] for layer in layers]


def test_ignored_parameters_stay_as_they_are(session: lazygt.Session) -> None:
    kept, cut = nn.Linear(8, 4), nn.Linear(8, 4)
    lazygt.fully_shard(nn.Sequential(kept, cut), ignored_params=set(kept.parameters()))
    assert lies(kept, cut) == [R, S0]


def test_a_function_tells_where_parameters_are_cut(session: lazygt.Session) -> None:
    def told(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.dim() == 2 and parameter.shape[1] > 8 else None

    wide, narrow = nn.Linear(16, 4), nn.Linear(8, 4)
    lazygt.fully_shard(nn.Sequential(wide, narrow), shard_placement_fn=told)
    assert lies(wide, narrow) == [S1, S0]


@pytest.mark.parametrize("told", [Shard(2), Replicate(), "first", Shard(1)])
def test_a_parameter_is_not_cut_where_it_can_not_be(session: lazygt.Session, told: object) -> None:
    layer = nn.Linear(8, 4, bias=False)
    lazygt.parallelize_module(layer, "model", {"weight": {"model": S1}})
    with pytest.raises(ValueError, match="shard_placement_fn of parameter 'weight'"):
        lazygt.fully_shard(layer, shard_placement_fn=lambda parameter: told)
    assert layer.weight.placements == (R, S1)


@pytest.mark.parametrize(("asked", "again"), [(None, True), (2, True), (1, False), (False, False)])
def test_weights_are_kept_whole_or_in_blocks_of_all_ranks(
    session: lazygt.Session, asked: bool | int | None, again: bool
) -> None:
    layer = nn.Linear(8, 4)
    lazygt.fully_shard(layer, reshard_after_forward=asked)
    session.flush()
    assert storage_of(layer.weight).remote.sharding.unit.reshard_after_forward is again
    with pytest.raises(NotImplementedError, match="blocks of all 2 ranks of the axis"):
        lazygt.fully_shard(nn.Linear(8, 4), reshard_after_forward=3)


def test_the_axis_may_be_given_as_a_mesh(session: lazygt.Session) -> None:
    layers = [nn.Linear(8, 4) for _ in range(3)]
    lazygt.fully_shard(layers[0], mesh=session.mesh["model"])
    lazygt.fully_shard(layers[1], mesh=session.mesh)  # HSDP: the last one
    lazygt.fully_shard(layers[2], mesh=session.mesh["data"])
    assert [layer.weight.placements for layer in layers] == [(R, S0), (R, S0), (S0, R)]
    with pytest.raises(ValueError, match=r"session\.mesh\['model'\]"):
        lazygt.fully_shard(nn.Linear(8, 4), mesh="data")


def test_cpu_offload_is_accepted_on_cpu_workers_and_refused_on_gpus(
    session: lazygt.Session,
) -> None:
    layer = nn.Linear(8, 4)
    lazygt.fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert lies(layer) == [S0]
    with lazygt.session(launcher="dry", mesh={"data": 2}, device="cuda"):
        layer = nn.Linear(8, 4)
        lazygt.fully_shard(layer, offload_policy=OffloadPolicy())
        with pytest.raises(NotImplementedError, match="shard over more ranks"):
            lazygt.fully_shard(nn.Linear(8, 4), offload_policy=CPUOffloadPolicy())
