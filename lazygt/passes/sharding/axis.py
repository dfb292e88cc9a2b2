"""Sharding: the whole program and the user's annotations in, each rank's program out.

One mesh axis after another, outermost first: the strategies of every op, the exact choice among
them, the local programs. Annotations are nodes of the graph (``lazygt.place``), so that they
outlive the renumbering of values from axis to axis; the last step drops them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.node import Graph, Node, Ref, map_arg, ref
from lazygt.graph.placement import (
    COLLECTIVES,
    Cut,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Unspecified,
    local_meta,
)
from lazygt.machine import Machine, default_machine
from lazygt.passes.classes import by_class, classes, classified
from lazygt.passes.sharding import rules
from lazygt.passes.sharding.annotations import annotations_of, mark_strategies, stored_shardings
from lazygt.passes.sharding.builder import Builder
from lazygt.passes.sharding.marks import PLACE, REDUCE_AS, without_places
from lazygt.passes.sharding.problem import Question, build_problem
from lazygt.passes.sharding.rules.horizontal import SplitForeach
from lazygt.passes.sharding.rules.strategy import Strategy, lower_strategy, shardable_dims
from lazygt.passes.sharding.solver import Solution, solve

# -- lowering of the whole program to each rank's: blocks of values, and collectives ---------------
# One mesh axis at a time. Every rank of the axis gets a graph of its own, since blocks may differ
# in size; all of them meet in the same collectives in the same order, because they are written by
# the same walk over the same global graph. A collective stands where a placement changes.

R = Replicate()


@dataclass(frozen=True, slots=True)
class Choice:
    """Strategies and placements that were chosen for a graph on one axis.

    Attributes:
        strategies: of each node.
        kept: value -> the placements that its users find, in the order to make them; a value that
            is not here is used as it was made.
        inputs: the placement that each input comes with.
        gradients: shape -> the placement of an output of that shape that would be partial, as the
            gradient of a parameter that is stored in blocks is; others are reduced whole.
    """

    strategies: Sequence[Strategy]
    kept: Mapping[int, tuple[Placement, ...]]
    inputs: Sequence[Placement]
    gradients: Mapping[tuple[int, ...], Placement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """Local program of one rank of an axis, with the placement of each of its outputs.

    Attributes:
        values: for each value of the whole program: placement -> number of the local value that has
            it; the placement that it was made with is the first.
        alike: whether every rank of the axis has the same program.
        settled: whether it would be the same program if ``outputs`` were wanted.
    """

    graph: Graph
    outputs: tuple[Placement, ...]
    values: tuple[Mapping[Placement, int], ...] = ()
    alike: bool = False
    settled: bool = False


def partition(
    graph: Graph,
    choice: Choice,
    axis: str,
    parts: int,
    index: int,
    wanted: Mapping[int, Placement] | None = None,
) -> LocalProgram:
    """Return the program of rank ``index`` of ``parts`` on ``axis``.

    Args:
        wanted: output value -> the placement that it must have. Others have the placement that they
            were made with; a partial sum is reduced, see ``Choice.gradients``.
    """
    return _Partitioner(graph, choice, axis, parts, index).run(wanted or {})


class _Partitioner:
    def __init__(self, graph: Graph, choice: Choice, axis: str, parts: int, index: int) -> None:
        self.graph, self.choice, self.values = graph, choice, graph.values
        placed = list(zip(graph.inputs, choice.inputs, strict=True))
        metas = [local_meta(meta, placement, parts, index) for meta, placement in placed]
        self.build = Builder(metas, graph.params, axis=axis, parts=parts, index=index)
        for meta, placement in placed:  # the builder notes where ranks have blocks of other sizes
            self.build.local(meta.shape, placement)
        #: value -> placement -> the local value
        self.have: list[dict[Placement, Ref]] = [
            {placement: ref(number)} for number, placement in enumerate(choice.inputs)
        ]
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.settled = False

    def run(self, wanted: Mapping[int, Placement]) -> LocalProgram:
        placements: tuple[Placement, ...] = ()
        outputs: list[Ref] = []
        for number, (node, strategy) in enumerate(
            zip(self.graph.nodes, self.choice.strategies, strict=True)
        ):
            if node.dynamic:  # it stays the last node, and nothing else is made of its results
                placements, outputs = self._outputs(wanted)
            operands = [
                self.get(v, placement)
                for v, placement in zip(node.refs(), strategy.inputs, strict=True)
            ]
            results = self._node(node, strategy, operands)
            for result, placement in zip(results, strategy.outputs, strict=True):
                self.have.append({} if result is None else {placement: result})
            self._from(number)
        if len(placements) < len(self.graph.outputs):
            placements, outputs = self._outputs(wanted)
        self._from(max(len(self.graph.nodes) - 1, 0))
        whole = self.build.graph(outputs)
        lined = replace(whole, lines=tuple(self.lines), origins=tuple(self.origins))
        alike = not self.build.differs
        return LocalProgram(lined, placements, self._numbers(), alike, self.settled)

    def _numbers(self) -> tuple[Mapping[Placement, int], ...]:
        return tuple(
            [{placement: at.index for placement, at in have.items()} for have in self.have]
        )

    def _node(
        self, node: Node, strategy: Strategy, operands: Sequence[Ref]
    ) -> Sequence[Ref | None]:
        if strategy.lower is None and (node.op.startswith("lazygt.") or node.dynamic):
            return self._as_it_is(node, operands)
        return lower_strategy(self.build, strategy, node, operands)

    def _as_it_is(self, node: Node, operands: Sequence[Ref]) -> Sequence[Ref | None]:
        """Add a node that runs on whole operands: without a schema, or with dynamic results."""
        renamed = dict(zip(node.refs(), operands, strict=True))
        args = map_arg(node.args, lambda arg: renamed[arg.index] if type(arg) is Ref else arg)
        kwargs = tuple(
            (k, map_arg(a, lambda arg: renamed[arg.index] if type(arg) is Ref else arg))
            for k, a in node.kwargs
        )
        writes = tuple(renamed[value].index for value in node.writes)
        return self.build.add(
            Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)
        )

    def get(self, value: int, placement: Placement) -> Ref:
        """Return a value with a placement, moved there if it is not."""
        have = self.have[value]
        local = have.get(placement)
        if local is not None:
            return local
        base = self._base(value)
        source = R if R in have else base
        meta = self.values[value]
        assert meta is not None
        local = self.build.convert(have[source], meta.shape, source, placement)
        have[placement] = local
        return local

    def _base(self, value: int) -> Placement:
        """Return the placement that a value is kept with; convert the value to it if needed."""
        have = self.have[value]
        first = next(iter(have))
        kept = self.choice.kept.get(value)
        if kept and kept[0] not in have:
            meta = self.values[value]
            assert meta is not None
            have[kept[0]] = self.build.convert(have[first], meta.shape, first, kept[0])
        return kept[0] if kept else first

    def _outputs(self, wanted: Mapping[int, Placement]) -> tuple[tuple[Placement, ...], list[Ref]]:
        """Return the placements of the graph's outputs, and the values that have them."""
        before = len(self.build.nodes)
        placements = tuple([self._final(value, wanted) for value in self.graph.outputs])
        self.settled = len(self.build.nodes) == before
        return placements, [
            self._stored(v, la) for v, la in zip(self.graph.outputs, placements, strict=True)
        ]

    def _stored(self, value: int, placement: Placement) -> Ref:
        """Return an output with the strides that its readers expect: see ``local_meta``."""
        local = self.get(value, placement)
        whole, have = self.values[value], self.build.meta(local)
        assert whole is not None
        stride = contiguous_stride(have.shape) if isinstance(placement, Cut) else whole.stride
        if len(stride) != len(have.shape) or have.conj or have.neg or have.lies_as(stride):
            return local
        return self.build.restrided(local, stride)

    def _final(self, value: int, wanted: Mapping[int, Placement]) -> Placement:
        if value in wanted:
            return wanted[value]
        if next(iter(self.have[value])) == R:
            return R  # it is whole at no cost: blocks would lead where nobody asked for them
        base = self._base(value)
        if not isinstance(base, Partial | StridedShard):
            return base
        candidates = (la for la in self.have[value] if not isinstance(la, Partial | StridedShard))
        meta = self.values[value]
        assert meta is not None
        home = R if isinstance(base, StridedShard) else self.choice.gradients.get(meta.shape, R)
        return next(candidates, home)

    def _from(self, number: int) -> None:
        """Give the nodes added since the last call the source line of node ``number``."""
        added = len(self.build.nodes) - len(self.origins)
        self.origins += [self.graph.origin(number)] * added
        self.lines += [self.graph.line(number)] * added


