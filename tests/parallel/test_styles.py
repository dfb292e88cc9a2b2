"""Which pattern of a plan counts for a parameter, and what a style lays whenever its module is
called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from tests.sharding.counting import GPT

WORDS, DIM = 20, 32
S0, S1, R = Shard(0), Shard(1), Replicate()


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2, "model": 2}) as s:
        yield s


def test_parameter_placement_overrides_style_not_naming_it(
    session: lazygt.Session,
) -> None:
    norm = nn.LayerNorm(8)
    plan = {"": lazygt.SequenceParallel(), "weight": {"model": S0}}
    lazygt.parallelize_module(norm, None, plan)
    assert norm.weight.placements == (R, S0)
    assert norm.bias.placements == (R, R)


def test_the_first_pattern_that_names_a_parameter_counts(session: lazygt.Session) -> None:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    lazygt.parallelize_module(first, None, {"weight": [S0, R], "": lazygt.ColwiseParallel()})
    assert (first.weight.placements, first.bias.placements) == ((S0, R), (R, S0))
    second.gain = nn.Parameter(torch.ones(4))
    lazygt.parallelize_module(second, None, {"": lazygt.ColwiseParallel(), "*": [S0, R]})
    assert (second.weight.placements, second.bias.placements) == ((R, S0), (R, S0))
    assert second.gain.placements == (S0, R)


def test_placements_for_names_of_tied_parameter_are_merged(session: lazygt.Session) -> None:
    model = GPT(WORDS, DIM, 0, tied=True)
    column = lazygt.ColwiseParallel()
    lazygt.parallelize_module(model, None, {"head": column, "tokens.weight": {"data": S1}})
    assert model.tokens.weight.placements == (S1, S0)
    refused = (
        r"'tokens.weight' and 'head.weight' are one tensor, but on axis 'model' of the mesh "
        r"data=2,model=2 the plan says Replicate\(\) of the first and Shard\(dim=0\) of the second"
    )
    with pytest.raises(ValueError, match=refused):
        lazygt.parallelize_module(model, None, {"head": column, "tokens.weight": [R, R]})
    assert model.tokens.weight.placements == (S1, S0)


def test_a_pattern_with_a_slip_gets_the_nearest_names(session: lazygt.Session) -> None:
    model = GPT(WORDS, DIM, 3)
    with pytest.raises(
        ValueError, match=r"no parameter fits .*: blocks\.\d\.attn\.qkv\."
    ) as caught:
        lazygt.parallelize_module(model, None, {"blocks.*.atn.qkv.weight": {"model": S0}})
    assert str(caught.value).count("blocks.") < sum(1 for _ in model.parameters()) / 2
    with pytest.raises(ValueError, match=r"no module fits 'blocks.*.mpl.0', .*: blocks.2.mlp.0,"):
        lazygt.parallelize_module(model, None, {"blocks.*.mpl.0": lazygt.ColwiseParallel()})


class Pair(NamedTuple):
    """What a module may return."""

    name: str
    hidden: torch.Tensor


class Named(nn.Module):
    """Takes its input by name, and notes how that lies."""

    def forward(self, scale: float, hidden: torch.Tensor) -> Pair:
        self.seen = hidden.placements
        return Pair("tanh", hidden.tanh() * scale)


def test_keyword_arguments_are_laid_out_and_return_type_is_kept(
    session: lazygt.Session,
) -> None:
    module = Named()
    lazygt.parallelize_module(
        module,
        "model",
        lazygt.PrepareModuleInputOutput(
            input_layouts=(None, S1),
            desired_input_layouts=(None, S1),
            output_layouts=(None, R),
            desired_output_layouts=(None, S0),
        ),
    )
    for made in (module(scale=2.0, hidden=torch.ones(4, 4)), module(2.0, torch.ones(4, 4))):
        assert module.seen == (R, S1)
        assert made.name == "tanh"
        assert made.hidden.placements == (R, S0)
