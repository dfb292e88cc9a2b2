"""Discrete-event simulation of one run of the plans of all ranks.

Ranks with the same plan are one class, and are simulated once. A rank has a lane on which it
computes, one on which its host launches (where there is a device that does not wait for it), and
one for each axis of the mesh, on which its collectives follow each other. A collective begins when
every rank of its line has launched it and the one before it is over; a send arrives after its
transfer, and a waiting rank stands still until then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lazygt.errors import LazyGTError
from lazygt.graph.collectives import Communication, communications_by_node
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import COLLECTIVES, LAUNCH, LAUNCH_, RECV, SEND, WAIT
from lazygt.machine import Machine
from lazygt.machine.outside import Outside, outside
from lazygt.machine.prices import line_seconds
from lazygt.runtime.plan import Plan
from lazygt.simulation.node_times import Kernel, flops_of, kernels_of, product_flops
from lazygt.simulation.rank_memory import Memory, Told, memory_of

_LAUNCHES = frozenset({LAUNCH, LAUNCH_})


class Deadlock(LazyGTError):
    """Ranks wait for each other: their plans launch other collectives, or in another order."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something on a lane, in seconds since the run began."""

    lane: str  # ``compute``, or an axis of the mesh
    name: str
    begin: float
    end: float
    line: str  # the user's ``file:line``
    #: of a collective the seconds in which the rank does nothing but wait for it
    exposed: float = 0.0
    nbytes: int = 0  # of a collective its payload


@dataclass(slots=True)
class RankClass:
    """Simulated run of the ranks with one plan."""

    rank: int  # the first of them
    count: int
    memory: Memory  # that it needs, without values that the plan does not read
    seconds: float = 0.0  # until it has nothing to do any more
    busy: float = 0.0  # of these, seconds that it computes
    flops: int = 0  # that it computes; those of matrix products by dtype
    products: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    #: (seconds, bytes of each of ``memory.KINDS`` from then on)
    alive: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    outside: Sequence[Outside] = ()  # ops beyond the sizes that the machine was calibrated for

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return self.memory.peak

    @property
    def peak_line(self) -> str:
        """The user's line that is running then."""
        return self.memory.line


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run of one plan on all ranks; ``seconds`` is that of the last rank."""

    classes: tuple[RankClass, ...]

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.classes)


class Rehearsal:
    """The plans of all ranks, made ready to be run on one machine after another.

    Args:
        plans: of each rank of the mesh, or the one that all run.
        compiled: True if fused groups are.
        told: the client's knowledge of their inputs and outputs.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        mesh: Mesh,
        *,
        compiled: bool = True,
        told: Told = Told(),  # noqa: B008 - nothing is known
    ) -> None:
        of_rank = list(plans) * (mesh.world_size if len(plans) == 1 else 1)
        firsts: dict[int, int] = {}
        self._counts: dict[int, int] = defaultdict(int)
        for rank, plan in enumerate(of_rank):
            self._counts[firsts.setdefault(id(plan), rank)] += 1
        numbers = {key: number for number, key in enumerate(firsts)}
        class_of = [numbers[id(plan)] for plan in of_rank]
        self._parts = [
            _Part(of_rank[rank], rank, mesh, class_of, compiled, told) for rank in firsts.values()
        ]

    def on(self, machine: Machine) -> Simulated:
        """Simulate one run on a machine.

        Raises:
            Deadlock: ranks wait for each other.
        """
        runs = [_Run(part, self._counts[part.rank], machine) for part in self._parts]
        left = [run for run in runs if not run.ended]
        while left:
            moved = [run.advance(runs) for run in left]
            if not any(moved):
                raise Deadlock("; ".join(run.stands() for run in left))
            left = [run for run in left if not run.ended]
        return Simulated(tuple([run.told for run in runs]))


