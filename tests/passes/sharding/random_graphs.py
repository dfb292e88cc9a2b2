"""Random graphs of matrices, and the least cost to serve the uses of a value."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lazygt.graph import Graph
from lazygt.graph.placement import Partial, Placement, Replicate, Shard
from lazygt.machine import Machine
from lazygt.passes.sharding.choose import reshard_seconds
from tests.passes.tools import graph_of

R, S, P = Replicate(), Shard, Partial("sum")


def random_graph(draw: random.Random, ops_at_most: int = 4) -> Graph:
    """Some ops on [6, 6] tensors, any of which may be an output."""
    ops = ("mm.default({}, {})", "add.Tensor({}, {})", "mul.Tensor({}, {})", "relu.default({})",
           "addmm.default({}, {}, {})")  # fmt: skip
    rows = ["%0: f32[6, 6] = input", "%1: f32[6, 6] = input"]
    for number in range(2, 2 + draw.randint(1, ops_at_most)):
        op = draw.choice(ops)
        names = [f"%{draw.randrange(number)}" for _ in range(op.count("{}"))]
        rows.append(f"%{number}: f32[6, 6] = aten.{op.format(*names)}")
    last = len(rows) - 1
    return graph_of("\n".join([*rows, f"return %{last}, %{draw.randint(2, last)}"]))


def cheapest(
    machine: Machine, made: Placement, uses: Sequence[set[Placement]], nbytes: int
) -> float:
    """The least time to serve these uses of a value, each with all the placements that it takes.

    One first placement in the place of the one that was made, and one copy; or as it was made.
    """
    placements = [R, P, S(0), S(1)]

    def move(source: Placement, target: Placement) -> float:
        return reshard_seconds(machine, source, target, nbytes, 4)

    def serve(have: Sequence[Placement]) -> float:
        return sum(min(move(h, placement) for h in have) for use in uses for placement in use)

    plans = [move(made, a) + serve([a]) for a in placements]
    plans += [
        move(made, a) + move(a, b) + serve([a, b]) for a in placements for b in placements
        if not isinstance(a, Shard) or b == R
    ]  # fmt: skip
    return min(plans)
