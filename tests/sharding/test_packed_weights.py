"""Weights of several layers in one, and tensors side by side: what ranks send for them.

A packed weight lies in blocks of the whole. Its rows are exchanged for blocks of each of its parts,
and nothing is sent for the activations but what the layer behind them reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lazygt.graph.placement import Placement, Replicate, Shard
from tests.sharding.best import Programs, check_numbers, draw, exchanged, reduced, weight

R, S = Replicate(), Shard
Tensor = torch.Tensor
Place = Callable[[Tensor, Placement], Tensor]

KNOWN = Programs()
known = KNOWN.known

ROW = 128 * 4
#: Rows of 128 numbers that rank 0 sends of two times 256 rows in blocks, and of three times 128.
TWO = {2: 128 * ROW, 4: 64 * ROW, 8: 32 * ROW}
THREE = {2: 64 * ROW, 4: 64 * ROW, 8: 32 * ROW}
#: Of 128, 64 and 64 rows, which are four heads: no more than ranks.
GROUPED = {2: 64 * ROW, 4: 32 * ROW}

TOKENS = draw(1024, 128)
GATE_UP = (TOKENS, draw(512, 128), draw(128, 256))
QKV = (draw(4, 256, 128), draw(384, 128), draw(128, 128))
LAYERS = (R, S(0), S(1))


def added(n: int, times: int = 1) -> float:
    """What is sent for the sums of a layer cut by its inputs."""
    return times * reduced(1024 * 128 * 4, n)


@known(GATE_UP, LAYERS, lambda n: TWO[n] + added(n))
def gate_and_up_in_chunks(place: Place, x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ w.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ down.t()


@known(GATE_UP, LAYERS, lambda n: TWO[n] + added(n))
def gate_and_up_seen_apart(place: Place, x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ w.t()).view(1024, 2, 256).unbind(1)
    return (F.silu(gate) * up) @ down.t()


@known(GATE_UP, LAYERS, lambda n: TWO[n] + added(n))
def gated_linear_unit(place: Place, x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    return F.glu(x @ w.t()) @ down.t()


def trained(place: Place, y: Tensor, tensors: Sequence[Tensor]) -> Any:
    gradients = torch.autograd.grad(y.square().mean(), tensors)
    placements = (R, S(0), S(1))
    return y, *map(place, gradients, placements)


PARAMETERS = (weight(1024, 128), weight(512, 128), weight(128, 256))


@known(PARAMETERS, LAYERS, lambda n: 2 * TWO[n] + added(n, 2))
def gate_and_up_sliced_trained(place: Place, x: Tensor, w: Tensor, down: Tensor) -> Any:
    both = x @ w.t()
    return trained(place, (F.silu(both[:, :256]) * both[:, 256:]) @ down.t(), (x, w, down))


@known(PARAMETERS, LAYERS, lambda n: 2 * TWO[n] + added(n, 2))
def gated_linear_unit_trained(place: Place, x: Tensor, w: Tensor, down: Tensor) -> Any:
    return trained(place, F.glu(x @ w.t()) @ down.t(), (x, w, down))


def attended(q: Tensor, k: Tensor, v: Tensor, out: Tensor, shared: bool = False) -> Tensor:
    q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y.transpose(1, 2).flatten(2) @ out.t()


@known(QKV, LAYERS, lambda n: THREE[n] + added(n))
def queries_keys_and_values_unbound(place: Place, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    heads = (x @ w.t()).view(4, 256, 3, 8, 16).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ out.t()


@known(
    (*QKV, draw(384)),
    (*LAYERS, S(0)),
    lambda n: THREE[n] * 129 / 128 + added(n),
)
def queries_keys_and_values_with_a_bias(
    place: Place, x: Tensor, w: Tensor, out: Tensor, bias: Tensor
) -> Tensor:
    return attended(*F.linear(x, w, bias).split(128, -1), out)


SHARED = (weight(4, 256, 128), weight(256, 128), weight(128, 128))


@known(SHARED, LAYERS, lambda n: 2 * GROUPED.get(n, 1 << 20) + added(n, 2))
def queries_with_fewer_keys_trained(place: Place, x: Tensor, w: Tensor, out: Tensor) -> Any:
    q, k, v = (x @ w.t()).split([128, 64, 64], -1)
    return trained(place, attended(q, k, v, out, shared=True), (x, w, out))


@known(SHARED, LAYERS, lambda n: 2 * GROUPED.get(n, 1 << 20) + added(n, 2))
def queries_with_fewer_keys_sliced_trained(place: Place, x: Tensor, w: Tensor, out: Tensor) -> Any:
    both = x @ w.t()
    parts = both[..., :128], both[..., 128:192], both[..., 192:]
    return trained(place, attended(*parts, out, shared=True), (x, w, out))


EXPERTS = (weight(512, 128), weight(4, 256, 128), weight(4, 128, 128))
ENDS = torch.tensor([100, 100, 350, 512], dtype=torch.int32)


@known(
    (*EXPERTS, ENDS), (R, S(1), S(2), R), lambda n: 2 * 4 * TWO[n] // 2 + 2 * reduced(512 * ROW, n)
)
def experts_of_groups_of_tokens_trained(
    place: Place, x: Tensor, w: Tensor, down: Tensor, ends: Tensor
) -> Any:
    gate, up = torch._grouped_mm(x, w.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    of_x, of_w, of_down = torch.autograd.grad(y.square().mean(), [x, w, down])
    return y, of_x, place(of_w, S(1)), place(of_down, S(2))


# -- tensors side by side --------------------------------------------------------------------------


@known((draw(512, 64), draw(300, 64), draw(40, 64)), (S(0),) * 3, lambda n: reduced(64 * 4, n))
def rows_of_several_tensors(place: Place, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.tanh(torch.cat([a, b, c])).sum(0)


@known((draw(512, 64), draw(256, 64)), (S(0), S(0)), lambda n: 0)
def joined_and_taken_apart(place: Place, a: Tensor, b: Tensor) -> Any:
    x, y = torch.relu(torch.cat([a, b])).split([512, 256])
    return place(x, S(0)), place(y, S(0))


@known((draw(64, 256), draw(128, 64), draw(77)), (S(1), S(0), R), lambda n: reduced(4, n))
def norm_of_all_gradients(place: Place, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.cat([a.reshape(-1), b.reshape(-1), c]).norm()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_ranks_send_no_more_than_they_have_to(name: str, ranks: int) -> None:
    KNOWN.check_bytes(name, ranks)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_are_those_of_one_device(name: str, ranks: int) -> None:
    check_numbers(KNOWN.program(name), ranks, 1e-3)


def test_few_tokens_are_exchanged_and_the_weight_is_not() -> None:
    programs = Programs()
    programs.known((draw(4, 1, 128), *QKV[1:]), LAYERS, lambda n: 0)(
        queries_keys_and_values_in_a_row
    )
    moved = exchanged(programs.program("queries_keys_and_values_in_a_row"), 4)
    assert moved[0] == ("send_recv", 4 * 64 * 4), moved


def queries_keys_and_values_in_a_row(place: Place, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    return attended(*(x @ w.t()).split(128, -1), out)