# -- sharding: the whole program and the user's annotations in, each rank's program out ------------


@dataclass(frozen=True, slots=True)
class PartitionedProgram:
    """Programs of all ranks, and the placement of each output.

    Attributes:
        why_in_turn: the reason for which the stages of a pipeline take one microbatch after the
            other, and not in 1F1B order; empty where they do not.
    """

    graphs: tuple[Graph, ...]
    outputs: tuple[Sharding, ...]
    why_in_turn: str = ""


def shard(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Sharding],
    machine: Machine | None = None,
    decided: list[AxisStep] | None = None,
) -> PartitionedProgram:
    """Return the local programs of a graph, with its inputs on the mesh as ``inputs`` says.

    An input that is written keeps its placement; so does a value that was placed. Horizontal ops
    are taken apart first, so that each of their tensors may have its own placement.

    Args:
        machine: placements are chosen by its costs; None: ``cpu-generic``.
        decided: gets the decisions on each axis, outermost first.
    """
    graph, machine = SplitForeach().run(graph), machine or default_machine("cpu")
    kept = stored_shardings(graph, mesh, inputs)
    homes = [kept.get(value) for value in graph.outputs]
    graphs = [graph]
    placements: list[Placements] = [() for _ in graph.outputs]
    for at in range(len(mesh.names)):
        wanted = [_wanted(home, at) for home in homes]
        chosen: Sequence[Placement] = [R if home is None else home for home in wanted]
        if mesh.sizes[at] > 1:  # else each block is the whole value
            axis = _Axis(mesh, at, inputs, machine.along(mesh.names[at]))
            apart = classes(graphs)
            programs = _agreed(axis, apart, wanted, decided)
            ranks = {id(graph): locals_ for graph, locals_ in zip(apart, programs, strict=True)}
            graphs = classified([local.graph for graph in graphs for local in ranks[id(graph)]])
            chosen = programs[0][0].outputs
        placements = [(*had, placement) for had, placement in zip(placements, chosen, strict=True)]
    outputs = tuple([
        Sharding(had) if home is None else home._replace(placements=had)
        for had, home in zip(placements, homes, strict=True)
    ])  # fmt: skip
    return PartitionedProgram(tuple(by_class(without_places, graphs)), outputs)


