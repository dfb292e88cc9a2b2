"""Layers that share an input: it is gathered once, and the sum of its gradients is reduced once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from tests.parallel.llama import Llama, first_table
from tests.sharding.counting import Counts, all_gather, all_reduce, planned, reduce_scatter

WORDS, WIDE, LONG, ROWS, DEPTH = 1024, 256, 64, 4, 2
ROW = LONG * WIDE * 4
ACTIVATION = ROWS * ROW


def sent(lay: Callable[[Llama], object], rows: int = ROWS) -> Counts:
    """The collectives of a step that carry activations, or more."""

    def loss(model: nn.Module) -> torch.Tensor:
        x, y = torch.zeros(2, rows, LONG, dtype=torch.long)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def make() -> Llama:
        model = Llama(WORDS, WIDE, 8, 4, 512, depth=DEPTH, length=LONG)
        lay(model)
        return model

    counted, _ = planned({"tp": 2}, make, loss)
    return Counts({meet: n for meet, n in counted.items() if meet.nbytes >= rows * ROW})


def column_and_row(model: Llama) -> None:
    lazygt.parallelize_module(model, "tp", first_table())


def sequence_by_layers(model: Llama) -> None:
    """Sequence parallelism that only the linear layers name, each for itself."""
    column = lazygt.ColwiseParallel(input_layouts=Shard(1))
    row = lazygt.RowwiseParallel(output_layouts=Shard(1))
    plan = {
        pattern: column if type(style).__name__ == "ColwiseParallel" else row
        for pattern, style in first_table().items()
    }
    ends = {
        "tok_embeddings": lazygt.RowwiseParallel(output_layouts=Shard(1)),
        "output": lazygt.ColwiseParallel(input_layouts=Shard(1)),
    }
    lazygt.parallelize_module(model, "tp", plan | ends)


def frozen(model: Llama) -> None:
    """Nobody keeps the input of a linear layer for its weight's gradient."""
    column_and_row(model)
    for layer in model.layers:
        for linear in (*layer.attention.children(), *layer.feed_forward.children()):
            linear.requires_grad_(False)


@pytest.mark.parametrize("lay", [column_and_row, frozen])
def test_two_layers_cost_megatrons_eight_all_reduces(lay: Callable[[Llama], None]) -> None:
    assert sent(lay) == {all_reduce(ACTIVATION, "tp"): 4 * DEPTH}


@pytest.mark.parametrize("rows", [1, ROWS])
def test_sequence_parallelism_gathers_and_scatters_eight_times(rows: int) -> None:
    # besides: the head gathers its input and reduces the gradient, the embedding the other way
    assert sent(sequence_by_layers, rows) == {
        all_gather(rows * ROW, "tp"): 4 * DEPTH + 2,
        reduce_scatter(rows * ROW, "tp"): 4 * DEPTH + 2,
    }


# -- what counts as the same input ---------------------------------------------------------------


def columns(*layers: nn.Linear) -> None:
    for layer in layers:
        lazygt.parallelize_module(layer, "tp", lazygt.ColwiseParallel())


def written_between(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    a = first(x)
    with torch.no_grad():
        x.mul_(3)
    return a + second(x)


def other_history(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    h = x * 2
    a = first(h)
    return a + second(h.detach_().requires_grad_())


def without_gradients_first(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    with torch.no_grad():
        a = second(x)
    return a + first(x) + second(x)


def over_a_flush(x: torch.Tensor, first: nn.Linear, second: nn.Linear) -> torch.Tensor:
    a = first(x)
    a.sum().item()
    with torch.no_grad():
        x.mul_(3)
    x.sum().item()
    return a + second(x)


@pytest.mark.parametrize(
    "use", [written_between, other_history, without_gradients_first, over_a_flush]
)
def test_the_gradient_is_that_of_one_device(use: Callable[..., torch.Tensor]) -> None:
    def steps() -> list[list[float]]:
        torch.manual_seed(0)
        first, second, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(3, 4, requires_grad=True)
        for layer in (first, second):
            layer.requires_grad_(False)
        if x.device.type == "lazygt":
            columns(first, second)
        seen = []
        for _ in range(2):  # the same tensor is the input of both
            y = use(x, first, second)
            y.square().sum().backward()
            assert x.grad is not None
            seen += [y.tolist(), x.grad.tolist()]
        return seen

    expected = steps()
    with lazygt.session(launcher="inline", mesh={"tp": 1}):
        assert steps() == expected


def test_an_input_that_is_not_used_any_more_is_not_kept() -> None:
    with lazygt.session(launcher="dry", mesh={"tp": 2}) as s:
        first, second, x = nn.Linear(4, 6), nn.Linear(4, 6), torch.randn(3, 4, requires_grad=True)
        columns(first.requires_grad_(False), second.requires_grad_(False))
        s.flush()
        y = (first(x * 2) + second(x * 2)).sum()
        s.flush()
        assert s.last_plan is not None
        assert len(s.last_plan.graph.outputs) == 1
    assert y.shape == ()
