"""Plan: the program of a rank, as a template plus sizes.

A template is a graph with symbolic sizes. A worker receives, decodes, checks and analyses it once;
the same program in other sizes is sent as the template's name and a few numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lazygt.graph.alias import Writes, analyse, draws, last_uses
from lazygt.graph.collectives import Communication, communications
from lazygt.graph.flags import Flags, shown_flags
from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph, print_graph, verify
from lazygt.graph.ops import CustomOp
from lazygt.graph.sizes import Sizes, SymbolicGraph
from lazygt.host.gc_pause import gc_paused
from lazygt.runtime import custom_ops
from lazygt.runtime.graph_codec import decode_program, encode_graph, plan_name, template_name
from lazygt.runtime.wire import Buffer


@dataclass(frozen=True)
class Schedule:
    """Graph with an execution schedule: in-place writes and lifetimes."""

    graph: Graph  # the nodes, in the order in which they run
    #: nodes that write in place, inputs that are overwritten, and outputs to copy
    writes: Writes
    frees: tuple[tuple[int, ...], ...]  # for each node, the values that are freed after it

    @staticmethod
    def of(graph: Graph) -> Schedule:
        """Build the schedule of a graph."""
        return Schedule(graph, analyse(graph), _dead_after_node(graph))

    def notes(self) -> list[str]:
        """Return a note for each node: its write modes and the values freed after it."""
        frees = [" ".join(f"%{value}" for value in values) for values in self.frees]
        return [
            "; ".join(note for note in (", ".join(modes), f"free {freed}" if freed else "") if note)
            for modes, freed in zip(self.writes.modes, frees, strict=True)
        ]


class PlanTemplate:
    """Common part of plans that differ in sizes alone: a symbolic graph.

    Attributes:
        symbolic: the graph, with symbols for sizes.
        flags: torch's flags that its plans run under.
        sent_to: ranks that have received the template.
        keeps: objects that have to live as long as the template.
        checked: True once a plan of the template has run here with all results as inferred.
        code: executable code of the first such plan, reused for other sizes.
    """

    def __init__(self, symbolic: SymbolicGraph, encoded: bytes = b"", flags: Flags = ()) -> None:
        self.symbolic, self.flags = symbolic, flags
        self.sent_to: set[int] = set()
        self.keeps: Sequence[object] = ()
        self.checked = False
        self.code: Any = None
        self._encoded = encoded
        #: flags -> the same template under these flags
        self._by_flags: dict[Flags, PlanTemplate] = {}

    @staticmethod
    @gc_paused()
    def decoded(data: Buffer) -> PlanTemplate:
        """Decode a template.

        Raises:
            ProtocolError: the data is no graph.
            GraphError: the graph breaks its own rules.
        """
        graph, flags = decode_program(data, symbolic=True)
        verify(graph)
        symbolic = SymbolicGraph(graph)
        symbolic.check()
        return PlanTemplate(symbolic, bytes(data), flags)

    def under(self, flags: Flags) -> PlanTemplate:
        """Return the same program under these flags."""
        if flags == self.flags:
            return self
        if flags not in self._by_flags:
            self._by_flags[flags] = PlanTemplate(self.symbolic, flags=flags)
        return self._by_flags[flags]

    @cached_property
    def encoded(self) -> bytes:
        """The template's encoding for messages."""
        return self._encoded or encode_graph(self.symbolic.graph, self.flags)

    @cached_property
    def digest(self) -> bytes:
        """Name of the template: a 16-byte hash of its content."""
        return template_name(self.encoded)

    @property
    def ops(self) -> set[str]:
        """Names of the ops of all steps."""
        return {node.op for node in self._schedule.graph.nodes}

    @cached_property
    def custom_ops(self) -> Sequence[CustomOp]:
        """Custom ops that the graph uses."""
        return custom_ops.custom_ops_of(self.symbolic.graph)

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """See ``Plan.origins``."""
        graph = self.symbolic.graph
        if all(node.body is None for node in graph.nodes):
            return graph.origins
        origins: list[int] = []
        for number, node in enumerate(graph.nodes):
            if node.body is None:
                origins.append(graph.origin(number))
            else:
                origins.extend(map(node.body.origin, range(len(node.body.nodes))))
        return tuple(origins)

    def steps(self, sizes: Sizes) -> Schedule:
        """Build the schedule of a plan's steps.

        Writes and frees are the same for all sizes: they depend only on the equality of sizes, and
        equal sizes share a symbol.
        """
        return replace(self._schedule, graph=self._steps.in_sizes(sizes))

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule.of(expand_fused(self.symbolic.graph))

    @cached_property
    def _steps(self) -> SymbolicGraph:
        graph = self._schedule.graph
        return self.symbolic if graph is self.symbolic.graph else SymbolicGraph(graph)


