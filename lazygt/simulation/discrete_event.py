"""Discrete-event simulation of one run of the plans of all ranks.

Ranks with the same plan are one class, and are simulated once. A rank has one lane for computing,
one for launches by its host (on devices with asynchronous launches), and one for each axis of the
mesh, on which its collectives run one after another. A collective begins when every rank of its
axis group has launched it and the previous collective has ended; a send arrives after its transfer,
and the receiving rank blocks until then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lazygt.errors import LazyGTError
from lazygt.graph.collectives import (
    Communication,
    collective_name,
    communications_by_node,
)
from lazygt.graph.mesh import Mesh
from lazygt.graph.placement import COLLECTIVES, LAUNCH, LAUNCH_, RECV, SEND, WAIT
from lazygt.machine import Machine
from lazygt.machine.extrapolation import Outside, outside
from lazygt.machine.prices import axis_group_seconds
from lazygt.runtime.plan import Plan
from lazygt.simulation.node_costs import Kernel, KnownCategories, Memory, kernels_of, memory_of

_LAUNCHES = frozenset({LAUNCH, LAUNCH_})
_END = object()


class Deadlock(LazyGTError):
    """Ranks wait for each other: they launch different collectives, or in different orders."""


@dataclass(frozen=True, slots=True)
class Span:
    """Interval on a lane, in seconds since the run began."""

    lane: str  # ``compute``, or an axis of the mesh
    name: str
    begin: float
    end: float
    line: str  # the user's ``file:line``
    #: seconds of a collective in which the rank only waits
    exposed: float = 0.0
    nbytes: int = 0  # payload of a collective


@dataclass(slots=True)
class RankClass:
    """Simulated run of the ranks with one plan."""

    rank: int  # first rank of the class
    count: int  # number of ranks
    memory: Memory  # without values that the plan does not read
    seconds: float = 0.0  # end of the run
    busy: float = 0.0  # seconds of computing
    flops: int = 0  # of all ops; ``products``: flops of matrix products by dtype
    products: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    #: (seconds, bytes of each of ``node_costs.KINDS`` from then on)
    alive: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    outside: Sequence[Outside] = ()  # ops beyond the sizes that the machine was calibrated for

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes alive at once."""
        return self.memory.peak

    @property
    def peak_line(self) -> str:
        """The user's line that runs at the peak."""
        return self.memory.line


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run of one plan on all ranks; ``seconds`` is that of the last rank."""

    classes: tuple[RankClass, ...]

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.classes)


class Rehearsal:
    """Plans of all ranks, prepared once for simulation on any machines.

    Args:
        plans: plan of each rank of the mesh, or one plan for all ranks.
        compiled: True if fused groups are compiled.
        categories: those of the plans' inputs and outputs, as known to the client.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        mesh: Mesh,
        *,
        compiled: bool = True,
        categories: KnownCategories = KnownCategories(),  # noqa: B008 - nothing is known
    ) -> None:
        plan_of_rank = list(plans) * (mesh.world_size if len(plans) == 1 else 1)
        first_ranks: dict[int, int] = {}
        self._counts: dict[int, int] = defaultdict(int)
        for rank, plan in enumerate(plan_of_rank):
            self._counts[first_ranks.setdefault(id(plan), rank)] += 1
        class_numbers = {key: number for number, key in enumerate(first_ranks)}
        class_of = [class_numbers[id(plan)] for plan in plan_of_rank]
        self._works = [
            _ClassWork(plan_of_rank[rank], rank, mesh, class_of, compiled, categories)
            for rank in first_ranks.values()
        ]

    def on(self, machine: Machine) -> Simulated:
        """Simulate one run on a machine.

        Raises:
            Deadlock: ranks wait for each other.
        """
        runs = [_Run(work, self._counts[work.rank], machine) for work in self._works]
        unfinished = [(run, run.simulate(runs)) for run in runs]
        while unfinished:  # advance each class until it waits; a round without progress: deadlock
            done = sum(run.node for run in runs)
            unfinished = [pair for pair in unfinished if next(pair[1], _END) is not _END]
            if unfinished and sum(run.node for run in runs) == done:
                raise Deadlock("; ".join(run.position_text() for run, _ in unfinished))
        return Simulated(tuple([run.result for run in runs]))


