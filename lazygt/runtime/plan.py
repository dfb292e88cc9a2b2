"""Plan: what a rank runs. Frozen, printable, priced and validated; also what travels.

A `PlanRecord` is what the client keeps of the plans that the ranks run together, and what the
workers have been told of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lazygt.graph.alias import Writes, analyse, draws, last_uses
from lazygt.graph.collectives import Communication, communications
from lazygt.graph.fusion import expand_fused
from lazygt.graph.mesh import Mesh
from lazygt.graph.node import Graph, print_graph
from lazygt.graph.verify import verify
from lazygt.runtime.foreign import schema
from lazygt.runtime.graph_codec import encode_graph, plan_name
from lazygt.runtime.messages import Swap, encode_plan
from lazygt.runtime.wire import Buffer, DeltaCodec, encode


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
        return self.decided or Schedule.of(expand_fused(self.graph))

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
        return Schedule.of(expand_fused(self.graph, kept)), tuple(firsts)

    @cached_property
    def collectives(self) -> tuple[Communication, ...]:
        """What this rank exchanges with others in one run, in the order of launch."""
        return communications(self.steps.graph, self.mesh)

    @cached_property
    def draws(self) -> bool:
        """Whether it reads or writes the generator."""
        return any(map(draws, self.steps.graph.nodes))

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


class PlanRecord:
    """What the ranks run, with what they are known to remember of its last run.

    Args:
        plans: each rank's plan, or one that all of them run.
    """

    __slots__ = (
        "considered",
        "foreign",
        "frees",
        "inputs",
        "names",
        "numbers",
        "plan",
        "plans",
        "runs",
        "salt",
        "sent",
        "ships",
        "size",
        "swap",
    )

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        #: rank 0's
        self.plan = self.plans[0]
        self.salt, self.names = _names(self.plans)
        #: for each of ``plans`` the foreign ops that it names
        self.foreign = tuple([schema.foreign_ops(plan.graph) for plan in self.plans])
        self.inputs, self.frees = DeltaCodec(), DeltaCodec()
        #: the bits of the last run's run-time numbers
        self.numbers: bytes | None = None
        self.sent = False
        self.runs = 0
        #: how often it was shipped, and the bytes of one such message
        self.ships = self.size = 0
        #: (fused node, artifact) of the compiled tier, for each of ``plans``, once it is there
        self.swap: tuple[Sequence[tuple[int, str]], ...] = ()
        #: whether it has been decided what of it is compiled
        self.considered = False

    @property
    def nbytes(self) -> int:
        """What keeping it takes of the client's memory, about."""
        return sum(plan.graph.nbytes for plan in self.plans)

    def of(self, rank: int) -> int:
        """Which of ``plans`` a rank runs."""
        return rank if len(self.plans) > 1 else 0

    def name(self, rank: int) -> bytes:
        """What the rank's plan is called on the wire."""
        return self.names[self.of(rank)]


class PlanRecords:
    """The entries of the plans that may run again, and the swaps that are under way.

    Args:
        ranks: how many workers are told of them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._known: dict[bytes, PlanRecord] = {}
        #: no longer known; workers have not been told yet
        self._forgotten: list[PlanRecord] = []
        #: plans that are being swapped -> ranks that have not said so yet
        self.swapping: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[PlanRecord]:
        """Oldest first."""
        return iter(self._known.values())

    def of(self, plans: Sequence[Plan]) -> PlanRecord:
        """The entry of the ranks' plans: the one there is for the same content, or a new one.

        Args:
            plans: each rank's, or one that all ranks run.
        """
        entry = PlanRecord(plans)
        return self._known.setdefault(entry.names[0], entry)

    def forget(self, entries: Sequence[PlanRecord]) -> None:
        """Plans that will never be used again: workers drop them with the next plan."""
        for entry in entries:
            if self._known.get(entry.names[0]) is entry:
                del self._known[entry.names[0]]
                self._forgotten.append(entry)

    # -- messages ------------------------------------------------------------------------

    def plan_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """What brings each rank its plan, and tells it which others to forget."""
        forgotten, self._forgotten = self._forgotten, []
        messages: dict[int, list[Buffer]] = {}
        for rank in range(self._ranks):
            which = entry.of(rank)
            if which not in messages:
                name = entry.names[which]
                forget = [old.name(rank) for old in forgotten if old.name(rank) != name]
                graph = entry.plans[which].graph
                messages[which] = encode_plan(
                    name,
                    graph,
                    True,
                    forget,
                    entry.salt,
                    schema.encode(entry.foreign[which]),
                )
        return [messages[entry.of(rank)] for rank in range(self._ranks)]

    def swap_messages(self, entry: PlanRecord) -> list[list[Buffer]]:
        """What has each rank run an entry's compiled code; the swap is under way from here on."""
        self.swapping[entry.names[0]] = self._ranks
        return [swap_message(entry, rank) for rank in range(self._ranks)]

    # -- swaps ---------------------------------------------------------------------------

    def swapped(self, rank: int, digest: bytes) -> None:
        """A rank has answered the swap of the plan that it knows by this name."""
        name = next((e.names[0] for e in self if e.name(rank) == digest), digest)
        if name in self.swapping:
            self.swapping[name] -= 1
            if not self.swapping[name]:
                del self.swapping[name]


def swap_message(entry: PlanRecord, rank: int) -> list[Buffer]:
    """What has a rank run an entry's compiled code from its next run on."""
    which = entry.of(rank)
    return encode(Swap(entry.names[which], tuple(entry.swap[which])))


def again_message(entry: PlanRecord, rank: int) -> list[Buffer]:
    """What brings a rank the plan that it has forgotten."""
    which = entry.of(rank)
    foreign = schema.encode(entry.foreign[which])
    return encode_plan(
        entry.name(rank), entry.plans[which].graph, False, salt=entry.salt, code=foreign
    )


def _names(plans: tuple[Plan, ...]) -> tuple[bytes, list[bytes]]:
    """The salt, and the name of each plan on the wire.

    Two entries may have the same plan for one rank and different ones for another; the rank
    remembers the last run of each entry, so it must not take one for the other.
    """
    if len(plans) == 1:
        return b"", [plans[0].digest]
    salt = plan_name(b"".join(plan.digest for plan in plans))
    return salt, [plan_name(encode_graph(plan.graph), salt) for plan in plans]