class _Part:
    """Work of one class of ranks, for any machine."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        mesh: Mesh,
        class_of: Sequence[int],
        compiled: bool,
        told: Told,
    ) -> None:
        self.rank, self.graph = rank, plan.graph
        self.lines = {
            axis: next(line for line in mesh.lines(axis) if rank in line) for axis in mesh.names
        }
        self.classes = {
            axis: tuple([class_of[other] for other in line]) for axis, line in self.lines.items()
        }
        self.place = {axis: line.index(rank) for axis, line in self.lines.items()}
        self.kernels = kernels_of(plan.graph, compiled=compiled)
        self.exchanges = communications_by_node(plan.graph, mesh)
        self.results = [results for _, results in plan.graph.numbered()]

        self.memory = memory_of(plan.graph, told)
        self.flops = flops_of(self.kernels)

    def counted(self, count: int) -> RankClass:
        """Return the figures that are known before a run."""
        told = RankClass(self.rank, count, self.memory, flops=self.flops)
        told.products = product_flops(self.kernels)
        return told


class _Run:
    """One class, from node to node.

    Attributes:
        launched: axis -> when this class has launched each of its collectives there, in order.
        sent: (axis, place of the receiver on it) -> when each message is there.
    """

    def __init__(self, part: _Part, count: int, machine: Machine) -> None:
        self.told = part.counted(count)
        self.told.outside = outside(machine, part.graph, part.exchanges.values())
        self._graph, self._machine = part.graph, machine
        self._lines, self._classes, self._place = part.lines, part.classes, part.place
        self._kernels, self._exchanges, self._results = part.kernels, part.exchanges, part.results
        self._now = self._host = 0.0
        self._next = 0
        self.launched: dict[str, list[float]] = defaultdict(list)
        self.sent: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._received: dict[tuple[str, int], int] = defaultdict(int)
        self._free: dict[str, float] = defaultdict(float)
        #: collective under way -> its axis, and its place among the launches there
        self._under_way: dict[int, tuple[str, int]] = {}
        #: axis -> its collectives, and when those began and ended of which that is known
        self._flights: dict[str, list[Communication]] = defaultdict(list)
        self._times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        #: (axis, place) -> seconds in which nothing was computed, of those under way
        self._exposed: dict[tuple[str, int], float] = defaultdict(float)
        #: when each node begins
        self._begun_at: list[float] = []

    @property
    def ended(self) -> bool:
        return self._next == len(self._graph.nodes)

    def stands(self) -> str:
        """Place at which it waits."""
        node = self._graph.nodes[self._next]
        return f"rank {self.told.rank} at {node.op} ({self._graph.line(self._next)})"

    def advance(self, runs: Sequence[_Run]) -> bool:
        """Simulate up to a wait with an unknown end, and return whether a node was done."""
        begin, now = self._next, self._now
        while not self.ended and self._step(self._next, runs):
            self._begun_at.append(now)
            self._next, now = self._next + 1, self._now
        if self.ended:
            self.told.seconds = max(self._now, *self._free.values(), 0.0)
            at = [*self._begun_at, self._now]
            self.told.alive = [(at[node], row) for node, row in self.told.memory.history]
        return self._next > begin

    def _step(self, number: int, runs: Sequence[_Run]) -> bool:
        """Simulate a node, and return True; False if its time is not known yet."""
        node = self._graph.nodes[number]
        if node.op in _LAUNCHES or node.op in COLLECTIVES:
            if not self._begun(number):
                self._launch(number)
            return node.op in _LAUNCHES or self._wait(self._results[number][0], runs)
        if node.op == WAIT:
            return self._wait(node.args[0].index, runs)
        if node.op == SEND:
            self._send(number)
            return True
        if node.op == RECV:
            return self._receive(number, runs)
        self._compute(number)
        return True

    def _compute(self, number: int) -> None:
        begins = [self._kernel(kernel) for kernel in self._kernels[number]]
        if begins:
            name, line = self._graph.nodes[number].op, self._graph.line(number)
            self.told.spans.append(Span("compute", name, begins[0], self._now, line))

    def _kernel(self, kernel: Kernel) -> float:
        """Run a kernel, and return its start. Launches run ahead of a device."""
        host = self._machine.host
        launch, seconds = (
            host.call if kernel.compiled else host.launch,
            kernel.seconds(self._machine),
        )
        begin = self._now
        if self._machine.device == "cuda":
            self._host += launch
            begin = max(begin, self._host)
        else:
            seconds += launch
        self._now = begin + seconds
        self.told.busy += seconds
        return begin

    def _begun(self, number: int) -> bool:
        """Return whether a collective that is waited for at once was launched already."""
        return self._results[number][0] in self._under_way

    def _launch(self, number: int) -> None:
        what = self._exchanges[number]
        axis = what.mesh_dim
        self._under_way[self._results[number][0]] = axis, len(self.launched[axis])
        self.launched[axis].append(self._now)
        self._flights[axis].append(what)

    def _wait(self, value: int, runs: Sequence[_Run]) -> bool:
        axis, place = self._under_way[value]
        if not self._is_known(axis, place, runs):
            return False
        (begin, end), what = self._times[axis][place], self._flights[axis][place]
        self._stand_still(axis, place)
        exposed = self._exposed.pop((axis, place), 0.0)
        name = f"{what.kind} {what.reduce_op}" if what.reduce_op else what.kind
        self.told.spans.append(Span(axis, name, begin, end, what.source, exposed, what.nbytes))
        self._now = max(self._now, end)
        del self._under_way[value]
        return True

    def _stand_still(self, axis: str, place: int) -> None:
        """Compute nothing until a collective ends: it is exposed, and so are those before it that
        it has to wait for."""
        for earlier in range(place, -1, -1):
            begin, end = self._times[axis][earlier]
            if end <= self._now:
                break
            self._exposed[axis, earlier] += end - max(self._now, begin)

    def _is_known(self, axis: str, place: int, runs: Sequence[_Run]) -> bool:
        """Return whether the ends of a collective and of those before it on its axis are known."""
        times = self._times[axis]
        launched = [runs[one].launched[axis] for one in set(self._classes[axis])]
        if any(len(at) <= place for at in launched):
            return False
        while len(times) <= place:
            what = self._flights[axis][len(times)]
            begin = max(self._free[axis], *(at[len(times)] for at in launched))
            took = line_seconds(self._machine, what.kind, what.nbytes, self._lines[axis])
            self._free[axis] = begin + took
            times.append((begin, begin + took))
        return True

    def _send(self, number: int) -> None:
        node, what = self._graph.nodes[number], self._exchanges[number]
        axis, peer = what.mesh_dim, node.args[1]
        pair = (self._lines[axis][self._place[axis]], self._lines[axis][peer])
        begin = max(self._now, self._free[f"{axis} sends"])
        end = begin + line_seconds(self._machine, what.kind, what.nbytes, pair)
        self._free[f"{axis} sends"] = end
        self.sent[axis, peer].append(end)
        self.told.spans.append(Span(axis, "send", begin, end, what.source, 0.0, what.nbytes))

    def _receive(self, number: int, runs: Sequence[_Run]) -> bool:
        node, what = self._graph.nodes[number], self._exchanges[number]
        axis, home = what.mesh_dim, node.args[0]
        sender = runs[self._classes[axis][home]]
        arrivals = sender.sent[axis, self._place[axis]]
        at = self._received[axis, home]
        if len(arrivals) <= at:
            return False
        self._received[axis, home] += 1
        exposed = max(arrivals[at] - self._now, 0.0)
        begin, self._now = self._now, max(self._now, arrivals[at])
        if exposed:
            span = Span(axis, "receive", begin, self._now, what.source, exposed, what.nbytes)
            self.told.spans.append(span)
        return True
