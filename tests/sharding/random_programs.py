"""Recorded random programs, and random placements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import assume

import lazygt
from lazygt.graph import Graph
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.placement import Placement, Replicate, Shard
from lazygt.record.tensor import storage_of
from tests.sharding.steps import Step, results, start

Tensor = torch.Tensor


class Recorded(NamedTuple):
    """A program as a graph, what it starts from, and which outputs are its results."""

    graph: Graph
    inputs: list[Tensor]
    params: list[Any]
    results: dict[int, int]


def recorded(program: Sequence[Step], sizes: Sequence[int], axes: Sequence[str]) -> Recorded:
    mesh = dict.fromkeys(axes, 1)
    with lazygt.session(
        launcher="inline",
        mesh=mesh,
        planning=lazygt.Planning(keep_stages=True),
        tracing=lazygt.Tracing(flush_on_backward=False),
    ) as s:
        state = start(sizes, "lazygt")
        s.flush()
        for step in program:
            step.run(state)
        made = results(state)
        trace, store = s.recorder.trace, s._link._worker.store  # type: ignore[attr-defined]
        inputs = [store.get(remote.id) for remote in trace.entered]
        assume(all(isinstance(t, Tensor) for t in inputs))  # one may still be on its way
        inputs = [t.clone() for t in inputs]
        params, cells = list(trace.params), trace.alive().storages
        storages = [storage_of(t) for t in made]
        places = {n: cells.index(held) for n, held in enumerate(storages) if held in cells}
        s.flush()
        assert s.last_plan is not None
        return Recorded(dict(s.stages(s.last_plan))["recorded"], inputs, params, places)


def stored_at_random(t: Tensor, mesh: Mesh, draw: random.Random) -> Sharding:
    labels: list[Placement] = [Replicate(), *map(Shard, range(t.dim()))]
    return Sharding(tuple(draw.choice(labels) for _ in mesh.names), draw.random() < 0.2)
