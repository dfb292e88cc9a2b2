"""Tables for whole modules: what they name, what they refuse, and what they compute and send on
real workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.parallel.fsdp import fsdp_units
from tests.sharding.counting import GPT, Block

WORDS, DIM, STEPS = 20, 32, 3
S0, S1, R = Shard(0), Shard(1), Replicate()


def gpt(tied: bool = False) -> nn.Module:
    """In float64: a key's bias has no gradient but for rounding, which AdamW would make much of."""
    torch.manual_seed(3)
    return GPT(WORDS, DIM, 3, tied).double()


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2, "model": 2}) as s:
        yield s


# -- units --------------------------------------------------------------------------------------


def units(wrap: object) -> list[str]:
    with torch.device("meta"):
        return sorted(set(fsdp_units(GPT(WORDS, DIM, 3), wrap).values()))  # type: ignore[arg-type]


def test_units_are_blocks() -> None:
    assert units("auto") == units("block") == ["blocks.0", "blocks.1", "blocks.2", "rest"]
    assert units("block2") == ["blocks.0", "blocks.2", "rest"]
    assert units(lambda name, module: name.endswith("attn")) == [
        "blocks.0.attn", "blocks.1.attn", "blocks.2.attn", "rest",
    ]  # fmt: skip


def test_without_blocks_units_are_children() -> None:
    with torch.device("meta"):
        mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        assert set(fsdp_units(mlp, "auto").values()) == {"0", "2"}
        with pytest.raises(ValueError, match="Sequential has no repeated blocks"):
            fsdp_units(mlp, "block")
        with pytest.raises(ValueError, match="wrap='blocks': expected 'auto', 'block', 'block2'"):
            fsdp_units(mlp, "blocks")  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [-1, float("nan")])
def test_only_modules_with_a_cap_that_can_be_are_sharded(
    session: lazygt.Session, cap: float
) -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(TypeError, match="takes a module, not a LazyTensor"):
        lazygt.fully_shard(layer.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"bucket_cap_mb={cap}.*: expected at least 0"):
        lazygt.fully_shard(layer, bucket_cap_mb=cap)
    assert all(not isinstance(p, Shard) for p in layer.weight.placements)


# -- what is stored -----------------------------------------------------------------------------


def test_a_parameter_keeps_what_it_has_on_other_axes(session: lazygt.Session) -> None:
    layer = nn.Linear(8, 4)
    lazygt.parallelize_module(layer, None, {"": lazygt.ColwiseParallel()})
    lazygt.fully_shard(layer)
    assert layer.weight.placements == (S1, S0)
    assert layer.bias.placements == (R, S0)
    lazygt.parallelize_module(layer, None, {"weight": {"model": R}})
    assert layer.weight.placements == (S1, R)
    lazygt.data_parallel(layer)
    assert layer.weight.placements == (R, R)


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
    found = {p._storage.remote.sharding.unit.cap_bytes >> 20 for p in model.blocks.parameters()}
    assert found == {1}
    assert model.head.weight._storage.remote.sharding.unit.cap_bytes >> 20 == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: lazygt.parallelize_module(m, None, {"1": lazygt.RowwiseParallel()}),
            "no module fits '1'",
        ),
        (
            lambda m: lazygt.parallelize_module(m, None, {"*.weight": [R, R], "0.weight": [S0, R]}),
            "'0.weight' counts for no parameter: for '0.weight' a pattern before it does",
        ),
        (
            lambda m: lazygt.parallelize_module(m, "x", {"0": lazygt.RowwiseParallel()}),
            "has no axis 'x'",
        ),
        (lambda m: lazygt.fully_shard(m, "x"), "has no axis 'x'"),
        (lambda m: lazygt.data_parallel(m, "x"), "has no axis 'x'"),
        (lambda m: lazygt.fully_shard(m.cpu()), "'0.weight' is no lazygt tensor of its own"),
    ],
)
def test_what_cannot_be_is_refused(
    session: lazygt.Session, call: Callable[[nn.Module], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(nn.Sequential(nn.Linear(3, 3)))


def test_a_layout_that_an_input_cannot_have_is_refused(session: lazygt.Session) -> None:
    layer = nn.Linear(4, 4)
    lazygt.parallelize_module(layer, None, {"": lazygt.ColwiseParallel(input_layouts=Shard(3))})
    with pytest.raises(ValueError, match="has no dim 3"):
        layer(torch.ones(2, 4))


# -- on workers ---------------------------------------------------------------------------------


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(WORDS, (STEPS, 2, 8, 6), generator=generator)
    return [(x, y) for x, y in draw]


def train(
    make: Callable[[], nn.Module], place: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Losses, and all weights at the end."""
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(place(x)).flatten(0, 1), place(y).flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.state_dict().values())]


def megatron(model: nn.Module) -> nn.Module:
    column, row = lazygt.ColwiseParallel(), lazygt.RowwiseParallel()
    return lazygt.parallelize_module(model, None, {
        "tokens": lazygt.VocabParallel(), "head": column,
        "blocks.*.attn.qkv": column, "blocks.*.attn.out": row,
        "blocks.*.mlp.0": column, "blocks.*.mlp.2": row,
    })  # fmt: skip


def sequence(model: nn.Module) -> nn.Module:
    column = lazygt.ColwiseParallel(input_layouts=S1)
    row = lazygt.RowwiseParallel(output_layouts=S1)
    return lazygt.parallelize_module(model, None, {
        "tokens": lazygt.VocabParallel(output_layouts=S1), "head": column,
        "norm": lazygt.SequenceParallel(), "blocks.*.norm*": lazygt.SequenceParallel(),
        "blocks.*.attn.qkv": column, "blocks.*.attn.out": row,
        "blocks.*.mlp.0": column, "blocks.*.mlp.2": row,
    })  # fmt: skip


LAYOUTS: dict[str, tuple[dict[str, int], Callable[[nn.Module], nn.Module]]] = {
    "data": ({"data": 2}, lazygt.data_parallel),
    "fsdp": ({"data": 2}, lazygt.fully_shard),
    "fsdp uneven": ({"data": 3}, lazygt.fully_shard),
    "hsdp": ({"data": 2, "shard": 2}, lambda m: lazygt.fully_shard(m, "shard", wrap="block2")),
    "megatron": ({"model": 2}, megatron),
    "sequence": ({"model": 2}, sequence),
    "megatron and data": ({"data": 2, "model": 2}, lambda m: lazygt.data_parallel(megatron(m))),
    "sequence and fsdp": ({"data": 2, "model": 2}, lambda m: lazygt.fully_shard(sequence(m))),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_one_device_does(layout: str, tied: bool) -> None:
    mesh, lay = LAYOUTS[layout]

    def place(t: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis in mesh if axis != "model"]
        return lazygt.distribute(t.to("lazygt"), dict.fromkeys(axes, S0))

    with lazygt.session(mesh=mesh, threads=1):
        found = train(lambda: lay(gpt(tied)), place)
    expected = train(lambda: gpt(tied), lambda t: t)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 4}], ids=str)
def test_workers_exchange_what_was_counted(mesh: Mapping[str, int]) -> None:
    with lazygt.session(mesh=mesh, threads=1, keep_stages=True) as s:
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
