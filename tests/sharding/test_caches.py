"""Keys that are cut along their length, and queries that every rank has: a token that reads a
cache, a decoder that reads an encoder's places. The cache is never gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph.placement import Placement, Replicate, Shard
from tests.sharding.best import Programs, check_numbers, draw, recorded, reduced

pytestmark = pytest.mark.timeout(120)

R, S = Replicate(), Shard
Place = Callable[[Tensor, Placement], Tensor]
BATCH, HEADS, SIZE = 2, 8, 16
KNOWN = Programs()
known = KNOWN.known


def joined(queries: int, ranks: int) -> float:
    """The largest sums, then weighted values with sums, of so many queries."""
    return reduced(BATCH * HEADS * queries * 4 * (1 + SIZE + 1), ranks)


def keys(length: int, heads: int = HEADS, seed: int = 1) -> Tensor:
    return draw(BATCH, heads, length, SIZE, seed=seed)


def queries(count: int = 1) -> Tensor:
    return draw(BATCH, HEADS, count, SIZE)


def seen(upto: int, length: int, hidden: float = float("-inf")) -> Tensor:
    """A mask of the places up to one."""
    return torch.where(torch.arange(length) <= upto, 0.0, hidden).view(1, 1, 1, length)


CACHE = (keys(512), keys(512, seed=2))
FEWER = (keys(512, 2), keys(512, 2, seed=2))


@known((*CACHE, queries()), (S(2), S(2), R), lambda n: joined(1, n))
def a_token(place: Place, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@known((*FEWER, queries(3)), (S(2), S(2), R), lambda n: joined(3, n))
def tokens_that_share_keys(place: Place, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@known((*CACHE, queries(), seen(17, 512)), (S(2), S(2), R, R), lambda n: joined(1, n))
def a_token_that_sees_one_ranks_keys(
    place: Place, k: Tensor, v: Tensor, q: Tensor, mask: Tensor
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@known((*FEWER, queries(), seen(300, 512)), (S(2), S(2), R, R), lambda n: joined(1, n))
def repeated_keys(place: Place, k: Tensor, v: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    wide = [
        part[:, :, None].expand(BATCH, 2, 4, 512, SIZE).reshape(BATCH, HEADS, 512, SIZE)
        for part in (k, v)
    ]
    return F.scaled_dot_product_attention(q, *wide, attn_mask=mask)


@known((*CACHE, queries(), queries(), queries()), (S(2), S(2), R, R, R), lambda n: joined(1, n))
def a_token_that_is_put_there(
    place: Place, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Any:
    keys, values = keys.clone(), values.clone()
    keys[:, :, 300:301], values[:, :, 300] = k, v[:, :, 0]
    mixed = F.scaled_dot_product_attention(q, keys, values)
    return mixed, place(keys, S(2)), place(values, S(2))


@known(
    (*[t.clone().requires_grad_() for t in CACHE], queries(4).requires_grad_()),
    (S(2), S(2), R),
    lambda n: joined(4, n) + reduced(queries(4).nbytes, n),
)
def a_memory_trained(place: Place, k: Tensor, v: Tensor, q: Tensor) -> Any:
    y = F.scaled_dot_product_attention(q, k, v)
    of_k, of_v, of_q = torch.autograd.grad(y.square().sum(), [k, v, q])
    return y, of_q, place(of_k, S(2)), place(of_v, S(2))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_ranks_send_no_more_than_they_have_to(name: str, ranks: int) -> None:
    KNOWN.check_bytes(name, ranks)


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_are_those_of_one_device(name: str, ranks: int) -> None:
    check_numbers(KNOWN.program(name), ranks, 1e-4)


MASKS = {
    "of one place": seen(0, 10),
    "of no place": seen(-1, 10),
    "of no place, in numbers that leave no scores": seen(-1, 10, torch.finfo(torch.float32).min),
    "of rows": torch.where(torch.arange(40).view(1, 1, 4, 10) % 7 < 3, 0.0, float("-inf")),
    "of two dims": torch.linspace(-2, 2, 40).view(4, 10).masked_fill(
        torch.eye(4, 10).bool(), float("-inf")),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_ranks_with_masked_keys_have_no_weight(name: str) -> None:
    """Ten places on four ranks: three, three, three and one. Each rank does its own, fixed."""
    mask = MASKS[name]

    def body(place: Any, k: Tensor, v: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    tensors = keys(10), keys(10, seed=2), queries(mask.shape[-2]), mask
    for ranks in (3, 4, 12):
        program = recorded(body, tensors, (S(2), S(2), R, R), fixed=True)
        check_numbers(program, ranks, 1e-5)


def token(cache: Tensor, place: Any, new: Tensor, by_index: bool) -> Tensor:
    """Put a token's key into a cache, and what the token then reads of it."""
    if by_index:
        cache.index_copy_(2, place, new)
    else:
        cache[:, :, place : place + 1] = new
    hidden = torch.arange(cache.shape[2]) > place
    mask = torch.zeros(1, 1, 1, cache.shape[2]).masked_fill(hidden, float("-inf"))
    return F.scaled_dot_product_attention(new, cache, cache, attn_mask=mask)


PLACES = (1, 2, 3, 8, 12, 13)


def test_tokens_go_on_by_one_plan_and_the_cache_stays_where_it_is() -> None:
    news = [queries() for _ in PLACES]
    expected = []
    for by_index in (True, False):
        cache = keys(14)
        for place, new in zip(PLACES, news, strict=True):
            at = torch.tensor([place]) if by_index else place
            expected.append(token(cache, at, new, by_index))
        expected.append(cache)
    with lazygt.session(mesh={"x": 2}, workers=lazygt.Workers(threads=1)) as s:
        made = [*decoded(s, news, True), *decoded(s, news, False)]
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def decoded(s: lazygt.Session, news: list[Tensor], by_index: bool) -> list[Tensor]:
    """What each token reads, and the cache after them."""
    cache = lazygt.distribute(keys(14).to("lazygt"), {"x": TorchShard(2)})
    made, built = [], []
    for place, new in zip(PLACES, news, strict=True):
        at = torch.tensor([place], device="cpu").to("lazygt") if by_index else place
        made.append(token(cache, at, new.to("lazygt"), by_index).cpu())
        assert s.last_plan is not None
        kinds = [(one.kind, one.nbytes) for one in s.last_plan.collectives]
        sums = 4 * BATCH * HEADS
        assert kinds == [("all_reduce", sums), ("all_reduce", sums * (SIZE + 1))]
        built.append(s.stats()["plans_built"])
    assert built[2:] == [built[2]] * (len(PLACES) - 2), "a place, a plan"
    assert cache.placements == (TorchShard(2),)
    return [*made, cache.cpu()]
