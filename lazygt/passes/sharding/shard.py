"""Sharding: the whole program and the user's annotations in, each rank's program out.

One mesh axis after another, outermost first: the rows of every op, the exact choice among them,
the local programs. Annotations are nodes of the graph (``lazygt.place``), so that they outlive
the renumbering of values from axis to axis; the last step drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazygt.graph.label import Label, Replicated, Sharded
from lazygt.graph.mesh import Mesh, Placement, Stored
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.passes import rules
from lazygt.passes.base import placed, rebuild
from lazygt.passes.build import Builder
from lazygt.passes.rules.base import Metas, Row, Values, splittable
from lazygt.passes.sharding.cost import CPU, Machine
from lazygt.passes.sharding.localise import Choice, Local, localise
from lazygt.passes.sharding.problem import build_problem
from lazygt.passes.sharding.reach import Annotation
from lazygt.passes.solver import solve

#: ``place(value, labels, pinned)``: the value; ``labels`` has one label an axis, as text.
PLACE = "lazygt.place"
R = Replicated()


@dataclass(frozen=True, slots=True)
class Sharding:
    """The programs of all ranks, and how each output is kept."""

    graphs: tuple[Graph, ...]
    outputs: tuple[Stored, ...]


def shard(graph: Graph, mesh: Mesh, inputs: Sequence[Stored], machine: Machine = CPU) -> Sharding:
    """The local programs of a graph whose inputs lie on the mesh as ``inputs`` says.

    An input that is written keeps its placement; so does a value that was placed.
    """
    graphs = [graph]
    labels: list[Placement] = [() for _ in graph.outputs]
    for at in range(len(mesh.names)):
        first = _on_axis(graphs[0], mesh, at, inputs, machine)
        chosen = first[0].outputs
        made = [
            first if same(one, graphs[0]) else _on_axis(one, mesh, at, inputs, machine, chosen)
            for one in graphs
        ]
        graphs = [local.graph for ranks in made for local in ranks]
        labels = [(*had, label) for had, label in zip(labels, chosen, strict=True)]
    kept = _kept(graph, mesh, inputs)
    pinned = [value in kept and kept[value].pinned for value in graph.outputs]
    outputs = tuple([Stored(*each) for each in zip(labels, pinned, strict=True)])
    return Sharding(tuple(map(without_places, graphs)), outputs)


def same(a: Graph, b: Graph) -> bool:
    """Whether two ranks run the same; their graphs are different objects often."""
    return a is b or (a.inputs == b.inputs and a == b)


def without_places(graph: Graph) -> Graph:
    """The graph without its annotations."""
    rows = placed(graph)
    same = {row.results[0]: row.node.args[0].index for row in rows if row.node.op == PLACE}
    kept = [row for row in rows if row.node.op != PLACE]
    return rebuild(graph, kept, same) if same else graph


def place_node(value: int, meta: TensorMeta, placement: Placement, pinned: bool) -> Node:
    """The annotation of a value of this number."""
    return Node(PLACE, (Ref(value), tuple(map(str, placement)), pinned), (), (meta,))


def _on_axis(
    graph: Graph,
    mesh: Mesh,
    at: int,
    inputs: Sequence[Stored],
    machine: Machine,
    outputs: Sequence[Label] = (),
) -> list[Local]:
    """The program of each rank of axis number ``at``.

    Args:
        outputs: the labels that the outputs must have, since other lines of the axis have them.
    """
    axis, parts = mesh.names[at], mesh.sizes[at]
    kept = _kept(graph, mesh, inputs)
    wanted = {value: each.labels[at] for value, each in kept.items()}
    wanted.update(zip(graph.outputs, outputs, strict=False))
    allowed = [
        [wanted[value]] if value in wanted else _whole_or_sharded(graph, value)
        for value in graph.outputs
    ]
    metas = graph.values
    question = build_problem(
        graph,
        lambda node: _rows_of(node, metas, parts),
        parts,
        machine,
        _annotations(graph, kept, at),
        allowed,
    )
    solution = solve(question.problem)
    given = [each.labels[at] for each in inputs]
    choice = Choice(question.rows(solution), question.labels(solution), given)
    return [localise(graph, choice, axis, parts, index, wanted) for index in range(parts)]


def _annotations(graph: Graph, kept: Mapping[int, Stored], at: int) -> dict[int, Annotation]:
    """What the user has said of a graph's values, for one axis."""
    found = {}
    for value, each in kept.items():
        label = each.labels[at]
        if each.pinned:
            found[value] = Annotation(label, "pinned")
        elif value < len(graph.inputs) and label != R:
            found[value] = Annotation(label)
    for node, results in graph.numbered():
        if node.op == PLACE and not node.args[2]:
            found[results[0]] = Annotation(label_from(node.args[1][at]), "free")
    return found


def _kept(graph: Graph, mesh: Mesh, inputs: Sequence[Stored]) -> dict[int, Stored]:
    """The values with a place of their own: inputs, those that were placed, what is made of
    nothing (a weight before its first values), and new versions of all these."""
    found = dict(enumerate(inputs))
    whole = Stored((R,) * len(mesh.names))
    for node, results in graph.numbered():
        if node.op == PLACE:
            found[results[0]] = Stored(tuple(map(label_from, node.args[1])), node.args[2])
        elif not node.refs():
            found.update(dict.fromkeys(results, whole))
        versions = results[len(node.fresh) :]
        for target, version in zip(node.writes, versions, strict=False):
            if target in found:
                found[version] = found[target]
    return found


def _whole_or_sharded(graph: Graph, value: int) -> list[Label]:
    meta = graph.values[value]
    assert meta is not None
    return [R, *(Sharded(dim) for dim in splittable(meta.shape))]


def label_from(text: str) -> Label:
    """The label that ``R`` or ``S(1)`` names."""
    return R if text == "R" else Sharded(int(text[2:-1]))


def _rows_of(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    if node.op != PLACE:
        return rules.rows_of(node, metas, parts)
    (meta,) = node.fresh
    assert meta is not None
    labels: list[Label] = [R, *(Sharded(dim) for dim in splittable(meta.shape))]
    return [Row((label,), (label,), _place_here) for label in labels]


def _place_here(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    (value,) = operands
    return build.add(Node(PLACE, (value, *node.args[1:]), (), (build.meta(value),)))
