"""Collectives in timed runs: exposed seconds, and seconds that overlap with work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lazygt.graph.collectives import Communication, communications_by_node
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.runtime.messages import Timings

_LAUNCHES = frozenset({LAUNCH, LAUNCH_})


class ExchangeTime(NamedTuple):
    """Collectives of one kind on one axis, over all workers.

    Attributes:
        times: number of collectives.
        nbytes: payload in bytes.
        exposed: seconds in which workers launched collectives or waited for them, and computed
            nothing.
        hidden: seconds between launch and wait, in which workers computed; the collective may have
            ended earlier.
    """

    kind: str
    axis: str
    times: int
    nbytes: int
    exposed: float
    hidden: float

    def __add__(self, other: object) -> ExchangeTime:
        """Return the sum of two rows."""
        if not isinstance(other, ExchangeTime):
            return NotImplemented
        return self._replace(
            times=self.times + other.times,
            nbytes=self.nbytes + other.nbytes,
            exposed=self.exposed + other.exposed,
            hidden=self.hidden + other.hidden,
        )


def exchange_times(runs: Iterable[tuple[Graph, Timings]]) -> list[ExchangeTime]:
    """Sum up the collectives of timed runs by kind and axis, the most exposed first.

    Args:
        runs: graph of a plan's steps and their timings, for each run.
    """
    totals: dict[tuple[str, str], ExchangeTime] = {}
    for graph, timings in runs:
        for row in _times_of_run(graph, timings):
            key = row.kind, row.axis
            totals[key] = totals[key] + row if key in totals else row
    return sorted(totals.values(), key=lambda row: (-row.exposed, row.kind, row.axis))


class Flight(NamedTuple):
    """A collective of a timed run, from its launch to its wait.

    Attributes:
        launched, waited: begin and end of its launch and of its wait, in nanoseconds; ``waited`` is
            None for a blocking collective.
    """

    what: Communication
    launched: tuple[int, int]
    waited: tuple[int, int] | None

    @property
    def nanoseconds(self) -> tuple[int, int]:
        """Begin of the launch and end of the wait; the collective may have ended earlier."""
        return self.launched[0], (self.waited or self.launched)[1]


def flights(graph: Graph, timings: Timings) -> list[Flight]:
    """Return the collectives of a timed run, in the order of their launches."""
    communications = communications_by_node(graph)
    if not communications:
        return []
    results = [values for _, values in graph.numbered()]
    collectives: list[Flight] = []
    #: value in flight -> index of its collective in ``collectives``
    in_flight: dict[int, int] = {}
    for number, _, begin, end in timings.steps:
        node = graph.nodes[number]
        if node.op == WAIT and node.args[0].index in in_flight:
            flight = in_flight.pop(node.args[0].index)
            collectives[flight] = collectives[flight]._replace(waited=(begin, end))
        elif number in communications:
            if node.op in _LAUNCHES:
                in_flight[results[number][0]] = len(collectives)
            collectives.append(Flight(communications[number], (begin, end), None))
    return collectives


def _times_of_run(graph: Graph, timings: Timings) -> Iterable[ExchangeTime]:
    """Yield the exposed and hidden seconds of each collective of a run."""
    for collective, launched, waited in flights(graph, timings):
        exposed, hidden = launched[1] - launched[0], 0
        if waited is not None:
            exposed += waited[1] - waited[0]
            hidden = waited[0] - launched[1]
        yield ExchangeTime(
            collective.kind, collective.mesh_dim, 1, collective.nbytes, exposed / 1e9, hidden / 1e9
        )
