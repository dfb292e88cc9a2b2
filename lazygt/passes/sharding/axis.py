"""Sharding (SPMD partitioning): from a program with annotations to each rank's program.

Mesh axes are sharded one after another, outermost first. For each axis: list the strategies of
every op, choose among them exactly, write the local programs. Annotations are nodes of the graph
(``lazygt.place``), so that they survive the renumbering of values from axis to axis; the last step
removes them.
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
from lazygt.passes.sharding.rules.pointwise import SplitForeach
from lazygt.passes.sharding.rules.strategy import Strategy, lower_strategy, shardable_dims
from lazygt.passes.sharding.solver import Solution, solve

# -- lowering of the global program to local programs ----------------------------------------------
# One mesh axis at a time. Every rank of the axis gets a graph of its own, since shards may differ
# in size. All ranks run the same collectives in the same order, because their graphs are written by
# the same walk over the same global graph. A collective is inserted where a placement changes.

R = Replicate()


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen strategies and placements of a graph on one axis."""

    strategies: Sequence[Strategy]  # of each node
    #: value -> the placements provided for its users, in order of conversion; any other value is
    #: used with the placement that it was produced with
    kept: Mapping[int, tuple[Placement, ...]]
    inputs: Sequence[Placement]  # the placement of each input
    #: shape -> the placement for partial outputs of that shape, such as gradients of sharded
    #: parameters; other partial outputs are all-reduced
    gradients: Mapping[tuple[int, ...], Placement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """Local program of one rank of an axis, with the placement of each of its outputs."""

    graph: Graph
    outputs: tuple[Placement, ...]
    #: for each value of the global program: placement -> number of the local value with that
    #: placement; the placement that it was produced with is the first
    values: tuple[Mapping[Placement, int], ...] = ()
    alike: bool = False  # whether every rank of the axis has the same program
    #: whether requesting ``outputs`` as the wanted placements gives the same program
    settled: bool = False


def partition(
    graph: Graph,
    choice: Choice,
    axis: str,
    axis_size: int,
    index: int,
    wanted: Mapping[int, Placement] | None = None,
) -> LocalProgram:
    """Return the program of rank ``index`` of ``axis_size`` on ``axis``.

    Args:
        wanted: output value -> its required placement. Other outputs have the placement that they
            were produced with; partial ones are reduced, see ``Choice.gradients``.
    """
    return _Partitioner(graph, choice, axis, axis_size, index).run(wanted or {})


class _Partitioner:
    """Writer of the local graph of one rank, in one walk over the global graph."""

    def __init__(self, graph: Graph, choice: Choice, axis: str, axis_size: int, index: int) -> None:
        self.graph, self.choice, self.values = graph, choice, graph.values
        placed_inputs = list(zip(graph.inputs, choice.inputs, strict=True))
        metas = [local_meta(meta, placement, axis_size, index) for meta, placement in placed_inputs]
        self.build = Builder(metas, graph.params, axis=axis, parts=axis_size, index=index)
        # the builder records whether shard sizes differ between ranks
        for meta, placement in placed_inputs:
            self.build.local(meta.shape, placement)
        #: value -> placement -> the local value
        self.local_values: list[dict[Placement, Ref]] = [
            {placement: ref(number)} for number, placement in enumerate(choice.inputs)
        ]
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.settled = False

    def run(self, wanted: Mapping[int, Placement]) -> LocalProgram:
        """Return the local program; ``wanted`` as in ``partition``."""
        placements: tuple[Placement, ...] = ()
        outputs: list[Ref] = []
        for number, (node, strategy) in enumerate(
            zip(self.graph.nodes, self.choice.strategies, strict=True)
        ):
            if node.dynamic:  # stays the last node, so all outputs are converted before it
                placements, outputs = self._outputs(wanted)
            operands = [
                self.get(v, placement)
                for v, placement in zip(node.refs(), strategy.inputs, strict=True)
            ]
            results = self._add_node(node, strategy, operands)
            for result, placement in zip(results, strategy.outputs, strict=True):
                self.local_values.append({} if result is None else {placement: result})
            self._set_source_lines(number)
        if len(placements) < len(self.graph.outputs):
            placements, outputs = self._outputs(wanted)
        self._set_source_lines(max(len(self.graph.nodes) - 1, 0))
        local_graph = self.build.graph(outputs)
        graph = replace(local_graph, lines=tuple(self.lines), origins=tuple(self.origins))
        alike = not self.build.differs
        return LocalProgram(graph, placements, self._value_numbers(), alike, self.settled)

    def _value_numbers(self) -> tuple[Mapping[Placement, int], ...]:
        return tuple(
            [
                {placement: local.index for placement, local in placements.items()}
                for placements in self.local_values
            ]
        )

    def _add_node(
        self, node: Node, strategy: Strategy, operands: Sequence[Ref]
    ) -> Sequence[Ref | None]:
        if strategy.lower is None and (node.op.startswith("lazygt.") or node.dynamic):
            return self._add_unsharded(node, operands)
        return lower_strategy(self.build, strategy, node, operands)

    def _add_unsharded(self, node: Node, operands: Sequence[Ref]) -> Sequence[Ref | None]:
        """Add a node without a schema, or with dynamic results, on replicated operands."""
        local_operands = dict(zip(node.refs(), operands, strict=True))
        args = map_arg(
            node.args, lambda arg: local_operands[arg.index] if type(arg) is Ref else arg
        )
        kwargs = tuple(
            (
                name,
                map_arg(kwarg, lambda arg: local_operands[arg.index] if type(arg) is Ref else arg),
            )
            for name, kwarg in node.kwargs
        )
        writes = tuple(local_operands[value].index for value in node.writes)
        return self.build.add(
            Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)
        )

    def get(self, value: int, placement: Placement) -> Ref:
        """Return a value with a placement; convert it if needed."""
        converted = self.local_values[value]
        local = converted.get(placement)
        if local is not None:
            return local
        base = self._base_placement(value)
        source = R if R in converted else base
        meta = self.values[value]
        assert meta is not None
        local = self.build.convert(converted[source], meta.shape, source, placement)
        converted[placement] = local
        return local

    def _base_placement(self, value: int) -> Placement:
        """Return the first placement provided for a value's users; convert the value if needed."""
        converted = self.local_values[value]
        produced = next(iter(converted))
        provided = self.choice.kept.get(value)
        if provided and provided[0] not in converted:
            meta = self.values[value]
            assert meta is not None
            converted[provided[0]] = self.build.convert(
                converted[produced], meta.shape, produced, provided[0]
            )
        return provided[0] if provided else produced

    def _outputs(self, wanted: Mapping[int, Placement]) -> tuple[tuple[Placement, ...], list[Ref]]:
        """Return the placements of the graph's outputs, and the local output values."""
        before = len(self.build.nodes)
        placements = tuple([self._output_placement(value, wanted) for value in self.graph.outputs])
        self.settled = len(self.build.nodes) == before
        return placements, [
            self._restrided_output(value, placement)
            for value, placement in zip(self.graph.outputs, placements, strict=True)
        ]

    def _restrided_output(self, value: int, placement: Placement) -> Ref:
        """Return an output with the strides that its readers expect; see ``local_meta``."""
        local = self.get(value, placement)
        global_meta, actual = self.values[value], self.build.meta(local)
        assert global_meta is not None
        stride = (
            contiguous_stride(actual.shape) if isinstance(placement, Cut) else global_meta.stride
        )
        if len(stride) != len(actual.shape) or actual.conj or actual.neg or actual.lies_as(stride):
            return local
        return self.build.restrided(local, stride)

    def _output_placement(self, value: int, wanted: Mapping[int, Placement]) -> Placement:
        """Return the placement of an output: neither partial nor interleaved."""
        if value in wanted:
            return wanted[value]
        if next(iter(self.local_values[value])) == R:
            return R  # replicated at no cost: no reason to shard
        base = self._base_placement(value)
        if not isinstance(base, Partial | StridedShard):
            return base
        candidates = (
            placement
            for placement in self.local_values[value]
            if not isinstance(placement, Partial | StridedShard)
        )
        meta = self.values[value]
        assert meta is not None
        fallback = R if isinstance(base, StridedShard) else self.choice.gradients.get(meta.shape, R)
        return next(candidates, fallback)

    def _set_source_lines(self, number: int) -> None:
        """Give the nodes added since the last call the source line of node ``number``."""
        added = len(self.build.nodes) - len(self.origins)
        self.origins += [self.graph.origin(number)] * added
        self.lines += [self.graph.line(number)] * added


