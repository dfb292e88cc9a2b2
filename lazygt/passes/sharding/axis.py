"""Sharding (SPMD partitioning): from a program with annotations to each rank's program.

Mesh axes are sharded one after another, outermost first. For each axis: list the strategies of
every op, choose among them exactly, write the local programs. Annotations are nodes of the graph
(``lazygt.place``), so that they survive the renumbering of values from axis to axis; the last step
removes them.

A value is *stored* if it lives between ops or runs with a sharding of its own: inputs and what
follows from them (``stored_shardings``). A *wanted* placement is the required one of an output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lazygt.graph.liveness import def_use
from lazygt.graph.mesh import Mesh, Placements, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import COLLECTIVES, Placement, Replicate, Shard, Unspecified
from lazygt.machine import Machine, default_machine
from lazygt.passes.base import by_class, classes, classified
from lazygt.passes.sharding import rules
from lazygt.passes.sharding.choose import AxisProblem, Connections, ReshardingCosts
from lazygt.passes.sharding.choose.catalogue import StrategiesOf, StrategyCatalogue
from lazygt.passes.sharding.choose.solver import Problem, Solution, solve
from lazygt.passes.sharding.lower.partition import Choice, LocalProgram, partition
from lazygt.passes.sharding.marks import PLACE, REDUCE_AS, Annotation, without_places
from lazygt.passes.sharding.propagate import open_strategies
from lazygt.passes.sharding.propagate.placement_sources import (
    annotations_of,
    infer_annotations,
    mark_strategies,
    stored_shardings,
)
from lazygt.passes.sharding.rules.pointwise import SplitForeach
from lazygt.passes.sharding.rules.strategy import Strategy, shardable_dims

R = Replicate()


@dataclass(frozen=True, slots=True)
class PartitionedProgram:
    """Programs of all ranks, and the placement of each output."""

    graphs: tuple[Graph, ...]
    outputs: tuple[Sharding, ...]
    #: the reason why pipeline stages run in the recorded order, not by 1F1B; else empty
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
        choices, first = _choices(axis, graphs, wanted, exchange_replicated=True)
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
    exchange_replicated: bool = False,
) -> tuple[list[Choice], LocalProgram]:
    """Return the choice for each graph, and the program of the first graph on rank 0.

    All graphs have the output placements of that program.
    """
    first = axis.choice(graphs[0], wanted, exchange_replicated)
    local = axis.local(graphs[0], first, wanted, 0)
    others = [axis.choice(graph, local.outputs, exchange_replicated) for graph in graphs[1:]]
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
    def axis_size(self) -> int:
        """Number of ranks of the axis."""
        return self.mesh.sizes[self.at]

    def stored(self, graph: Graph) -> dict[int, Sharding]:
        """Return value -> sharding of a graph's stored values, cached for the last graph."""
        if not self._last_stored or self._last_stored[0][0] is not graph:
            self._last_stored[:] = [(graph, stored_shardings(graph, self.mesh, self.inputs))]
        return self._last_stored[0][1]

    def choice(
        self, graph: Graph, wanted: Sequence[Placement | None], exchange_replicated: bool
    ) -> Choice:
        """Return the strategies and placements that take the least estimated time."""
        axis_problem = self.axis_problem(graph, wanted, exchange_replicated)
        return self.chosen(graph, axis_problem, solve(axis_problem.problem))

    def axis_problem(
        self,
        graph: Graph,
        wanted: Sequence[Placement | None],
        exchange_replicated: bool,
        may_replicate: Collection[int] = (),
    ) -> AxisProblem:
        """Return the optimisation problem of choosing placements.

        Args:
            wanted: for each output its required placement; None: replicated or sharded.
            exchange_replicated: run the collectives of earlier axes on replicated values.
            may_replicate: nodes that may run replicated in any case, unless a fixed placement
                forbids it.
        """
        metas = graph.values
        allowed = [
            _replicated_or_sharded(metas[value]) if placement is None else [placement]
            for value, placement in zip(graph.outputs, wanted, strict=True)
        ]

        def strategies(node: Node) -> Sequence[Strategy]:
            if exchange_replicated and node.op in COLLECTIVES:
                return []
            if node.op in (PLACE, REDUCE_AS):
                return mark_strategies(node, self.at)
            return rules.strategies_of(node, metas, self.axis_size)

        annotations = annotations_of(graph, self.stored(graph), self.mesh, self.at)
        return build_problem(
            graph,
            strategies,
            self.axis_size,
            self.machine,
            annotations,
            allowed,
            may_replicate=may_replicate,
        )

    def chosen(self, graph: Graph, axis_problem: AxisProblem, solution: Solution) -> Choice:
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
            axis_problem.strategies(solution),
            axis_problem.placements(solution),
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
        if first.is_rank_independent:
            return [first] * self.axis_size
        return [first, *(self.local(graph, choice, wanted, n) for n in range(1, self.axis_size))]

    def local(
        self, graph: Graph, choice: Choice, wanted: Sequence[Placement | None], index: int
    ) -> LocalProgram:
        """Return the program of one rank."""
        wanted_of = zip(graph.outputs, wanted, strict=True)
        required = {value: placement for value, placement in wanted_of if placement is not None}
        return partition(graph, choice, self.mesh.names[self.at], self.axis_size, index, required)


