"""What training steps exchange when they are laid out as the textbooks say, against formulas.

`dim`, `T` tokens a step, `N` ranks: payloads are whole operands, whatever `N` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.placement import COLLECTIVES
from tests.sharding.counting import (
    GPT,
    Block,
    Counts,
    all_gather,
    all_reduce,
    gradients,
    planned,
    reduce_scatter,
)

DIM, BATCH, LENGTH, WORDS = 512, 8, 256, 4096
TOKENS = BATCH * LENGTH
A = TOKENS * DIM * 4  #: bytes of one activation
RANKS = [2, 4, 8]
S0, S1 = Shard(0), Shard(1)

Place = Callable[[nn.Module], nn.Module]


def block() -> nn.Module:
    return Block(DIM, 16)


def gpt() -> nn.Module:
    return GPT(WORDS, DIM, 1)


def squares(*axes: str, gradient: bool = False) -> Callable[[nn.Module], torch.Tensor]:
    """A loss of a block on a batch that is cut along ``axes``; its input may want a gradient."""
    kept: list[torch.Tensor] = []

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.zeros(BATCH, LENGTH, DIM, requires_grad=gradient)
        kept[:] = [x]  # or nobody would ask for its gradient
        if axes:
            x = lazygt.distribute(x, dict.fromkeys(axes, S0), fixed=True)
        return model(x).square().mean()

    return loss


def words(*axes: str) -> Callable[[nn.Module], torch.Tensor]:
    """The cross-entropy of a GPT."""

    def loss(model: nn.Module) -> torch.Tensor:
        x, y = torch.zeros(2, BATCH, LENGTH, dtype=torch.long)
        if axes:
            x, y = (lazygt.distribute(t, dict.fromkeys(axes, S0)) for t in (x, y))
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return loss


def megatron(model: nn.Module, prefix: str = "", sequence: bool = False) -> nn.Module:
    layout = S1 if sequence else None
    column = lazygt.ColwiseParallel(input_layouts=layout)
    row = lazygt.RowwiseParallel(output_layouts=layout)
    table = {"attn.qkv": column, "attn.out": row, "mlp.0": column, "mlp.2": row}
    if sequence:
        table["norm?"] = lazygt.SequenceParallel()
    return lazygt.parallelize_module(
        model, None, {prefix + name: style for name, style in table.items()}
    )


def counts(
    mesh: dict[str, int],
    make: Callable[[], nn.Module],
    place: Place,
    loss: Callable[[nn.Module], torch.Tensor],
    optimizer: str = "sgd",
) -> Counts:
    return planned(mesh, lambda: place(make()), loss, optimizer)[0]


def each(model: nn.Module, meet: Callable[[int, str], object], axis: str, share: int = 1) -> Counts:
    """One collective for every parameter, of a ``share``-th of its bytes."""
    return Counter(meet(nbytes // share, axis) for nbytes in gradients(model))  # type: ignore[return-value]


# -- along the batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ranks", RANKS)
def test_data_parallel_reduces_each_gradient_once(ranks: int, optimizer: str) -> None:
    found = counts({"data": ranks}, block, lazygt.data_parallel, squares("data"), optimizer)
    assert found == each(block(), all_reduce, "data")


def taken_whole_by_the_backward(model: nn.Module) -> list[int]:
    """The bytes of what the backward of a block reads: matrices but the first layer's input
    gradient, and the weights and biases of norms; the biases of matrices are only added."""
    return [
        p.numel() * 4 for name, p in model.named_parameters()
        if p.dim() > 1 or name.startswith("norm")
    ]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_fsdp_gathers_weights_and_scatters_gradients(
    ranks: int, reshard: bool, optimizer: str
) -> None:
    found = counts(
        {"data": ranks}, block,
        lambda model: lazygt.fully_shard(model, reshard_after_forward=reshard),
        squares("data"), optimizer,
    )  # fmt: skip
    model = block()
    expected = each(model, all_gather, "data") + each(model, reduce_scatter, "data")
    if reshard:
        again = taken_whole_by_the_backward(model)
        expected += Counter(all_gather(nbytes, "data") for nbytes in again)
    assert found == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_zero_scatters_gradients_and_gathers_updated_parameters(ranks: int) -> None:
    found = counts({"data": ranks}, block, lambda model: model, squares("data"), "zero")
    model = block()
    assert found == each(model, reduce_scatter, "data") + each(model, all_gather, "data")


def test_zero_with_megatron_moves_only_blocks_of_model_rank() -> None:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def place(model: nn.Module) -> nn.Module:
        table = {"0": lazygt.ColwiseParallel(), "2": lazygt.RowwiseParallel()}
        return lazygt.data_parallel(lazygt.parallelize_module(model, None, table))

    mesh = {"data": 2, "model": 2}
    found = counts(mesh, mlp, place, squares("data"), "zero")
    up, wide, down, narrow = gradients(mlp())
    cut = [up // 2, down // 2, narrow]  # the wide bias has one dim, and that is the model's
    expected = Counter(meet(each, "data") for each in cut for meet in (reduce_scatter, all_gather))
    assert found == expected + Counter(
        {all_reduce(wide // 2, "data"): 1, all_reduce(A // 2, "model"): 1}
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_hsdp_reduces_shards_over_replicas(replicas: int, optimizer: str) -> None:
    mesh = {"replica": replicas, "shard": 2}
    found = counts(
        mesh, block, lambda model: lazygt.fully_shard(model, "shard"),
        squares("replica", "shard"), optimizer,
    )  # fmt: skip
    model = block()
    expected = each(model, all_gather, "shard") + each(model, reduce_scatter, "shard")
    again = taken_whole_by_the_backward(model)
    expected += Counter(all_gather(nbytes, "shard") for nbytes in again)
    assert found == expected + each(model, all_reduce, "replica", share=2)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_tied_weight_is_gathered_once_a_direction_and_reduced_once(ranks: int) -> None:
    def make() -> nn.Module:
        return GPT(WORDS, DIM, 0, tied=True)

    found = counts({"data": ranks}, make, lazygt.fully_shard, words("data"))
    table, norm = WORDS * DIM * 4, DIM * 4
    assert found == Counter({
        all_gather(table, "data"): 2, reduce_scatter(table, "data"): 1,
        all_gather(norm, "data"): 4, reduce_scatter(norm, "data"): 2,
        all_reduce(4, "data"): 1,  # the number of targets
    })  # fmt: skip


# -- along the weights --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_megatron_mlp_reduces_its_output_and_nothing_of_its_weights(
    ranks: int, optimizer: str
) -> None:
    def place(model: nn.Module) -> nn.Module:
        table = {"0": lazygt.ColwiseParallel(), "2": lazygt.RowwiseParallel()}
        return lazygt.parallelize_module(model, None, table)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    mesh = {"model": ranks}
    assert counts(mesh, mlp, place, squares(), optimizer) == Counter({all_reduce(A, "model"): 1})
    both = counts(mesh, mlp, place, squares(gradient=True), optimizer)
    assert both == Counter({all_reduce(A, "model"): 2})


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_placed_weights_stay_where_they_are(optimizer: str, fixed: bool) -> None:
    """The optimizer's horizontal ops once wanted all weights cut along one dim."""

    def place(model: nn.Module) -> nn.Module:
        plan = {"0.weight": {"model": S0}, "1.weight": {"model": S1}}
        return lazygt.parallelize_module(model, None, plan, fixed=fixed)

    def mlp() -> nn.Module:
        layers = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        return nn.Sequential(*layers)

    _, graph = planned({"model": 4}, lambda: place(mlp()), squares(), optimizer)
    values = graph.values
    moved = [node for node in graph.nodes if node.op in COLLECTIVES]
    assert moved
    assert all(values[node.args[0].index].shape[0] == TOKENS for node in moved)  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_megatron_block_reduces_twice_a_direction(ranks: int, optimizer: str) -> None:
    found = counts({"model": ranks}, block, megatron, squares(gradient=True), optimizer)
    assert found == Counter({all_reduce(A, "model"): 4})