# -- sharding along all mesh axes ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionedProgram:
    """Programs of all ranks, and the placement of each output."""

    graphs: tuple[Graph, ...]
    outputs: tuple[Sharding, ...]
    #: the reason why pipeline stages run the recorded order, not 1F1B; else empty
    why_in_turn: str = ""


def shard(
    graph: Graph,
    mesh: Mesh,
    inputs: Sequence[Sharding],
    machine: Machine | None = None,
    decided: list[AxisStep] | None = None,
) -> PartitionedProgram:
    """Return the local programs of a graph.

    A written input keeps its placement, and so does a placed value. Horizontal ops are split first,
    so that each of their tensors may have its own placement.

    Args:
        inputs: the sharding of each input.
        machine: cost model of the choice of placements; None: ``cpu-generic``.
        decided: list to which the decisions on each axis are appended, outermost first.
    """
    graph, machine = SplitForeach().run(graph), machine or default_machine("cpu")
    stored = stored_shardings(graph, mesh, inputs)
    output_shardings = [stored.get(value) for value in graph.outputs]
    graphs = [graph]
    placements: list[Placements] = [() for _ in graph.outputs]
    for axis_index in range(len(mesh.names)):
        wanted = [_wanted(sharding, axis_index) for sharding in output_shardings]
        chosen: Sequence[Placement] = [R if sharding is None else sharding for sharding in wanted]
        if mesh.sizes[axis_index] > 1:  # on an axis of one rank nothing is sharded
            axis = _Axis(mesh, axis_index, inputs, machine.along(mesh.names[axis_index]))
            distinct = classes(graphs)
            programs = _consistent_programs(axis, distinct, wanted, decided)
            rank_programs = {
                id(graph): locals_ for graph, locals_ in zip(distinct, programs, strict=True)
            }
            graphs = classified(
                [local.graph for graph in graphs for local in rank_programs[id(graph)]]
            )
            chosen = programs[0][0].outputs
        placements = [
            (*placed, placement) for placed, placement in zip(placements, chosen, strict=True)
        ]
    outputs = tuple([
        Sharding(placed) if sharding is None else sharding._replace(placements=placed)
        for placed, sharding in zip(placements, output_shardings, strict=True)
    ])  # fmt: skip
    return PartitionedProgram(tuple(by_class(without_places, graphs)), outputs)