class Plan:
    """The result of the passes on a graph, ready to run. Immutable.

    Args:
        graph: the graph after the passes, with fused nodes.
        decided: the schedule of the steps, if it differs from the default one of the graph.
        mesh: the mesh of ranks; not compared.
        backward: numbers of the recorded ops that autograd ran; not compared.
        form: template and sizes, which determine the graph if ``graph`` is None.
    """

    def __init__(
        self,
        graph: Graph | None = None,
        decided: Schedule | None = None,
        mesh: Mesh | None = None,
        backward: frozenset[int] = frozenset(),
        *,
        form: tuple[PlanTemplate, Sizes] | None = None,
    ) -> None:
        assert graph is not None or form is not None
        self._graph, self._form = graph, form
        self.decided, self.mesh, self.backward = decided, mesh, backward

    @staticmethod
    def build(graph: Graph) -> Plan:
        """Build the plan of a graph.

        Raises:
            GraphError: when the graph breaks its own rules.
        """
        verify(graph)
        return Plan(graph)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        program, other_program = (self.graph, self.decided), (other.graph, other.decided)
        return program == other_program and self.flags == other.flags

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _template_and_sizes(self) -> tuple[PlanTemplate, Sizes]:
        """The plan's graph with symbolic sizes, and its own sizes."""
        if self._form is not None:
            return self._form
        assert self._graph is not None
        symbolic, sizes = SymbolicGraph.of(self._graph)
        return PlanTemplate(symbolic), sizes

    @property
    def template(self) -> PlanTemplate:
        """The template, shared by plans that differ in sizes alone."""
        return self._template_and_sizes[0]

    @property
    def sizes(self) -> Sizes:
        """Values of the template's size symbols."""
        return self._template_and_sizes[1]

    @property
    def flags(self) -> Flags:
        """torch's flags that the plan runs under."""
        return self.template.flags

    def recorded(self, backward: frozenset[int], flags: Flags) -> Plan:
        """Return the same plan with the flags of its recording.

        Args:
            backward: numbers of the recorded ops that autograd ran.
        """
        form = self.template.under(flags), self.sizes
        return Plan(self._graph, self.decided, self.mesh, backward, form=form)

    def resized(self, sizes: Sizes) -> Plan:
        """Return the same program in other sizes."""
        return Plan(mesh=self.mesh, backward=self.backward, form=(self.template, sizes))

    @cached_property
    def graph(self) -> Graph:
        """The graph after the passes, with fused nodes."""
        if self._graph is not None:
            return self._graph
        return self.template.symbolic.in_sizes(self.sizes)

    @property
    def outline(self) -> Graph:
        """The graph, or the symbolic one (no copy) for callers that need no sizes."""
        return self._graph or self.template.symbolic.graph

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the plan itself, in the client and in each worker."""
        return self.outline.nbytes

    @cached_property
    def steps(self) -> Schedule:
        """The schedule of single ops, with fused nodes expanded; not needed to send a plan."""
        if self.decided is None and self._form is not None:
            return self.template.steps(self.sizes)
        return self.decided or Schedule.of(expand_fused(self.graph))

    @property
    def origins(self) -> tuple[int, ...]:
        """For each step, the number of its recorded op; empty: the same numbers."""
        return self.template.origins

    def with_fused(self, fused: Collection[int]) -> Schedule:
        """Return the schedule in which these fused nodes are one step, and all others expanded."""
        return Schedule.of(expand_fused(self.graph, fused))

    @cached_property
    def collectives(self) -> tuple[Communication, ...]:
        """Communication of this rank in one run, in launch order."""
        return communications(self.steps.graph, self.mesh)

    @cached_property
    def draws(self) -> bool:
        """True if the plan reads or writes the random generator."""
        return any(map(draws, self.steps.graph.nodes))

    @property
    def returns_dynamic(self) -> bool:
        """True if the last node is data-dependent: its results are described to the client."""
        nodes = self.outline.nodes
        return bool(nodes) and nodes[-1].dynamic

    @cached_property
    def digest(self) -> bytes:
        """Name of the plan: a 16-byte hash of its template's name and its sizes."""
        return plan_name(self.template.digest, self.sizes)

    def __str__(self) -> str:
        shown = Schedule.of(self.graph)
        flags = f" under {shown_flags(self.flags)}" if self.flags else ""
        return print_graph(self.graph, f"plan {self.digest.hex()[:12]}{flags}", shown.notes())


def _dead_after_node(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return for each node the values without later uses (liveness analysis)."""
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
