"""Sharding: the whole program and the user's annotations in, each rank's program out.

One mesh axis after another, outermost first: the rows of every op, the exact choice among them,
the local programs. Annotations are nodes of the graph (``lazygt.place``), so that they outlive
the renumbering of values from axis to axis; the last step drops them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lazygt.graph.label import MEETINGS, Anyhow, Label, Replicated, Sharded
from lazygt.graph.mesh import Mesh, Placement, Stored
from lazygt.graph.node import Graph, Node
from lazygt.passes import rules
from lazygt.passes.rules.base import Row, splittable
from lazygt.passes.rules.foreach import Unmerge
from lazygt.passes.sharding.annotations import annotations_on, kept_values, place_rows
from lazygt.passes.sharding.cost import CPU, Machine
from lazygt.passes.sharding.localise import Choice, Local, localise
from lazygt.passes.sharding.places import PLACE, without_places
from lazygt.passes.sharding.problem import Question, build_problem
from lazygt.passes.solver import Solution, solve

R = Replicated()


@dataclass(frozen=True, slots=True)
class Sharding:
    """The programs of all ranks, and how each output is kept.

    Attributes:
        why_in_turn: why the stages of a pipeline take one microbatch after the other, and not in
            1F1B order; empty where they do not.
    """

    graphs: tuple[Graph, ...]
    outputs: tuple[Stored, ...]
    why_in_turn: str = ""


def shard(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Stored],
    machine: Machine = CPU,
    decided: list[AxisStep] | None = None,
) -> Sharding:
    """The local programs of a graph whose inputs lie on the mesh as ``inputs`` says.

    An input that is written keeps its placement; so does a value that was placed. Horizontal ops
    are taken apart first, so that each of their tensors may lie in its own way.

    Args:
        decided: gets how each axis was decided, outermost first.
    """
    graph = Unmerge().run(graph)
    kept = kept_values(graph, mesh, inputs)
    homes = [kept.get(value) for value in graph.outputs]
    graphs = [graph]
    labels: list[Placement] = [() for _ in graph.outputs]
    for at in range(len(mesh.names)):
        wanted = [_wanted(home, at) for home in homes]
        axis = _Axis(mesh, at, inputs, machine)
        made = _agreed(axis, graphs, wanted, decided)
        graphs = [local.graph for ranks in made for local in ranks]
        chosen = made[0][0].outputs
        labels = [(*had, label) for had, label in zip(labels, chosen, strict=True)]
    outputs = tuple([
        Stored(had) if home is None else home._replace(labels=had)
        for had, home in zip(labels, homes, strict=True)
    ])  # fmt: skip
    return Sharding(tuple(map(without_places, graphs)), outputs)


def same(a: Graph, b: Graph) -> bool:
    """Whether two ranks run the same; their graphs are different objects often."""
    return a is b or (a.inputs == b.inputs and a == b)


def _agreed(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Label | None],
    decided: list[AxisStep] | None = None,
) -> list[list[Local]]:
    """The programs of each graph's ranks along an axis.

    Graphs of ranks that meet on an earlier axis must agree on the labels of what they exchange
    there. Their blocks may differ in size, so they may not; then they exchange whole values.
    """
    choices, chosen = _choices(axis, graphs, wanted)
    exchanged = {_exchanged(one, choice) for one, choice in zip(graphs, choices, strict=True)}
    if len(exchanged) > 1:
        choices, chosen = _choices(axis, graphs, wanted, exchange_whole=True)
    made: list[list[Local]] = []
    for one, choice in zip(graphs, choices, strict=True):
        known = made[0] if made and same(one, graphs[0]) else None
        made.append(known or axis.localised(one, choice, chosen))
    if decided is not None:
        decided.append(AxisStep(axis, graphs[0], tuple(wanted), len(exchanged) > 1, made[0][0]))
    return made


def _choices(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Label | None],
    exchange_whole: bool = False,
) -> tuple[list[Choice], tuple[Label, ...]]:
    """What is decided for each graph, and the labels that the outputs of all of them get."""
    first = axis.choice(graphs[0], wanted, exchange_whole)
    chosen = axis.local(graphs[0], first, wanted, 0).outputs
    choices = [
        first if same(one, graphs[0]) else axis.choice(one, chosen, exchange_whole)
        for one in graphs
    ]
    return choices, chosen


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
        """The rows and labels that take the least time."""
        question = self.question(graph, wanted, exchange_whole)
        return self.chosen(graph, question, solve(question.problem))

    def question(
        self,
        graph: Graph,
        wanted: Sequence[Label | None],
        exchange_whole: bool,
        whole: Collection[int] = (),
    ) -> Question:
        """What there is to choose.

        Args:
            wanted: for each output the label that it must have; None: whole or in blocks.
            exchange_whole: collectives of earlier axes are done with whole values.
            whole: nodes that every rank may do all of in any case, but for pins.
        """
        allowed = [
            _whole_or_sharded(graph, value) if label is None else [label]
            for value, label in zip(graph.outputs, wanted, strict=True)
        ]
        metas = graph.values

        def rows(node: Node) -> Sequence[Row]:
            if exchange_whole and node.op in MEETINGS:
                return []
            if node.op == PLACE:
                return place_rows(node, self.at)
            return rules.rows_of(node, metas, self.parts)

        kept = kept_values(graph, self.mesh, self.inputs)
        annotations = annotations_on(graph, kept, self.mesh, self.at)
        return build_problem(
            graph, rows, self.parts, self.machine, annotations, allowed, whole=whole
        )

    def chosen(self, graph: Graph, question: Question, solution: Solution) -> Choice:
        """The rows and labels of a solution."""
        given = [each.labels[self.at] for each in self.inputs]
        axis, values = self.mesh.names[self.at], graph.values
        gradients = {
            meta.shape: each.labels[self.at]
            for value, each in kept_values(graph, self.mesh, self.inputs).items()
            if each.unit is not None
            and each.unit.axis == axis
            and (meta := values[value]) is not None
            and isinstance(each.labels[self.at], Sharded)
        }
        return Choice(question.rows(solution), question.labels(solution), given, gradients)

    def localised(
        self, graph: Graph, choice: Choice, wanted: Sequence[Label | None]
    ) -> list[Local]:
        """The program of each rank; one object where all have the same."""
        first = self.local(graph, choice, wanted, 0)
        if first.alike:
            return [first] * self.parts
        return [first, *(self.local(graph, choice, wanted, n) for n in range(1, self.parts))]

    def local(
        self, graph: Graph, choice: Choice, wanted: Sequence[Label | None], index: int
    ) -> Local:
        """The program of one rank."""
        homes = zip(graph.outputs, wanted, strict=True)
        known = {value: label for value, label in homes if label is not None}
        return localise(graph, choice, self.mesh.names[self.at], self.parts, index, known)


@dataclass(frozen=True, slots=True)
class AxisStep:
    """How one axis was decided, as rank 0 has it.

    Attributes:
        graph, local: before and after.
        wanted: for each output the label that it must have; None: whole or in blocks.
        exchange_whole: collectives of earlier axes are done with whole values.
    """

    axis: _Axis
    graph: Graph
    wanted: tuple[Label | None, ...]
    exchange_whole: bool
    local: Local

    @property
    def name(self) -> str:
        """The axis."""
        return self.axis.mesh.names[self.axis.at]

    def question(self, whole: Collection[int] = ()) -> Question:
        """What there was to choose, and besides it to do all of some nodes on every rank."""
        return self.axis.question(self.graph, self.wanted, self.exchange_whole, whole)

    def other(self, question: Question, solution: Solution) -> Local:
        """The program after another choice."""
        choice = self.axis.chosen(self.graph, question, solution)
        return self.axis.local(self.graph, choice, self.wanted, 0)


def _wanted(home: Stored | None, at: int) -> Label | None:
    """The label that an output must have on an axis; None: any."""
    label = None if home is None else home.labels[at]
    return None if isinstance(label, Anyhow) else label


def _whole_or_sharded(graph: Graph, value: int) -> list[Label]:
    meta = graph.values[value]
    assert meta is not None
    return [R, *(Sharded(dim) for dim in splittable(meta.shape))]
