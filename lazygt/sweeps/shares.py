"""Shares of a step's time (compute, exposed collectives, host), simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazygt.graph.mesh import Mesh
from lazygt.machine import Machine
from lazygt.machine.prices import line_seconds
from lazygt.observe.exchanges import exchange_times, flights
from lazygt.observe.timeline import TimedRun
from lazygt.simulation import Prediction

#: Idle share of a step above which the host is the bottleneck; gaps between runs take less.
_HOST_BOUND = 0.1


class Shares(NamedTuple):
    """Shares of a step's time, from 0 to 1.

    Attributes:
        in_collectives: share with a collective in flight. In a measured step: from its launch to
            its wait; the collective may have ended earlier.
        compute: share in which the rank computes.
        bandwidth, latency: exposed share, split into waiting for bytes and waiting that does not
            depend on the number of bytes, by the machine's cost model.
        host: share in which the rank is idle, because the client still records, or kernels have
            to be launched.
        collectives: number of collectives of a step.
    """

    in_collectives: float
    compute: float
    bandwidth: float
    latency: float
    host: float
    collectives: int

    @property
    def exposed(self) -> float:
        """Share in which a rank only waits for collectives."""
        return self.bandwidth + self.latency

    @property
    def bound(self) -> str:
        """Bottleneck of a step."""
        if self.host > _HOST_BOUND:
            return "host"
        shares = {"compute": self.compute, "exposed bandwidth": self.bandwidth,
                 "latency x count": self.latency}  # fmt: skip
        return max(shares, key=shares.__getitem__)


def simulated_shares(prediction: Prediction) -> Shares:
    """Compute the shares of a predicted step, of the rank with the most exposed time."""
    step, mesh, machine = prediction.step_seconds, prediction.mesh, prediction.machine
    rows = prediction.collectives
    exposed = sum(row.exposed for row in rows)
    latency_seconds = sum(
        row.exposed * latency_share(machine, mesh, row.axis, row.kind, row.times, row.nbytes)
        for row in rows
        if mesh is not None
    )
    in_flight = busy = 0.0
    for run in prediction.runs:
        slowest = max(run.simulated.classes, key=lambda c: sum(span.exposed for span in c.spans))
        in_flight += covered((s.begin, s.end) for s in slowest.spans if s.lane != "compute")
        busy += slowest.busy
    return Shares(
        in_flight / step,
        busy / step,
        (exposed - latency_seconds) / step,
        latency_seconds / step,
        max(step - busy - exposed, 0.0) / step,
        sum(row.times for row in rows),
    )


def measured_shares(
    runs: Sequence[TimedRun], step_seconds: float, steps: int, mesh: Mesh, machine: Machine
) -> Shares:
    """Compute the mean shares of the ranks in measured steps.

    Args:
        runs: runs timed op by op, which slows the client down.
        step_seconds: duration of a step without that timing.
        steps: number of steps of the runs.
    """
    graphs = [(run.plan.steps.graph, run.timings) for run in runs if run.plan is not None]
    ranks = len({(run.pid, run.track) for run in runs})
    busy = sum(run.timings.end - run.timings.begin for run in runs) / 1e9
    total = max(step_seconds * steps * ranks, busy)
    rows = exchange_times(graphs)
    exposed = sum(row.exposed for row in rows)
    latency_seconds = sum(
        row.exposed * latency_share(machine, mesh, row.axis, row.kind, row.times, row.nbytes)
        for row in rows
    )
    in_flight = sum(
        covered(flight.nanoseconds for flight in flights(graph, timings))
        for graph, timings in graphs
    )
    return Shares(
        in_flight / 1e9 / total,
        max(busy - exposed, 0.0) / total,
        (exposed - latency_seconds) / total,
        latency_seconds / total,
        (total - busy) / total,
        round(sum(row.times for row in rows) / (steps * ranks)),
    )


def latency_share(
    machine: Machine, mesh: Mesh, axis: str, name: str, times: int, nbytes: int
) -> float:
    """Return the share of the time of collectives that does not depend on their bytes.

    Args:
        name: kind of the collectives, perhaps with the reduction.
        nbytes: payload of all of them.
    """
    kind, group = name.split(" ")[0], mesh.lines(axis)[0]
    if kind in ("send", "receive"):
        kind, group = "send_recv", group[:2]
    total = line_seconds(machine, kind, round(nbytes / times), group)
    return min(line_seconds(machine, kind, 0, group) / total, 1.0) if total else 0.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = covered_until = 0.0
    for begin, end in sorted(spans):
        total += max(end - max(begin, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total
