"""Collectives in timed runs: how long workers stood still for them, and how long they went beside
work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lazygt.graph.collectives import communications_by_node
from lazygt.graph.node import Graph
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.runtime.messages import Timings

_LAUNCHES = frozenset({LAUNCH, LAUNCH_})


class ExchangeTime(NamedTuple):
    """Collectives of one kind on one axis, over all workers.

    Attributes:
        times: how many.
        nbytes: payload.
        exposed: seconds in which workers launched them or waited for them, and computed nothing.
        hidden: seconds between launch and wait, in which they computed; a collective may have
            ended before that.
    """

    kind: str
    axis: str
    times: int
    nbytes: int
    exposed: float
    hidden: float

    def __add__(self, other: object) -> ExchangeTime:
        """Both together."""
        if not isinstance(other, ExchangeTime):
            return NotImplemented
        return self._replace(
            times=self.times + other.times,
            nbytes=self.nbytes + other.nbytes,
            exposed=self.exposed + other.exposed,
            hidden=self.hidden + other.hidden,
        )


def exchange_times(runs: Iterable[tuple[Graph, Timings]]) -> list[ExchangeTime]:
    """The collectives of timed runs, the most exposed first.

    Args:
        runs: of the steps of a plan, with when each was done.
    """
    totals: dict[tuple[str, str], ExchangeTime] = {}
    for graph, timings in runs:
        for row in _of_run(graph, timings):
            key = row.kind, row.axis
            totals[key] = totals[key] + row if key in totals else row
    return sorted(totals.values(), key=lambda row: (-row.exposed, row.kind, row.axis))


def _of_run(graph: Graph, timings: Timings) -> Iterable[ExchangeTime]:
    exchanges = communications_by_node(graph)
    if not exchanges:
        return
    results = [values for _, values in graph.numbered()]
    #: value that is under way -> its launch, and when that had ended
    under_way: dict[int, tuple[int, int]] = {}
    for number, _, begin, end in timings.steps:
        node = graph.nodes[number]
        if node.op == WAIT and node.args[0].index in under_way:
            launch, since = under_way.pop(node.args[0].index)
            what = exchanges[launch]
            hidden = (begin - since) / 1e9
            yield ExchangeTime(what.kind, what.mesh_dim, 0, 0, (end - begin) / 1e9, hidden)
        elif number in exchanges:
            what = exchanges[number]
            if node.op in _LAUNCHES:
                under_way[results[number][0]] = number, end
            exposed = (end - begin) / 1e9
            yield ExchangeTime(what.kind, what.mesh_dim, 1, what.nbytes, exposed, 0.0)
