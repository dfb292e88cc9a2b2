"""What the tests of placements share: the collectives that a choice of placements leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lazygt.graph import Graph
from lazygt.graph.label import Label, Replicated
from lazygt.graph.node import Node
from lazygt.passes.rules import rows_of
from lazygt.passes.rules.base import Row
from lazygt.passes.sharding.annotations import Annotation
from lazygt.passes.sharding.cost import (
    GPU,
    Machine,
    reshard_kind,
    reshard_seconds,
)
from lazygt.passes.sharding.problem import Question, build_problem
from lazygt.passes.solver import Solution

R = Replicated()
Annotations = Mapping[int, Annotation]

#: A byte sent takes as long as a byte read, a collective nothing besides.
PLAIN = Machine(flops=1e3, memory_bandwidth=1.0, link_bandwidth=1.0, link_latency=0.0, launch=0.0)


def question_of(
    graph: Graph,
    annotations: Annotations | None = None,
    parts: int = 4,
    machine: Machine = GPU,
    outputs: Sequence[Sequence[Label] | None] = (),
    explore: bool = False,
) -> Question:
    metas = graph.values

    def rows(node: Node) -> Sequence[Row]:
        return rows_of(node, metas, parts)

    return build_problem(graph, rows, parts, machine, annotations, outputs, explore)


def collectives(
    graph: Graph,
    question: Question,
    solution: Solution,
    annotations: Annotations | None = None,
    outputs: Sequence[Sequence[Label] | None] = (),
) -> list[tuple[str, int]]:
    """(kind, the value's bytes) of what is sent, each label of a value made once."""
    annotations, kept = annotations or {}, question.labels(solution)
    rows = question.rows(solution)
    made: dict[int, Label] = {}
    for value in range(len(graph.inputs)):
        known = annotations.get(value, Annotation(R))
        made[value] = kept[value][0] if known.kind == "free" and value in kept else known.label
    needs: dict[int, list[Label]] = {value: list(labels) for value, labels in kept.items()}
    for (node, results), row in zip(graph.numbered(), rows, strict=True):
        made.update(zip(results, row.outputs, strict=True))
        for value, label in zip(node.refs(), row.inputs, strict=True):
            needs.setdefault(value, []).append(label)
    for value, allowed in zip(graph.outputs, outputs, strict=False):
        have = {made[value], *needs.get(value, [])}
        if allowed and have.isdisjoint(allowed):
            needs.setdefault(value, []).append(allowed[0])
    return sent(graph, made, needs) + [(c.kind, c.nbytes) for row in rows for c in row.comm]


def sent(
    graph: Graph, made: Mapping[int, Label], needs: Mapping[int, Sequence[Label]]
) -> list[tuple[str, int]]:
    found = []
    for value, labels in sorted(needs.items()):
        meta = graph.values[value]
        nbytes = 0 if meta is None else meta.nbytes
        have = [made[value]]
        for label in labels:
            if label in have:
                continue
            source = min(have, key=lambda h: reshard_seconds(GPU, h, label, nbytes, 4))
            kind = reshard_kind(source, label)
            assert kind is not None, f"%{value}: no way from {source} to {label}"
            have.append(label)
            if kind:
                found.append((kind, nbytes))
    return found