def _consistent_programs(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Placement | None],
    decided: list[AxisStep] | None = None,
) -> list[list[LocalProgram]]:
    """Return the programs of the ranks of an axis, for each distinct graph.

    Graphs of ranks that communicate on an earlier axis must have the same placements for the values
    that they exchange there. Since shard sizes differ, the choices may differ; then the values are
    exchanged replicated.

    Args:
        graphs: the distinct graphs after the earlier axes.
        wanted: for each output its required placement; None: any.
        decided: list to which the decisions on the axis are appended.
    """
    choices, first = _choices(axis, graphs, wanted)
    exchanged_placements = {
        _exchanged_placements(graph, choice) for graph, choice in zip(graphs, choices, strict=True)
    }
    if len(exchanged_placements) > 1:
        choices, first = _choices(axis, graphs, wanted, exchange_whole=True)
    known_first: list[LocalProgram | None] = [first if first.settled else None]
    known_first += [None] * (len(graphs) - 1)
    programs = [
        axis.partitioned(graph, choice, first.outputs, local)
        for graph, choice, local in zip(graphs, choices, known_first, strict=True)
    ]
    if decided is not None:
        strategies, local = choices[0].strategies, programs[0][0]
        decided.append(
            AxisStep(
                axis, graphs[0], tuple(wanted), len(exchanged_placements) > 1, local, strategies
            )
        )
    return programs


def _choices(
    axis: _Axis,
    graphs: Sequence[Graph],
    wanted: Sequence[Placement | None],
    exchange_whole: bool = False,
) -> tuple[list[Choice], LocalProgram]:
    """Return the choice for each graph, and the program of the first graph on rank 0.

    All graphs have the output placements of that program.
    """
    first = axis.choice(graphs[0], wanted, exchange_whole)
    local = axis.local(graphs[0], first, wanted, 0)
    others = [axis.choice(graph, local.outputs, exchange_whole) for graph in graphs[1:]]
    return [first, *others], local


