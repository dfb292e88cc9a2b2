"""Plan: what a rank runs. Frozen, printable, priced and validated; also what travels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from lazygt.graph.alias import Writes, analyse, last_uses
from lazygt.graph.communication import Communication, communications
from lazygt.graph.fusion import inline
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph
from lazygt.graph.text import print_graph
from lazygt.graph.verify import verify
from lazygt.runtime.wire import encode_graph, plan_name


@dataclass(frozen=True)
class Schedule:
    """A graph with everything about its execution decided.

    Attributes:
        graph: the nodes, in the order in which they run.
        writes: where writes happen in place, which inputs they need to own, what is copied out.
        frees: for each node the values that are dropped after it.
    """

    graph: Graph
    writes: Writes
    frees: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: Graph) -> Schedule:
        """The schedule of a graph."""
        return Schedule(graph, analyse(graph), _frees(graph))

    def notes(self) -> list[str]:
        """For each node: how it writes, and what dies after it."""
        frees = [" ".join(f"%{value}" for value in values) for values in self.frees]
        return [
            "; ".join(part for part in (", ".join(modes), f"free {freed}" if freed else "") if part)
            for modes, freed in zip(self.writes.modes, frees, strict=True)
        ]


@dataclass(frozen=True)
class Plan:
    """What the passes made of a graph, ready to run.

    Attributes:
        graph: as the passes left it, with fused nodes.
        decided: the schedule of its steps, if it is not the one that follows from the graph.
        mesh: the ranks that it is run on, for those who ask; no part of what it is.
        backward: numbers of the recorded ops that autograd ran; no part of it either.
    """

    #: Set by ``lazygt.faces``: what a run costs.
    explain: ClassVar[Callable[..., Any]]

    graph: Graph
    decided: Schedule | None = None
    mesh: Mesh | None = field(default=None, compare=False)
    backward: frozenset[int] = field(default=frozenset(), compare=False)

    @staticmethod
    def build(graph: Graph) -> Plan:
        """The plan of a graph.

        Raises:
            GraphError: when the graph breaks its own rules.
        """
        verify(graph)
        return Plan(graph)

    @cached_property
    def steps(self) -> Schedule:
        """The nodes one by one, fused ones opened. Who only ships a plan need not ask."""
        return self.decided or Schedule.of(inline(self.graph))

    @property
    def origins(self) -> tuple[int, ...]:
        """For each of the steps the recorded op that it comes from; empty: the same numbers."""
        graph = self.graph
        if all(node.body is None for node in graph.nodes):
            return graph.origins
        origins: list[int] = []
        for number, node in enumerate(graph.nodes):
            if node.body is None:
                origins.append(graph.origin(number))
            else:
                origins.extend(map(node.body.origin, range(len(node.body.nodes))))
        return tuple(origins)

    def with_fused(self, kept: Collection[int]) -> tuple[Schedule, tuple[int, ...]]:
        """The schedule in which only the fused nodes of these numbers are opened no further.

        Returns:
            It, and for each of its nodes the number of its first step in ``steps``.
        """
        firsts: list[int] = []
        count = 0
        for number, node in enumerate(self.graph.nodes):
            members = 1 if node.body is None else len(node.body.nodes)
            whole = node.body is None or number in kept
            firsts.extend([count] if whole else range(count, count + members))
            count += members
        return Schedule.of(inline(self.graph, kept)), tuple(firsts)

    @cached_property
    def collectives(self) -> tuple[Communication, ...]:
        """What this rank exchanges with others in one run, in the order of launch."""
        return communications(self.steps.graph, self.mesh)

    @property
    def asks(self) -> bool:
        """Whether the last node's results have to be described to the client."""
        return bool(self.graph.nodes) and self.graph.nodes[-1].dynamic

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name the plan: a hash of its graph's content."""
        return plan_name(encode_graph(self.graph))

    def __str__(self) -> str:
        shown = Schedule.of(self.graph)
        return print_graph(self.graph, f"plan {self.digest.hex()[:12]}", shown.notes())


def _frees(graph: Graph) -> tuple[tuple[int, ...], ...]:
    uses = last_uses(graph)
    frees: list[list[int]] = [[] for _ in graph.nodes]
    for value in range(len(graph.inputs)):
        if 0 <= uses[value] < len(graph.nodes):
            frees[uses[value]].append(value)
    for number, (_, results) in enumerate(graph.numbered()):
        for value in results:
            last = max(uses[value], number)
            if last < len(graph.nodes):
                frees[last].append(value)
    return tuple(tuple(values) for values in frees)
