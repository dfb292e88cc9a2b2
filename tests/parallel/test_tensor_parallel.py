"""Tables for whole modules: what they name, what they refuse, and what they compute and send on
real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from tests.parallel.megatron import megatron
from tests.sharding.counting import GPT

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


# -- what is stored -----------------------------------------------------------------------------


def test_parameter_keeps_placement_on_other_axes(session: lazygt.Session) -> None:
    layer = nn.Linear(8, 4)
    lazygt.parallelize_module(layer, None, {"": lazygt.ColwiseParallel()})
    lazygt.fully_shard(layer)
    assert layer.weight.placements == (S1, S0)
    assert layer.bias.placements == (R, S0)
    lazygt.parallelize_module(layer, None, {"weight": {"model": R}})
    assert layer.weight.placements == (S1, R)
    lazygt.data_parallel(layer)
    assert layer.weight.placements == (R, R)


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
def test_invalid_calls_are_refused(
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


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_one_device_does(layout: str, tied: bool) -> None:
    mesh, lay = LAYOUTS[layout]

    def place(t: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis in mesh if axis != "model"]
        return lazygt.distribute(t.to("lazygt"), dict.fromkeys(axes, S0))

    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)):
        found = train(lambda: lay(gpt(tied)), place)
    expected = train(lambda: gpt(tied), lambda t: t)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
