"""Choice of placements on one mesh axis, as a problem for the solver.

A variable a node: the strategy that it runs as. A variable a value with several users: the
placement that it is kept with for all of them, and one more where it is partial. A factor for every
node's time, and one for every use: the time to make the wanted placement of those at hand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lazygt.graph.node import Graph
from lazygt.graph.placement import Placement
from lazygt.machine import Machine
from lazygt.passes.sharding.annotations import Annotation, infer_annotations
from lazygt.passes.sharding.connections import Connections
from lazygt.passes.sharding.cost import Copies, Options, ReshardingCosts
from lazygt.passes.sharding.def_use import def_use
from lazygt.passes.sharding.propagate import open_strategies
from lazygt.passes.sharding.rules.base import Strategy
from lazygt.passes.sharding.solver import Problem, Solution
from lazygt.passes.sharding.strategies import StrategiesOf, StrategyCatalogue, StrategySet


@dataclass(frozen=True, slots=True)
class Question:
    """Problem, with the meaning of its variables.

    Attributes:
        problem: costs are in ticks (picoseconds).
        entries: the strategies of each node; variable ``n`` chooses one for node ``n``.
        kept: value -> (its variable, the placements that its users find by each choice, in the
            order to make them). A value that is not here is used as it was made.
    """

    problem: Problem
    entries: Sequence[StrategySet]
    kept: Mapping[int, tuple[int, Options]]

    def strategies(self, solution: Solution) -> list[Strategy]:
        """Return the strategy of each node."""
        chosen = zip(self.entries, solution.choices, strict=False)
        return [entry.strategies[choice] for entry, choice in chosen]

    def placements(self, solution: Solution) -> dict[int, Copies]:
        """Return the placements of each value in ``kept``."""
        return {v: options[solution.choices[at]] for v, (at, options) in self.kept.items()}


def build_problem(
    graph: Graph,
    strategies_of: StrategiesOf,
    parts: int,
    machine: Machine,
    annotations: Mapping[int, Annotation] | None = None,
    outputs: Sequence[Collection[Placement] | None] = (),
    explore: bool = False,
    whole: Collection[int] = (),
) -> Question:
    """Build the problem of placing a graph's values on an axis of ``parts`` ranks.

    Args:
        strategies_of: the strategies of a node; asked once for each kind of node.
        annotations: by number of the value; an input without one is given whole.
        outputs: for each output the placements that it may have; None, and for all when there is
            nothing: any.
        explore: shard also values that no annotation leads to.
        whole: nodes, by number, that every rank may do all of in any case, but for pins.

    Raises:
        ValueError: an annotation for a value that is not there, or placements for another number of
            outputs.
    """
    annotations = annotations or {}
    metas = graph.values
    _check(graph, len(metas), annotations, outputs)
    chains = def_use(graph)
    catalogue = StrategyCatalogue(chains, metas, strategies_of, parts, machine)
    annotations = infer_annotations(
        chains, metas, catalogue.entries, catalogue.numbers, annotations
    )
    entries, grown = open_strategies(chains, metas, catalogue, annotations, explore, whole)
    connections = Connections(chains, metas, entries, ReshardingCosts(machine, parts), grown)
    connections.add_all(annotations, _allowed(graph, outputs))
    factors = [((), np.array(connections.constant)), *connections.factors]
    return Question(Problem(connections.sizes, factors), entries, connections.kept)


def _check(
    graph: Graph,
    count: int,
    annotations: Mapping[int, Annotation],
    outputs: Sequence[Collection[Placement] | None],
) -> None:
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
    """Return the sets of placements that each value must have one of, as an output."""
    allowed: dict[int, list[Collection[Placement]]] = {}
    for value, placements in zip(graph.outputs, outputs, strict=False):
        if placements is not None and placements not in allowed.setdefault(value, []):
            allowed[value].append(placements)
    return allowed
