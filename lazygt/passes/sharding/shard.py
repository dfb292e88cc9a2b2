"""Sharding: the whole program and the user's annotations in, each rank's program out.

One mesh axis after another, outermost first: the rows of every op, the exact choice among them,
the local programs. Annotations are nodes of the graph (``lazygt.place``), so that they outlive
the renumbering of values from axis to axis; the last step drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.label import MEETINGS, Label, Replicated, Sharded
from lazygt.graph.mesh import Mesh, Placement, Stored
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.passes import rules
from lazygt.passes.build import Builder
from lazygt.passes.rules.base import Metas, Row, Values, splittable
from lazygt.passes.sharding.cost import CPU, Machine
from lazygt.passes.sharding.localise import Choice, Local, localise
from lazygt.passes.sharding.places import PLACE, without_places
from lazygt.passes.sharding.problem import build_problem
from lazygt.passes.sharding.reach import Annotation
from lazygt.passes.solver import solve

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
    kept = _kept(graph, mesh, inputs)
    homes = [kept.get(value) for value in graph.outputs]
    graphs = [graph]
    labels: list[Placement] = [() for _ in graph.outputs]
    for at in range(len(mesh.names)):
        wanted = [None if home is None else home.labels[at] for home in homes]
        axis = _Axis(mesh, at, inputs, machine)
        made = _agreed(axis, graphs, wanted)
        graphs = [local.graph for ranks in made for local in ranks]
        chosen = made[0][0].outputs
        labels = [(*had, label) for had, label in zip(labels, chosen, strict=True)]
    pinned = [home is not None and home.pinned for home in homes]
    outputs = tuple([Stored(*each) for each in zip(labels, pinned, strict=True)])
    return Sharding(tuple(map(without_places, graphs)), outputs)


def same(a: Graph, b: Graph) -> bool:
    """Whether two ranks run the same; their graphs are different objects often."""
    return a is b or (a.inputs == b.inputs and a == b)


def _agreed(
    axis: _Axis, graphs: Sequence[Graph], wanted: Sequence[Label | None]
) -> list[list[Local]]:
    """The programs of each graph's ranks along an axis.

    Graphs of ranks that meet on an earlier axis must agree on the labels of what they exchange
    there. Their blocks may differ in size, so they may not; then they exchange whole values.
    """
    choices = _choices(axis, graphs, wanted)
    if len({_exchanged(one, choice) for one, choice in zip(graphs, choices, strict=True)}) > 1:
        choices = _choices(axis, graphs, wanted, exchange_whole=True)
    chosen = axis.labels(graphs[0], choices[0], wanted)
    made: list[list[Local]] = []
    for one, choice in zip(graphs, choices, strict=True):
        known = made[0] if made and same(one, graphs[0]) else None
        made.append(known or axis.localised(one, choice, chosen))
    return made


def _choices(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Label | None],
    exchange_whole: bool = False,
) -> list[Choice]:
    """What is decided for each graph; the outputs of all have the labels that the first's have."""
    first = axis.choice(graphs[0], wanted, exchange_whole)
    chosen = axis.labels(graphs[0], first, wanted)
    return [
        first if same(one, graphs[0]) else axis.choice(one, chosen, exchange_whole)
        for one in graphs
    ]


def _exchanged(graph: Graph, choice: Choice) -> tuple[tuple[Label, ...], ...]:
    """The labels of what a graph exchanges on the axes before, in order."""
    rows = zip(graph.nodes, choice.rows, strict=True)
    return tuple([(*row.inputs, *row.outputs) for node, row in rows if node.op in MEETINGS])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Axis number ``at`` of a mesh, and what is the same for all graphs that are cut along it."""

    mesh: Mesh
    at: int
    inputs: Sequence[Stored]
    machine: Machine

    @property
    def parts(self) -> int:
        """Its ranks."""
        return self.mesh.sizes[self.at]

    def choice(self, graph: Graph, wanted: Sequence[Label | None], exchange_whole: bool) -> Choice:
        """The rows and labels that take the least time.

        Args:
            wanted: for each output the label that it must have; None: whole or in blocks.
            exchange_whole: collectives of earlier axes are done with whole values.
        """
        allowed = [
            _whole_or_sharded(graph, value) if label is None else [label]
            for value, label in zip(graph.outputs, wanted, strict=True)
        ]
        metas = graph.values

        def rows(node: Node) -> Sequence[Row]:
            if exchange_whole and node.op in MEETINGS:
                return []
            return _rows_of(node, metas, self.parts)

        kept = _kept(graph, self.mesh, self.inputs)
        annotations = _annotations(graph, kept, self.at)
        question = build_problem(graph, rows, self.parts, self.machine, annotations, allowed)
        solution = solve(question.problem)
        given = [each.labels[self.at] for each in self.inputs]
        return Choice(question.rows(solution), question.labels(solution), given)

    def labels(
        self, graph: Graph, choice: Choice, wanted: Sequence[Label | None]
    ) -> tuple[Label, ...]:
        """The labels that the outputs get."""
        return self._local(graph, choice, wanted, 0).outputs

    def localised(
        self, graph: Graph, choice: Choice, wanted: Sequence[Label | None]
    ) -> list[Local]:
        """The program of each rank."""
        return [self._local(graph, choice, wanted, index) for index in range(self.parts)]

    def _local(
        self, graph: Graph, choice: Choice, wanted: Sequence[Label | None], index: int
    ) -> Local:
        homes = zip(graph.outputs, wanted, strict=True)
        known = {value: label for value, label in homes if label is not None}
        return localise(graph, choice, self.mesh.names[self.at], self.parts, index, known)


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
        targets = node.args[:1] if node.op == WRITE_BACK else map(ref, node.writes)
        versions = results if node.op == WRITE_BACK else results[len(node.fresh) :]
        for target, version in zip(targets, versions, strict=False):
            if target.index in found:
                found[version] = found[target.index]
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