def _exchanged_placements(graph: Graph, choice: Choice) -> tuple[tuple[Placement, ...], ...]:
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
    """Mesh axis number ``at``, with everything that the graphs sharded along it share."""

    mesh: Mesh
    at: int
    inputs: Sequence[Sharding]
    machine: Machine
    #: the last graph, with the shardings of its stored values
    _last_stored: list[tuple[Graph, dict[int, Sharding]]] = field(
        default_factory=list, compare=False
    )

    @property
    def parts(self) -> int:
        """Number of ranks of the axis."""
        return self.mesh.sizes[self.at]

    def stored(self, graph: Graph) -> dict[int, Sharding]:
        """Return value -> sharding of a graph's stored values, cached for the last graph."""
        if not self._last_stored or self._last_stored[0][0] is not graph:
            self._last_stored[:] = [(graph, stored_shardings(graph, self.mesh, self.inputs))]
        return self._last_stored[0][1]

    def choice(
        self, graph: Graph, wanted: Sequence[Placement | None], exchange_whole: bool
    ) -> Choice:
        """Return the strategies and placements that take the least estimated time."""
        question = self.question(graph, wanted, exchange_whole)
        return self.chosen(graph, question, solve(question.problem))

    def question(
        self,
        graph: Graph,
        wanted: Sequence[Placement | None],
        exchange_whole: bool,
        whole: Collection[int] = (),
    ) -> Question:
        """Return the optimisation problem of choosing placements.

        Args:
            wanted: for each output its required placement; None: replicated or sharded.
            exchange_whole: run the collectives of earlier axes on replicated values.
            whole: nodes that may run replicated in any case, unless a fixed forbids it.
        """
        metas = graph.values
        allowed = [
            _replicated_or_sharded(metas[value]) if placement is None else [placement]
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
        input_placements = [sharding.placements[self.at] for sharding in self.inputs]
        axis, values = self.mesh.names[self.at], graph.values
        gradients = {
            meta.shape: sharding.placements[self.at]
            for value, sharding in self.stored(graph).items()
            if sharding.unit is not None
            and sharding.unit.axis == axis
            and (meta := values[value]) is not None
            and isinstance(sharding.placements[self.at], Shard)
        }
        return Choice(
            question.strategies(solution),
            question.placements(solution),
            input_placements,
            gradients,
        )

    def partitioned(
        self,
        graph: Graph,
        choice: Choice,
        wanted: Sequence[Placement | None],
        first: LocalProgram | None = None,
    ) -> list[LocalProgram]:
        """Return the program of each rank; one object where all programs are equal.

        Args:
            first: the program of the first rank, if it exists already.
        """
        first = first or self.local(graph, choice, wanted, 0)
        if first.alike:
            return [first] * self.parts
        return [first, *(self.local(graph, choice, wanted, n) for n in range(1, self.parts))]

    def local(
        self, graph: Graph, choice: Choice, wanted: Sequence[Placement | None], index: int
    ) -> LocalProgram:
        """Return the program of one rank."""
        wanted_of = zip(graph.outputs, wanted, strict=True)
        required = {value: placement for value, placement in wanted_of if placement is not None}
        return partition(graph, choice, self.mesh.names[self.at], self.parts, index, required)


@dataclass(frozen=True, slots=True)
class AxisStep:
    """Decisions on one axis, as rank 0 has them."""

    axis: _Axis
    graph: Graph  # graph, local: the program before and after
    #: for each output its required placement; None: replicated or sharded
    wanted: tuple[Placement | None, ...]
    exchange_whole: bool  # the collectives of earlier axes run on replicated values
    local: LocalProgram
    strategies: Sequence[Strategy]  # of each node

    @property
    def name(self) -> str:
        """The name of the axis."""
        return self.axis.mesh.names[self.axis.at]

    def question(self, whole: Collection[int] = ()) -> Question:
        """Return the problem of this step; the nodes in ``whole`` may also run replicated."""
        return self.axis.question(self.graph, self.wanted, self.exchange_whole, whole)

    def other(self, question: Question, solution: Solution) -> LocalProgram:
        """Return the program after another choice."""
        choice = self.axis.chosen(self.graph, question, solution)
        return self.axis.local(self.graph, choice, self.wanted, 0)


def _wanted(sharding: Sharding | None, axis_index: int) -> Placement | None:
    """Return the required placement of an output on an axis; None: any."""
    placement = None if sharding is None else sharding.placements[axis_index]
    return None if isinstance(placement, Unspecified) else placement


def _replicated_or_sharded(meta: TensorMeta | None) -> list[Placement]:
    """Return the placements of an output without a required placement."""
    assert meta is not None
    return [R, *(Shard(dim) for dim in shardable_dims(meta.shape))]
