"""What the tests of placements share: the collectives that a choice of placements leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lazygt.graph import Graph
from lazygt.graph.node import Node
from lazygt.graph.placement import Placement, Replicate
from lazygt.machine import Figure, LinkFigures, Machine, default_machine
from lazygt.passes.sharding.axis import build_problem
from lazygt.passes.sharding.choose import AxisProblem, reshard_kind, reshard_seconds
from lazygt.passes.sharding.choose.solver import Solution
from lazygt.passes.sharding.marks import Annotation
from lazygt.passes.sharding.rules import strategies_of
from lazygt.passes.sharding.rules.strategy import Strategy

R = Replicate()
Annotations = Mapping[int, Annotation]

CPU, GPU = default_machine("cpu"), default_machine("cuda")


def carried(machine: Machine, local: LinkFigures, sockets: LinkFigures | None = None) -> Machine:
    """The same machine with other carriers of collectives."""
    kept = {k: f for k, f in machine.figures.items() if "[" not in k}
    new = {
        f"collectives.{carrier}[0].{name}": Figure(getattr(link, name), "measured", "test")
        for carrier, link in (("local", local), ("sockets", sockets))
        if link is not None
        for name in ("latency", "each", "bandwidth")
    }
    return replace(machine, figures=kept | new)


def computing(machine: Machine, rate: float) -> Machine:
    """The same machine with another rate of matmuls."""
    return machine.with_values({f"matmul.rate.{dtype}": rate for dtype in machine.matmul.rate})


#: A byte sent takes as long as a byte read, a collective nothing besides.
PLAIN = carried(
    computing(GPU, 1e3).with_values({"memory.bandwidth": 1.0, "host.launch": 0.0}),
    LinkFigures(0.0, 0.0, 1.0),
)


def question_of(
    graph: Graph,
    annotations: Annotations | None = None,
    parts: int = 4,
    machine: Machine = GPU,
    outputs: Sequence[Sequence[Placement] | None] = (),
    explore: bool = False,
) -> AxisProblem:
    metas = graph.values

    def rows(node: Node) -> Sequence[Strategy]:
        return strategies_of(node, metas, parts)

    return build_problem(graph, rows, parts, machine, annotations, outputs, explore)


def collectives(
    graph: Graph,
    question: AxisProblem,
    solution: Solution,
    annotations: Annotations | None = None,
    outputs: Sequence[Sequence[Placement] | None] = (),
) -> list[tuple[str, int]]:
    """(kind, the value's bytes) of what is sent, each placement of a value made once."""
    annotations, kept = annotations or {}, question.placements(solution)
    rows = question.strategies(solution)
    made: dict[int, Placement] = {}
    for value in range(len(graph.inputs)):
        known = annotations.get(value, Annotation(R))
        made[value] = kept[value][0] if known.kind == "free" and value in kept else known.placement
    needs: dict[int, list[Placement]] = {
        value: list(placements) for value, placements in kept.items()
    }
    for (node, results), row in zip(graph.numbered(), rows, strict=True):
        made.update(zip(results, row.outputs, strict=True))
        for value, placement in zip(node.refs(), row.inputs, strict=True):
            needs.setdefault(value, []).append(placement)
    for value, allowed in zip(graph.outputs, outputs, strict=False):
        have = {made[value], *needs.get(value, [])}
        if allowed and have.isdisjoint(allowed):
            needs.setdefault(value, []).append(allowed[0])
    return sent(graph, made, needs) + [(c.kind, c.nbytes) for row in rows for c in row.comm]


def sent(
    graph: Graph, made: Mapping[int, Placement], needs: Mapping[int, Sequence[Placement]]
) -> list[tuple[str, int]]:
    found = []
    for value, placements in sorted(needs.items()):
        meta = graph.values[value]
        nbytes = 0 if meta is None else meta.nbytes
        have = [made[value]]
        for placement in placements:
            if placement in have:
                continue
            source = min(have, key=lambda h: reshard_seconds(GPU, h, placement, nbytes, 4))
            kind = reshard_kind(source, placement)
            assert kind is not None, f"%{value}: no way from {source} to {placement}"
            have.append(placement)
            if kind:
                found.append((kind, nbytes))
    return found
