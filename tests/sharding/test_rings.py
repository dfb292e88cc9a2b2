"""Attention of long sequences whose heads ranks can't share: keys go round, nobody has all of them,
and of a causal mask each rank does as much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard as TorchShard

import lazygt
from lazygt.graph.collectives import communications
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, WAIT, Placement, Shard
from lazygt.passes.sharding.programs import programs
from tests.sharding.best import Program, Programs, check_numbers, draw

pytestmark = pytest.mark.timeout(120)

S = Shard
Place = Callable[[Tensor, Placement], Tensor]
HEADS, LENGTH, SIZE = 6, 1024, 16
SHAPE = (1, HEADS, LENGTH, SIZE)
TENSORS = tuple(draw(*SHAPE, seed=seed) for seed in (1, 2, 3))
TRAINED = tuple(t.clone().requires_grad_() for t in TENSORS)
#: Bytes of keys and values.
KEYS = 2 * TENSORS[0].nbytes
KNOWN = Programs()


def passed_on(rounds: int) -> Callable[[int], float]:
    """What each rank sends of so many rounds of all keys and values."""
    return lambda ranks: rounds * KEYS * (ranks - 1) / ranks


@KNOWN.known(TENSORS, (S(2),) * 3, passed_on(1))
def all_keys(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return place(F.scaled_dot_product_attention(q, k, v), S(2))


@KNOWN.known(TENSORS, (S(2),) * 3, passed_on(1))
def keys_before(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return place(F.scaled_dot_product_attention(q, k, v, is_causal=True), S(2))


def _trained(place: Place, leaves: list[Tensor], causal: bool) -> list[Tensor]:
    y = place(F.scaled_dot_product_attention(*leaves, is_causal=causal), S(2))
    made = torch.autograd.grad(y.square().sum(), leaves)
    return [y, *[place(gradient, S(2)) for gradient in made]]


@KNOWN.known(TRAINED, (S(2),) * 3, passed_on(3))
def all_keys_trained(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _trained(place, [q, k, v], causal=False)


@KNOWN.known(TRAINED, (S(2),) * 3, passed_on(3))
def keys_before_trained(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _trained(place, [q, k, v], causal=True)


def planned(program: Program, ranks: int) -> tuple[Graph, ...]:
    return programs(program.graph, Mesh(("x",), (ranks,)), program.stored).graphs


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_no_rank_sends_more_than_a_ring(name: str, ranks: int) -> None:
    graphs = planned(KNOWN.program(name), ranks)
    mesh = Mesh(("x",), (ranks,))
    most = max(sum(c.ring_bytes for c in communications(graph, mesh)) for graph in graphs)
    assert most <= KNOWN[name].best(ranks) + 4


@pytest.mark.parametrize("ranks", [4, 5])
@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_are_those_of_one_device(name: str, ranks: int) -> None:
    check_numbers(KNOWN.program(name), ranks, 1e-3)


def work(graph: Graph) -> int:
    """Pairs of queries and keys that a rank's kernels take; half of them under a causal mask."""
    pairs, values = 0, graph.values
    for node in graph.nodes:
        if "attention" in node.op and "backward" not in node.op:
            queries, keys = (values[number].shape[2] for number in node.refs()[:2])  # type: ignore[union-attr]
            pairs += queries * keys // (2 if node.args[4] else 1)
    return pairs


@pytest.mark.parametrize("ranks", [4, 5, 8])
@pytest.mark.parametrize("name", ["all_keys", "keys_before"])
def test_ranks_share_the_work(name: str, ranks: int) -> None:
    every = [work(graph) for graph in planned(KNOWN.program(name), ranks)]
    pairs = LENGTH * LENGTH // (2 if name == "keys_before" else 1)
    assert sum(every) == pytest.approx(pairs, rel=0.01)
    assert max(every) <= 1.01 * pairs / ranks


@pytest.mark.parametrize("name", ["all_keys", "keys_before", "keys_before_trained"])
def test_two_blocks_of_others_are_there_at_most_and_come_meanwhile(name: str) -> None:
    """One that is attended to and one under way, of eight; and what goes home."""
    ranks = 8
    for graph in planned(KNOWN.program(name), ranks):
        last = {number: at for at, node in enumerate(graph.nodes) for number in node.refs()}
        flying: dict[int, int] = {}
        here: dict[int, int] = {}
        most, beside = 0, 0
        for at, (node, results) in enumerate(graph.numbered()):
            if node.op == LAUNCH:
                flying[results[0]] = _bytes(graph, results[0])
            elif node.op == WAIT:
                flying.pop(node.args[0].index, None)
                here[results[0]] = _last_use(graph, results[0], last)
            elif "attention" in node.op:
                beside += any(flying.values())
                there = sum(_bytes(graph, value) for value, end in here.items() if end >= at)
                most = max(most, there + sum(flying.values()))
        assert most <= 3.1 * KEYS / ranks * (2 if "trained" in name else 1)
        assert beside >= ranks // 2 - 1


def _bytes(graph: Graph, value: int) -> int:
    meta = graph.values[value]
    assert meta is not None
    return meta.nbytes


def _last_use(graph: Graph, value: int, last: dict[int, int]) -> int:
    """The node that reads a value, or a view of it, last."""
    end = last.get(value, -1)
    for at, (node, results) in enumerate(graph.numbered()):
        if node.op == "aten.slice.Tensor" and node.refs() == (value,) and at <= end:
            end = max(end, last.get(results[0], -1))
    return end


def test_workers_pass_keys_on() -> None:
    def trained(leaves: list[Tensor], causal: bool) -> list[Tensor]:
        y = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    tensors = [draw(1, 2, 2049, SIZE, seed=seed) for seed in (1, 2, 3)]
    with lazygt.session(mesh={"x": 3}, workers=lazygt.Workers(threads=1)) as s:
        for causal in (True, False):
            leaves = [
                lazygt.distribute(t.to("lazygt"), {"x": TorchShard(2)}).requires_grad_()
                for t in tensors
            ]
            made = [value.detach().cpu() for value in trained(leaves, causal)]
            assert s.last_plan is not None
            expected = trained([t.clone().requires_grad_() for t in tensors], causal)
            for got, want in zip(made, expected, strict=True):
                torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-4)
