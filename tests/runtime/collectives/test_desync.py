"""Ranks that hold different plans: said before anything is launched, by name, and never a hang."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH_, WAIT
from lazygt.passes.sharding import programs

pytestmark = pytest.mark.timeout(90)

Mistake = Callable[[Graph], Graph]


def another_op(graph: Graph) -> Graph:
    """The first launch reduces to the maximum."""
    nodes = list(graph.nodes)
    number = next(n for n, node in enumerate(nodes) if node.op == LAUNCH_)
    kind, values, moves, _, axis = nodes[number].args
    nodes[number] = replace(nodes[number], args=(kind, values, moves, "max", axis))
    return replace(graph, nodes=tuple(nodes))


def none_at_all(graph: Graph) -> Graph:
    """The rank meets nobody."""
    nodes = [
        replace(node, op="aten.neg_.default", args=node.args[1] if node.op == LAUNCH_ else
                node.args[:1]) if node.op in (LAUNCH_, WAIT) else node
        for node in graph.nodes
    ]  # fmt: skip
    return replace(graph, nodes=tuple(nodes))


def with_mistake(monkeypatch: pytest.MonkeyPatch, mistake: Mistake, at: int) -> None:
    """From now on rank ``at`` gets another plan than it should."""
    right = programs.overlapped

    def wrong(*args: Any) -> Sequence[Graph]:
        graphs = list(right(*args))
        graphs[at] = mistake(graphs[at])
        return graphs

    monkeypatch.setattr(programs, "overlapped", wrong)


def total(rows: torch.Tensor) -> torch.Tensor:
    return lazygt.distribute(rows, [Shard(0)]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("mistake", "other"), [(another_op, "all_reduce max of 1"), (none_at_all, "nothing more")]
)
def test_ranks_that_would_not_meet_are_named(
    monkeypatch: pytest.MonkeyPatch, mistake: Mistake, other: str, at: int
) -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        rows = torch.ones(6)
        assert total(rows).item() == 6.0
        with_mistake(monkeypatch, mistake, at)
        right = rf"rank {1 - at} (?:is about to run )?all_reduce sum of 1"
        wrong = rf"rank {at} (?:is about to run )?{other}"
        with pytest.raises(
            lazygt.CollectiveMismatch, match="collective 1 on axis 'data'"
        ) as caught:
            (total(rows) * 2).item()
        assert caught.value.where.startswith(__file__)
        for told in (right, wrong):
            assert re.search(told, str(caught.value)), caught.value
        assert (rows + 1).sum().item() == 12.0, "what every rank has is intact"
        with pytest.raises(lazygt.ExecutionError):
            (total(rows) * 2).item()