def _agreed(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Placement | None],
    decided: list[AxisStep] | None = None,
) -> list[list[LocalProgram]]:
    """Return the programs of each class's ranks along an axis.

    Graphs of ranks that meet on an earlier axis must agree on the placements of the values that
    they exchange there. Their blocks may differ in size, so they may not; then they exchange whole
    values.
    """
    choices, first = _choices(axis, graphs, wanted)
    exchanged = {_exchanged(graph, choice) for graph, choice in zip(graphs, choices, strict=True)}
    if len(exchanged) > 1:
        choices, first = _choices(axis, graphs, wanted, exchange_whole=True)
    known: list[LocalProgram | None] = [first if first.settled else None]
    known += [None] * (len(graphs) - 1)
    programs = [
        axis.partitioned(graph, choice, first.outputs, local)
        for graph, choice, local in zip(graphs, choices, known, strict=True)
    ]
    if decided is not None:
        strategies, local = choices[0].strategies, programs[0][0]
        decided.append(
            AxisStep(axis, graphs[0], tuple(wanted), len(exchanged) > 1, local, strategies)
        )
    return programs


def _choices(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Placement | None],
    exchange_whole: bool = False,
) -> tuple[list[Choice], LocalProgram]:
    """Return the choice for each graph, and a program of the first one.

    The placements of its outputs are those of the outputs of all.
    """
    first = axis.choice(graphs[0], wanted, exchange_whole)
    local = axis.local(graphs[0], first, wanted, 0)
    others = [axis.choice(graph, local.outputs, exchange_whole) for graph in graphs[1:]]
    return [first, *others], local