class _ClassWork:
    """Work of one class of ranks, independent of the machine.

    Attributes:
        rank: the class's first rank, which stands for all.
        axis_groups: axis -> the ranks of the first rank's group.
        classes: axis -> the class of each rank of that group.
        position: axis -> position of the first rank in its group.
        kernels, results: those of each node.
        exchanges: collectives and messages by node.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        mesh: Mesh,
        class_of: Sequence[int],
        compiled: bool,
        categories: KnownCategories,
    ) -> None:
        self.rank, self.graph = rank, plan.graph
        self.axis_groups = {
            axis: next(group for group in mesh.axis_groups(axis) if rank in group)
            for axis in mesh.names
        }
        self.classes = {
            axis: tuple([class_of[other] for other in group])
            for axis, group in self.axis_groups.items()
        }
        self.position = {axis: group.index(rank) for axis, group in self.axis_groups.items()}
        self.kernels = kernels_of(plan.graph, compiled=compiled)
        self.exchanges = communications_by_node(plan.graph, mesh)
        self.results = [results for _, results in plan.graph.numbered()]

        self.memory = memory_of(plan.graph, categories)
        kernels = [kernel for of_node in self.kernels for kernel in of_node]
        self.flops = sum(kernel.flops for kernel in kernels)
        self.products = Counter[str]()
        for product in (product for kernel in kernels for product in kernel.products):
            self.products[product.dtype] += product.flops


class _Run:
    """Simulation of one class of ranks, as a process that pauses while it waits for others.

    All times are seconds since the run began.

    Attributes:
        node: number of the node that runs, or waits.
        launch_times: axis -> launch times of this class's collectives on the axis, in order.
        arrivals: (axis, position of the receiver in its group) -> arrival times of messages.
    """

    def __init__(self, work: _ClassWork, count: int, machine: Machine) -> None:
        self.result = RankClass(
            work.rank, count, work.memory, flops=work.flops, products=work.products,
            outside=outside(machine, work.graph, work.exchanges.values()),
        )  # fmt: skip
        self._work, self._graph, self._machine = work, work.graph, machine
        self._now = self._host = 0.0
        self.node = 0
        self.launch_times: dict[str, list[float]] = defaultdict(list)
        self.arrivals: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._received: dict[tuple[str, int], int] = defaultdict(int)
        self._lane_free_at: dict[str, float] = defaultdict(float)
        #: value of a collective in flight -> (axis, position among the launches on the axis)
        self._in_flight: dict[int, tuple[str, int]] = {}
        #: axis -> launched collectives, and (begin, end) of those with known times
        self._collectives: dict[str, list[Communication]] = defaultdict(list)
        self._times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        #: (axis, position) -> exposed seconds so far of collectives in flight
        self._exposed: dict[tuple[str, int], float] = defaultdict(float)

    def position_text(self) -> str:
        """Describe the node at which the class is blocked, for the error of a deadlock."""
        node = self._graph.nodes[self.node]
        return f"rank {self.result.rank} at {node.op} ({self._graph.line(self.node)})"

    def simulate(self, runs: Sequence[_Run]) -> Iterator[None]:
        """Simulate all nodes; yield while one waits for an event with an unknown time.

        Args:
            runs: the simulations of all classes.
        """
        starts = []
        while self.node < len(self._graph.nodes):
            starts.append(self._now)
            yield from self._run_node(runs)
            self.node += 1
        self.result.seconds = max(self._now, *self._lane_free_at.values(), 0.0)
        starts.append(self._now)
        self.result.alive = [(starts[node], row) for node, row in self.result.memory.history]

    def _run_node(self, runs: Sequence[_Run]) -> Iterator[None]:
        """Simulate the present node."""
        node = self._graph.nodes[self.node]
        if node.op in _LAUNCHES:
            self._launch()
        elif node.op in COLLECTIVES:
            self._launch()
            yield from self._wait(self._work.results[self.node][0], runs)
        elif node.op == WAIT:
            yield from self._wait(node.args[0].index, runs)
        elif node.op == SEND:
            self._send(node.args[1])
        elif node.op == RECV:
            yield from self._receive(node.args[0], runs)
        else:
            self._compute()

    def _compute(self) -> None:
        """Run the kernels of a node on the compute lane."""
        begins = [self._kernel(kernel) for kernel in self._work.kernels[self.node]]
        if begins:
            name, line = self._graph.nodes[self.node].op, self._graph.line(self.node)
            self.result.spans.append(Span("compute", name, begins[0], self._now, line))

    def _kernel(self, kernel: Kernel) -> float:
        """Run a kernel, and return its start. On a GPU the host launches ahead."""
        host = self._machine.host
        launch = host.call if kernel.compiled else host.launch
        seconds = kernel.seconds(self._machine)
        begin = self._now
        if self._machine.device == "cuda":
            self._host += launch
            begin = max(begin, self._host)
        else:
            seconds += launch
        self._now = begin + seconds
        self.result.busy += seconds
        return begin

    def _launch(self) -> None:
        """Record the launch of a collective at the present time."""
        collective = self._work.exchanges[self.node]
        axis = collective.mesh_dim
        self._in_flight[self._work.results[self.node][0]] = axis, len(self.launch_times[axis])
        self.launch_times[axis].append(self._now)
        self._collectives[axis].append(collective)

    def _wait(self, value: int, runs: Sequence[_Run]) -> Iterator[None]:
        """Wait for a collective."""
        axis, position = self._in_flight.pop(value)
        while not self._is_known(axis, position, runs):
            yield
        (begin, end), collective = self._times[axis][position], self._collectives[axis][position]
        self._count_exposed(axis, position)
        exposed = self._exposed.pop((axis, position), 0.0)
        name = collective_name(collective.kind, collective.reduce_op)
        self._add_span(collective, name, begin, end, exposed)
        self._now = max(self._now, end)

    def _add_span(
        self, message: Communication, name: str, begin: float, end: float, exposed: float
    ) -> None:
        """Add the span of a collective or a message to the result, on the lane of its axis."""
        span = Span(message.mesh_dim, name, begin, end, message.source, exposed, message.nbytes)
        self.result.spans.append(span)

    def _count_exposed(self, axis: str, position: int) -> None:
        """Count the wait for a collective as exposed time.

        The wait is attributed to the collective, and to earlier ones of its axis that delay it.
        """
        for earlier in range(position, -1, -1):
            begin, end = self._times[axis][earlier]
            if end <= self._now:
                break
            self._exposed[axis, earlier] += end - max(self._now, begin)

    def _is_known(self, axis: str, position: int, runs: Sequence[_Run]) -> bool:
        """Return whether a collective's end is known; computes the times up to it on its axis.

        They are known once every rank of the group has launched the collective.

        Args:
            position: index of the collective among this class's launches on the axis.
            runs: the simulations of all classes.
        """
        times = self._times[axis]
        launched = [runs[number].launch_times[axis] for number in set(self._work.classes[axis])]
        if any(len(at) <= position for at in launched):
            return False
        while len(times) <= position:
            collective = self._collectives[axis][len(times)]
            begin = max(self._lane_free_at[axis], *(at[len(times)] for at in launched))
            end = begin + self._seconds(collective, self._work.axis_groups[axis])
            self._lane_free_at[axis] = end
            times.append((begin, end))
        return True

    def _seconds(self, message: Communication, ranks: Sequence[int]) -> float:
        """Return the duration of a collective or a message between ranks."""
        return axis_group_seconds(self._machine, message.kind, message.nbytes, ranks)

    def _send(self, peer: int) -> None:
        """Put a message on the axis's send lane, and record its arrival."""
        message = self._work.exchanges[self.node]
        axis, group = message.mesh_dim, self._work.axis_groups[message.mesh_dim]
        begin = max(self._now, self._lane_free_at[f"{axis} sends"])
        pair = (group[self._work.position[axis]], group[peer])
        end = begin + self._seconds(message, pair)
        self._lane_free_at[f"{axis} sends"] = end
        self.arrivals[axis, peer].append(end)
        self._add_span(message, "send", begin, end, 0.0)

    def _receive(self, source: int, runs: Sequence[_Run]) -> Iterator[None]:
        """Wait for the next message of a rank."""
        message = self._work.exchanges[self.node]
        axis = message.mesh_dim
        arrivals = runs[self._work.classes[axis][source]].arrivals[axis, self._work.position[axis]]
        index = self._received[axis, source]
        while len(arrivals) <= index:
            yield
        self._received[axis, source] += 1
        begin, self._now = self._now, max(self._now, arrivals[index])
        if exposed := self._now - begin:
            self._add_span(message, "receive", begin, self._now, exposed)
