"""Small programs whose best plan is known: tables, places in a cut dim, and layers behind sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lazygt.graph.placement import Shard
from tests.sharding.best import (
    PARTIAL,
    PRODUCT,
    Place,
    Programs,
    R,
    Tensor,
    check_numbers,
    draw,
    reduced,
    sent,
    weight,
    whole_numbers,
)

S = Shard
KNOWN = Programs()
known = KNOWN.known

# -- behind what is wanted in blocks: layers, too --------------------------------------------------


@known((*PRODUCT, draw(256, 512)), (*PARTIAL, R), lambda n: sent(256 * 256 * 4, n))
def a_layer_behind_a_sum(place: Place, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    y = a @ b
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return place(y @ w, S(0))


@known((draw(512, 128), weight(1024, 64), whole_numbers(1024, 512)), (R, S(0), R),
       lambda n: 2 * reduced(512 * 64 * 4, n) + reduced(3 * 512 * 4 + 4, n))  # fmt: skip
def a_table_at_both_ends(place: Place, x: Tensor, table: Tensor, tokens: Tensor) -> Any:
    hidden = torch.tanh(F.embedding(tokens, table))
    loss = F.cross_entropy(hidden @ table.t(), tokens.flip(0)) + x.sum() * 0
    return loss, place(torch.autograd.grad(loss, [table])[0], S(0))


# -- bags ------------------------------------------------------------------------------------------

BAGS = (whole_numbers(2048, 512, 8), weight(2048, 64))


@known(BAGS, (R, S(0)), lambda n: sent(512 * 64 * 4, n))
def bags_of_rows(place: Place, tokens: Tensor, table: Tensor) -> Tensor:
    return place(F.embedding_bag(tokens, table.detach(), mode="sum"), S(0))


@known(BAGS, (R, S(0)), lambda n: reduced(512 * 64 * 4, n))
def means_of_rows_trained(place: Place, tokens: Tensor, table: Tensor) -> Any:
    bags = F.embedding_bag(tokens, table)
    gradient = torch.autograd.grad(torch.tanh(bags).sum(), [table])[0]
    return bags, place(gradient, S(0))


# -- places in a cut dim ---------------------------------------------------------------------------

LOGITS = (draw(8, 4096), whole_numbers(4096, 8, 64))


@known(LOGITS, (S(1), R), lambda n: reduced(8 * 64 * 4, n) + sent(n * 8 * 12, n))
def a_penalty_then_the_largest(place: Place, logits: Tensor, seen: Tensor) -> Tensor:
    picked = logits.gather(1, seen)
    picked = torch.where(picked < 0, picked * 1.5, picked / 1.5)
    return logits.scatter(1, seen, picked).argmax(-1)


@known(LOGITS, (S(1), R), lambda n: 0)
def counts_added(place: Place, logits: Tensor, seen: Tensor) -> Tensor:
    ones = torch.ones_like(seen, dtype=logits.dtype)
    return place(logits - torch.zeros_like(logits).scatter_add(1, seen, ones), S(1))


@known(LOGITS, (S(1), R), lambda n: 0)
def places_forbidden(place: Place, logits: Tensor, seen: Tensor) -> Tensor:
    logits = logits.clone()
    logits.scatter_(1, seen, float("-inf"))
    return place(logits, S(1))


@known((draw(4096, 64),), (S(0),), lambda n: sent(n * 64 * 4, n))
def products_of_all_before(place: Place, x: Tensor) -> Tensor:
    return (1 + x / 64).cumprod(0)


@known((draw(2, 64, 16, 16),), (S(2),), lambda n: 0)
def pixels_of_channels(place: Place, x: Tensor) -> Tensor:
    return F.pixel_shuffle(x, 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_ranks_send_no_more_than_they_have_to(name: str, ranks: int) -> None:
    KNOWN.check_bytes(name, ranks)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_are_those_of_one_device(name: str, ranks: int) -> None:
    check_numbers(KNOWN.program(name), ranks, close=1e-4)