@dataclass(frozen=True, slots=True)
class AxisStep:
    """Decisions on one axis, as rank 0 has them."""

    axis: _Axis
    graph: Graph  # graph, local: the program before and after
    #: for each output its required placement; None: replicated or sharded
    wanted: tuple[Placement | None, ...]
    exchange_replicated: bool  # the collectives of earlier axes run on replicated values
    local: LocalProgram
    strategies: Sequence[Strategy]  # of each node

    @property
    def name(self) -> str:
        """The name of the axis."""
        return self.axis.mesh.names[self.axis.at]

    def axis_problem(self, may_replicate: Collection[int] = ()) -> AxisProblem:
        """Return the problem of this step, in which ``may_replicate`` may also run replicated."""
        return self.axis.axis_problem(
            self.graph, self.wanted, self.exchange_replicated, may_replicate
        )

    def other(self, axis_problem: AxisProblem, solution: Solution) -> LocalProgram:
        """Return the program after another choice."""
        choice = self.axis.chosen(self.graph, axis_problem, solution)
        return self.axis.local(self.graph, choice, self.wanted, 0)


def _wanted(sharding: Sharding | None, axis_index: int) -> Placement | None:
    """Return the required placement of an output on an axis; None: any."""
    placement = None if sharding is None else sharding.placements[axis_index]
    return None if isinstance(placement, Unspecified) else placement


def _replicated_or_sharded(meta: TensorMeta | None) -> list[Placement]:
    """Return the placements of an output without a required placement."""
    assert meta is not None
    return [R, *(Shard(dim) for dim in shardable_dims(meta.shape))]


def build_problem(
    graph: Graph,
    strategies_of: StrategiesOf,
    axis_size: int,
    machine: Machine,
    annotations: Mapping[int, Annotation] | None = None,
    outputs: Sequence[Collection[Placement] | None] = (),
    explore: bool = False,
    may_replicate: Collection[int] = (),
) -> AxisProblem:
    """Build the problem of placing a graph's values on an axis of ``axis_size`` ranks.

    Args:
        strategies_of: returns the strategies of a node; called once for each kind of node.
        annotations: value -> annotation; an input without one is replicated.
        outputs: for each output the placements that it may have; None: any. Empty: any for all.
        explore: also shard values that no annotation leads to.
        may_replicate: nodes, by number, that may run replicated in any case, unless a fixed
            placement forbids it.

    Raises:
        ValueError: an annotation for a value that does not exist, or placements for another number
            of outputs.
    """
    annotations = annotations or {}
    metas = graph.values
    _check(graph, len(metas), annotations, outputs)
    chains = def_use(graph)
    catalogue = StrategyCatalogue(chains, metas, strategies_of, axis_size, machine)
    annotations = infer_annotations(
        chains, metas, catalogue.entries, catalogue.numbers, annotations
    )
    entries, broadcast = open_strategies(
        chains, metas, catalogue, annotations, explore, may_replicate
    )
    connections = Connections(
        chains, metas, entries, ReshardingCosts(machine, axis_size), broadcast
    )
    connections.add_all(annotations, _allowed(graph, outputs))
    factors = [((), np.array(connections.constant)), *connections.factors]
    return AxisProblem(Problem(connections.sizes, factors), entries, connections.provided)


def _check(
    graph: Graph,
    count: int,
    annotations: Mapping[int, Annotation],
    outputs: Sequence[Collection[Placement] | None],
) -> None:
    """Raise ValueError for annotations or outputs that the graph does not have.

    Args:
        count: number of values of the graph.
    """
    for value in annotations:
        if not 0 <= value < count:
            raise ValueError(f"an annotation for %{value}, but the graph has %0 to %{count - 1}")
    if outputs and len(outputs) != len(graph.outputs):
        raise ValueError(
            f"placements for {len(outputs)} outputs, but the graph has {len(graph.outputs)}"
        )


def _allowed(
    graph: Graph, outputs: Sequence[Collection[Placement] | None]
) -> dict[int, list[Collection[Placement]]]:
    """Return output value -> sets of placements; the value must have one of each set."""
    allowed: dict[int, list[Collection[Placement]]] = {}
    for value, placements in zip(graph.outputs, outputs, strict=False):
        if placements is not None and placements not in allowed.setdefault(value, []):
            allowed[value].append(placements)
    return allowed
