"""Plan: what a rank runs. Frozen, printable, priced and validated; also what travels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from lazygt.graph.alias import Writes, analyse, last_uses
from lazygt.graph.node import Graph
from lazygt.graph.text import print_graph
from lazygt.graph.verify import verify
from lazygt.runtime.wire import encode_graph


@dataclass(frozen=True)
class Plan:
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
    def build(graph: Graph) -> Plan:
        """The plan of a graph.

        Raises:
            GraphError: when the graph breaks its own rules.
        """
        verify(graph)
        return Plan(graph, analyse(graph), _frees(graph))

    @property
    def asks(self) -> bool:
        """Whether the last node's results have to be described to the client."""
        return bool(self.graph.nodes) and self.graph.nodes[-1].dynamic

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that name the plan: a hash of its graph's content."""
        return hashlib.sha256(encode_graph(self.graph)).digest()[:16]

    def __str__(self) -> str:
        frees = [" ".join(f"%{i}" for i in values) for values in self.frees]
        notes = [
            "; ".join(
                part
                for part in (
                    ", ".join(modes),
                    f"free {freed}" if freed else "",
                )
                if part
            )
            for modes, freed in zip(self.writes.modes, frees, strict=True)
        ]
        return print_graph(self.graph, name=f"plan {self.digest.hex()[:12]}", notes=notes)


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
