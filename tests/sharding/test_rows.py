"""Rows that indices in blocks name: a rank sends those that belong elsewhere, by all-to-all.

A mixture of experts places tokens by index, up to a capacity, and takes results back by the same
index. Experts and tokens are in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazygt
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.passes.sharding.marks import without_places
from tests.sharding.best import Program, check_numbers, exchanged, recorded, ring
from tests.sharding.world import run_sharded, run_whole

R, S = Replicate(), Shard
Tensor = torch.Tensor
Place = Callable[[Tensor, Placement], Tensor]

TOKENS, EXPERTS, CHOICES, FEATURES, HIDDEN = 1024, 8, 2, 128, 32
CAPACITY = TOKENS * CHOICES * 5 // 4 // EXPERTS
#: A token's features, and where they go.
ROW = FEATURES * 4 + 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) / 4


def routed(tokens: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each choice of a token: weight, expert, place with it, and whether there is one."""
    weights, experts = (tokens @ gate).softmax(-1).topk(CHOICES, -1)
    chosen = F.one_hot(experts, EXPERTS).view(-1, EXPERTS)
    places = ((chosen.cumsum(0) - 1) * chosen).sum(-1).view(-1, CHOICES)
    return weights, experts, places, places < CAPACITY


def computed(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What experts make of their rows."""
    return torch.bmm(torch.relu(torch.bmm(rows.view(EXPERTS, CAPACITY, FEATURES), up)), down)


def copies(tokens: Tensor) -> Tensor:
    """One row a choice."""
    return tokens.unsqueeze(1).expand(-1, CHOICES, -1).reshape(-1, FEATURES)


def by_index_put(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """With one row more, for all that find no place."""
    weights, experts, places, kept = routed(tokens, gate)
    rows = torch.where(kept, experts * CAPACITY + places, EXPERTS * CAPACITY).view(-1)
    sent = tokens.new_zeros(EXPERTS * CAPACITY + 1, FEATURES).index_put((rows,), copies(tokens))
    made = computed(sent[:-1], up, down).reshape(-1, FEATURES)
    made = torch.cat([made, made.new_zeros(1, FEATURES)])[rows].view(-1, CHOICES, FEATURES)
    return (made * (weights * kept).unsqueeze(-1)).sum(1)


def by_index_add(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts, places, kept = routed(tokens, gate)
    rows = (experts * CAPACITY + places.clamp(max=CAPACITY - 1)).view(-1)
    given = copies(tokens) * kept.view(-1, 1)
    sent = tokens.new_zeros(EXPERTS * CAPACITY, FEATURES).index_add(0, rows, given)
    made = computed(sent, up, down).reshape(-1, FEATURES).index_select(0, rows)
    return (made.view(-1, CHOICES, FEATURES) * (weights * kept).unsqueeze(-1)).sum(1)


def by_two_indices(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts, places, kept = routed(tokens, gate)
    at = experts.view(-1), places.clamp(max=CAPACITY - 1).view(-1)
    given = copies(tokens) * kept.view(-1, 1)
    sent = tokens.new_zeros(EXPERTS, CAPACITY, FEATURES).index_put(at, given, accumulate=True)
    made = computed(sent, up, down)[at].view(-1, CHOICES, FEATURES)
    return (made * (weights * kept).unsqueeze(-1)).sum(1)


def by_scatter(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts, places, kept = routed(tokens, gate)
    rows = (experts * CAPACITY + places.clamp(max=CAPACITY - 1)).view(-1, 1).expand(-1, FEATURES)
    given = copies(tokens) * kept.view(-1, 1)
    sent = tokens.new_zeros(EXPERTS * CAPACITY, FEATURES).scatter_add(0, rows, given)
    made = computed(sent, up, down).reshape(-1, FEATURES).gather(0, rows)
    return (made.view(-1, CHOICES, FEATURES) * (weights * kept).unsqueeze(-1)).sum(1)


ROUTES = {route.__name__: route for route in (
    by_index_put, by_index_add, by_two_indices, by_scatter)}  # fmt: skip
WEIGHTS = (
    draw(FEATURES, EXPERTS),
    draw(EXPERTS, FEATURES, HIDDEN).requires_grad_(),
    draw(EXPERTS, HIDDEN, FEATURES).requires_grad_(),
)
#: tokens, gate, up, down
LIE = S(0), R, S(0), S(0)


@cache
def program(route: str, trained: bool) -> Program:
    def body(place: Place, tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Any:
        y = place(ROUTES[route](tokens, gate, up, down), S(0))
        if not trained:
            return y
        made = torch.autograd.grad(y.square().sum(), [tokens, up, down])
        return y, *[place(gradient, S(0)) for gradient in made]

    tokens = draw(TOKENS, FEATURES).requires_grad_()
    return recorded(body, (tokens, *WEIGHTS), LIE)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_tokens_are_exchanged_and_not_gathered(route: str, trained: bool, ranks: int) -> None:
    """Once to the experts and once back, and so for the gradients. What else is sent: how many
    tokens each rank has for each expert, and, where there is a row more than the experts have,
    a row of a neighbour each time that row comes and goes."""
    found = exchanged(program(route, trained), ranks)
    rows = TOKENS * CHOICES // ranks * ROW
    assert [n for kind, n in found if kind == "all_to_all"] == [rows] * (4 if trained else 2)
    others = [n for kind, n in found if kind != "all_to_all"]
    moves = (4 if trained else 2) if route == "by_index_put" else 0
    assert sum(others) <= EXPERTS * 8 * ranks + moves * ranks * FEATURES * 4, found


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_the_numbers_are_those_of_one_device(route: str, ranks: int) -> None:
    check_numbers(program(route, True), ranks, 1e-4)


def test_features_may_be_cut_on_another_axis() -> None:
    one = program("by_index_add", True)
    mesh = Mesh(("x", "y"), (2, 2))
    lies = [Sharding((*each.placements, R)) for each in one.stored]
    up = next(at for at, t in enumerate(one.inputs) if t.shape == (EXPERTS, FEATURES, HIDDEN))
    lies[up] = Sharding((S(0), S(1)))
    got = run_sharded(_without_marks(one), mesh, lies, one.inputs, one.params)
    for a, b in zip(got, run_whole(_without_marks(one), one.inputs, one.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _without_marks(one: Program) -> Graph:
    return without_places(one.graph)


def test_a_table_in_blocks_of_rows_is_read_and_trained_by_rows() -> None:
    rows, count, features = 65536, 4096, 64

    def body(place: Place, table: Tensor, ids: Tensor) -> Any:
        y = F.embedding(ids, table)
        (gradient,) = torch.autograd.grad(y.square().sum(), [table])
        return place(y, S(0)), place(gradient, S(0))

    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(0))
    one = recorded(body, (draw(rows, features).requires_grad_(), ids), (S(0), S(0)))
    sent = [("all_to_all", count // 4 * (features * 4 + 8))] * 2
    assert exchanged(one, 4) == sent
    check_numbers(one, 4)


def test_rows_of_whole_tables_are_not_exchanged_for_tokens_that_all_have() -> None:
    """As vocabulary parallel: a rank looks up its own words, and the sum is reduced."""

    def body(place: Place, table: Tensor, ids: Tensor) -> Tensor:
        return place(F.embedding(ids, table), R)

    ids = torch.randint(1024, (512,), generator=torch.Generator().manual_seed(0))
    one = recorded(body, (draw(1024, 64), ids), (S(0), R), fixed=True)
    assert exchanged(one, 4) == [("all_reduce", 512 * 64 * 4)]


@pytest.mark.timeout(120)
def test_workers_exchange_rows_and_report_missing_index() -> None:
    table, ids = draw(40, 8), torch.tensor([3, 39, 0, 0, 17, 21, 8])
    with lazygt.session(mesh={"rows": 2}, workers=lazygt.Workers(threads=1)):
        lazy = lazygt.distribute(table.to("lazygt"), [S(0)], fixed=True)
        index = lazygt.distribute(ids.to("lazygt"), [S(0)], fixed=True)
        taken = lazygt.distribute(lazy[index], [S(0)], fixed=True)
        assert torch.equal(taken.cpu(), table[ids])
        put = lazygt.distribute(torch.zeros(40, 8), [S(0)], fixed=True)
        put = put.index_put((index,), taken, accumulate=True)
        assert torch.equal(put.cpu(), torch.zeros(40, 8, device="cpu").index_put(
            (ids,), table[ids], accumulate=True))  # fmt: skip
        wrong = lazygt.distribute(index + 21, [S(0)], fixed=True)
        with pytest.raises(IndexError, match="index"):
            lazygt.distribute(lazy[wrong], [S(0)], fixed=True).cpu()


@pytest.mark.parametrize("ranks", [4, 8])
def test_less_is_sent_than_to_gather_tokens(ranks: int) -> None:
    whole = TOKENS * FEATURES * 4 * (ranks - 1) / ranks
    assert ring(program("by_index_add", False), ranks) < 4 * CHOICES / ranks * whole


@pytest.mark.timeout(120)
def test_the_same_bits_on_one_and_two_workers() -> None:
    def trained(workers: int) -> Tensor:
        with lazygt.session(mesh={"x": workers}, invariant=4) as s:
            tokens = lazygt.distribute(draw(TOKENS, FEATURES).to("lazygt"), [S(0)])
            gate, *experts = (t.detach().to("lazygt") for t in WEIGHTS)
            up, down = (lazygt.distribute(t, [S(0)]).requires_grad_() for t in experts)
            s.flush()
            by_index_add(tokens, gate, up, down).square().sum().backward()
            assert up.grad is not None
            return up.grad.cpu()

    assert torch.equal(trained(1), trained(2))