def _exchanged(graph: Graph, choice: Choice) -> tuple[tuple[Placement, ...], ...]:
    """Return the placements of the values that a graph exchanges on earlier axes, in order."""
    strategies = zip(graph.nodes, choice.strategies, strict=True)
    return tuple(
        [
            (*strategy.inputs, *strategy.outputs)
            for node, strategy in strategies
            if node.op in COLLECTIVES
        ]
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Axis number ``at`` of a mesh, with all that is the same for the graphs cut along it."""

    mesh: Mesh
    at: int
    inputs: Sequence[Sharding]
    machine: Machine
    #: the last graph that was asked for, with its values that have a place
    _known: list[tuple[Graph, dict[int, Sharding]]] = field(default_factory=list, compare=False)

    @property
    def parts(self) -> int:
        """Number of ranks of the axis."""
        return self.mesh.sizes[self.at]

    def stored(self, graph: Graph) -> dict[int, Sharding]:
        """Return the values that have a place of their own."""
        if not self._known or self._known[0][0] is not graph:
            self._known[:] = [(graph, stored_shardings(graph, self.mesh, self.inputs))]
        return self._known[0][1]

    def choice(
        self, graph: Graph, wanted: Sequence[Placement | None], exchange_whole: bool
    ) -> Choice:
        """Return the strategies and placements that take the least time."""
        question = self.question(graph, wanted, exchange_whole)
        return self.chosen(graph, question, solve(question.problem))

    def question(
        self,
        graph: Graph,
        wanted: Sequence[Placement | None],
        exchange_whole: bool,
        whole: Collection[int] = (),
    ) -> Question:
        """Return the problem of choosing placements.

        Args:
            wanted: for each output the placement that it must have; None: whole or in blocks.
            exchange_whole: collectives of earlier axes are done with whole values.
            whole: nodes that every rank may do all of in any case, but for pins.
        """
        metas = graph.values
        allowed = [
            _whole_or_sharded(metas[value]) if placement is None else [placement]
            for value, placement in zip(graph.outputs, wanted, strict=True)
        ]

        def strategies(node: Node) -> Sequence[Strategy]:
            if exchange_whole and node.op in COLLECTIVES:
                return []
            if node.op in (PLACE, REDUCE_AS):
                return mark_strategies(node, self.at)
            return rules.strategies_of(node, metas, self.parts)

        annotations = annotations_of(graph, self.stored(graph), self.mesh, self.at)
        return build_problem(
            graph, strategies, self.parts, self.machine, annotations, allowed, whole=whole
        )

    def chosen(self, graph: Graph, question: Question, solution: Solution) -> Choice:
        """Return the strategies and placements of a solution."""
        given = [each.placements[self.at] for each in self.inputs]
        axis, values = self.mesh.names[self.at], graph.values
        gradients = {
            meta.shape: each.placements[self.at]
            for value, each in self.stored(graph).items()
            if each.unit is not None
            and each.unit.axis == axis
            and (meta := values[value]) is not None
            and isinstance(each.placements[self.at], Shard)
        }
        return Choice(
            question.strategies(solution), question.placements(solution), given, gradients
        )

    def partitioned(
        self,
        graph: Graph,
        choice: Choice,
        wanted: Sequence[Placement | None],
        first: LocalProgram | None = None,
    ) -> list[LocalProgram]:
        """Return the program of each rank; one object where all have the same.

        Args:
            first: that of the first rank, where it is there already.
        """
        first = first or self.local(graph, choice, wanted, 0)
        if first.alike:
            return [first] * self.parts
        return [first, *(self.local(graph, choice, wanted, n) for n in range(1, self.parts))]

    def local(
        self, graph: Graph, choice: Choice, wanted: Sequence[Placement | None], index: int
    ) -> LocalProgram:
        """Return the program of one rank."""
        homes = zip(graph.outputs, wanted, strict=True)
        known = {value: placement for value, placement in homes if placement is not None}
        return partition(graph, choice, self.mesh.names[self.at], self.parts, index, known)


@dataclass(frozen=True, slots=True)
class AxisStep:
    """Decisions on one axis, as rank 0 has them.

    Attributes:
        graph, local: before and after.
        wanted: for each output the placement that it must have; None: whole or in blocks.
        exchange_whole: collectives of earlier axes are done with whole values.
        strategies: of each node.
    """

    axis: _Axis
    graph: Graph
    wanted: tuple[Placement | None, ...]
    exchange_whole: bool
    local: LocalProgram
    strategies: Sequence[Strategy]

    @property
    def name(self) -> str:
        """The name of the axis."""
        return self.axis.mesh.names[self.axis.at]

    def question(self, whole: Collection[int] = ()) -> Question:
        """Return the problem of this step; every rank may also do all of the nodes in ``whole``."""
        return self.axis.question(self.graph, self.wanted, self.exchange_whole, whole)

    def other(self, question: Question, solution: Solution) -> LocalProgram:
        """Return the program after another choice."""
        choice = self.axis.chosen(self.graph, question, solution)
        return self.axis.local(self.graph, choice, self.wanted, 0)


def _wanted(home: Sharding | None, at: int) -> Placement | None:
    """Return the placement that an output must have on an axis; None: any."""
    placement = None if home is None else home.placements[at]
    return None if isinstance(placement, Unspecified) else placement


def _whole_or_sharded(meta: TensorMeta | None) -> list[Placement]:
    assert meta is not None
    return [R, *(Shard(dim) for dim in shardable_dims(meta.shape))]
