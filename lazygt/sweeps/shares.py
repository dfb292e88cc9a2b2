"""Shares of a step's time, of a simulated step and of measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazygt.graph.mesh import Mesh
from lazygt.machine import Machine
from lazygt.machine.prices import line_seconds
from lazygt.observe.exchanges import exchange_times, flights
from lazygt.observe.timeline import TimedRun
from lazygt.simulation import Prediction

#: A share of the step in which ranks have nothing to do that is more than the gaps between runs.
_STARVED = 0.1


class Shares(NamedTuple):
    """Shares of a step's time, from 0 to 1.

    Attributes:
        in_collectives: some collective is under way. Of a measured step: it was launched, and was
            not waited for yet; it may have ended before.
        compute: the rank works.
        bandwidth, latency: the rank waits for collectives (together: the exposed share), for their
            bytes and for all that does not depend on these; the machine's figures tell these apart.
        host: the rank has nothing to do, since the client still records, or kernels have to be
            launched.
        collectives: of a step, how many.
    """

    in_collectives: float
    compute: float
    bandwidth: float
    latency: float
    host: float
    collectives: int

    @property
    def exposed(self) -> float:
        """A rank does nothing but wait for collectives."""
        return self.bandwidth + self.latency

    @property
    def bound(self) -> str:
        """Bottleneck of a step."""
        if self.host > _STARVED:
            return "host"
        parts = {"compute": self.compute, "exposed bandwidth": self.bandwidth,
                 "latency x count": self.latency}  # fmt: skip
        return max(parts, key=parts.__getitem__)


def simulated_shares(prediction: Prediction) -> Shares:
    """Return the shares of the rank that waits the longest."""
    step, mesh, machine = prediction.step_seconds, prediction.mesh, prediction.machine
    rows = prediction.collectives
    exposed = sum(row.exposed for row in rows)
    late = sum(
        row.exposed * latency_share(machine, mesh, row.axis, row.kind, row.times, row.nbytes)
        for row in rows
        if mesh is not None
    )
    under_way = busy = 0.0
    for run in prediction.runs:
        slowest = max(run.simulated.classes, key=lambda c: sum(span.exposed for span in c.spans))
        under_way += covered((s.begin, s.end) for s in slowest.spans if s.lane != "compute")
        busy += slowest.busy
    return Shares(
        under_way / step,
        busy / step,
        (exposed - late) / step,
        late / step,
        max(step - busy - exposed, 0.0) / step,
        sum(row.times for row in rows),
    )


def measured_shares(
    runs: Sequence[TimedRun], step_seconds: float, steps: int, mesh: Mesh, machine: Machine
) -> Shares:
    """Return the mean shares of the ranks.

    Args:
        runs: timed op by op, with which a client does more work than without.
        step_seconds: of a step that is not timed so.
        steps: the number of steps of the runs.
    """
    graphs = [(run.plan.steps.graph, run.timings) for run in runs if run.plan is not None]
    ranks = len({(run.pid, run.track) for run in runs})
    busy = sum(run.timings.end - run.timings.begin for run in runs) / 1e9
    whole = max(step_seconds * steps * ranks, busy)
    rows = exchange_times(graphs)
    exposed = sum(row.exposed for row in rows)
    late = sum(
        row.exposed * latency_share(machine, mesh, row.axis, row.kind, row.times, row.nbytes)
        for row in rows
    )
    under_way = sum(
        covered(flight.nanoseconds for flight in flights(graph, timings))
        for graph, timings in graphs
    )
    return Shares(
        under_way / 1e9 / whole,
        max(busy - exposed, 0.0) / whole,
        (exposed - late) / whole,
        late / whole,
        (whole - busy) / whole,
        round(sum(row.times for row in rows) / (steps * ranks)),
    )


def latency_share(
    machine: Machine, mesh: Mesh, axis: str, name: str, times: int, nbytes: int
) -> float:
    """Return the share of the time of collectives that does not depend on their bytes.

    Args:
        name: of their kind, perhaps with the reduction.
        nbytes: of all of them.
    """
    kind, line = name.split(" ")[0], mesh.lines(axis)[0]
    if kind in ("send", "receive"):
        kind, line = "send_recv", line[:2]
    whole = line_seconds(machine, kind, round(nbytes / times), line)
    return min(line_seconds(machine, kind, 0, line) / whole, 1.0) if whole else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = until = 0.0
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