@pytest.mark.parametrize("ranks", RANKS)
def test_sequence_parallel_gathers_and_scatters_twice_a_direction(ranks: int) -> None:
    found = counts({"model": ranks}, block, lambda model: megatron(model, sequence=True), squares())
    assert found == Counter({
        all_gather(A, "model"): 4, reduce_scatter(A, "model"): 4,
        # weights and biases of two norms; biases of what is cut by rows have gathered gradients
        all_reduce(DIM * 4, "model"): 4,
    })  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_a_loss_over_a_cut_vocabulary_moves_numbers_a_token(ranks: int) -> None:
    def place(model: nn.Module) -> nn.Module:
        table = {"tokens": lazygt.VocabParallel(), "head": lazygt.ColwiseParallel()}
        return lazygt.parallelize_module(model, None, table)

    found = counts({"model": ranks}, lambda: GPT(WORDS, DIM, 0), place, words())
    assert found == Counter({
        all_reduce(A, "model"): 2,  # the embedding; the gradient of what the head takes
        all_reduce(TOKENS * 4, "model", "max"): 1,
        all_reduce(TOKENS * 4, "model"): 2,  # of the softmax and of its backward
    })  # fmt: skip


# -- both ---------------------------------------------------------------------------------------

CUT = ("attn.qkv.weight", "attn.qkv.bias", "attn.out.weight", "mlp.0.weight", "mlp.0.bias",
       "mlp.2.weight")  # fmt: skip


@pytest.mark.parametrize("model", [2, 4])
@pytest.mark.parametrize("data", [2, 4])
def test_data_times_model(data: int, model: int) -> None:
    mesh = {"data": data, "model": model}
    found = counts(
        mesh, block, lambda m: lazygt.data_parallel(megatron(m)), squares("data", gradient=True)
    )
    sums = {name: p.numel() * 4 for name, p in block().named_parameters()}
    expected = Counter({all_reduce(A // data, "model"): 4})
    expected += Counter(
        all_reduce(nbytes // (model if name in CUT else 1), "data") for name, nbytes in sums.items()
    )
    assert found == expected


@pytest.mark.parametrize("model", [2, 4])
def test_fsdp_times_model(model: int) -> None:
    mesh = {"data": 2, "model": model}
    found = counts(
        mesh, block, lambda m: lazygt.fully_shard(megatron(m)), squares("data", gradient=True)
    )
    expected = Counter({all_reduce(A // 2, "model"): 4})
    for name, p in block().named_parameters():
        nbytes = p.numel() * 4 // (model if name in CUT else 1)
        if name in ("attn.qkv.bias", "mlp.0.bias"):  # has no dim left to cut
            expected[all_reduce(nbytes, "data")] += 1
            continue
        whole_again = p.dim() > 1 or name.startswith("norm")
        expected[all_gather(nbytes, "data")] += 1 + whole_again
        expected[reduce_scatter(nbytes, "data")] += 1
    assert found == expected
