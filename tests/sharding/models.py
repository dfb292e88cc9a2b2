"""Recorded training steps of models, and random placements."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import lazygt
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement, Replicate, Shard
from tests.models import zoo


class Program(NamedTuple):
    graph: Graph
    inputs: list[torch.Tensor]
    params: list[Any]


def recorded(name: str) -> Program:
    """One training step of a model as it is recorded, and the values that it starts from."""
    ((x, y),) = zoo.batches(name, 1)
    torch.manual_seed(3)
    with lazygt.session(
        launcher="inline",
        planning=lazygt.Planning(keep_stages=True),
        tracing=lazygt.Tracing(flush_on_backward=False),
    ) as s:
        model = zoo.MODELS[name][0]()
        opt = zoo.OPTIMIZERS["sgd"](model.parameters())
        lazy_x, lazy_y = x.to("lazygt"), y.to("lazygt")
        s.flush()
        loss = F.cross_entropy(model(lazy_x).flatten(0, -2), lazy_y.flatten())
        loss.backward()
        opt.step()
        trace, store = s.recorder.trace, s._link._worker.store  # type: ignore[attr-defined]
        inputs = [store.get(remote.id).clone() for remote in trace.entered]
        params = list(trace.params)
        s.flush()
        assert s.last_plan is not None
        return Program(dict(s.stages(s.last_plan))["recorded"], inputs, params)


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Program:
    return recorded(request.param)


def placed_at_random(t: torch.Tensor, mesh: Mesh, draw: random.Random) -> Sharding:
    def label() -> Placement:
        dim = draw.randrange(-1, t.dim()) if t.is_floating_point() or t.dim() == 2 else -1
        return Replicate() if dim < 0 else Shard(dim)

    return Sharding(tuple(label() for _ in mesh.names))
