"""Provisioning: the fewest simulated GPUs with a p99 within the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazygt.serving.simulation import ServiceRun
from lazygt.serving.stages import HIGH_LOAD, Stage, busy_gpus

#: Number of GPUs of each stage; 0 for a stage without.
Gpus = tuple[int, ...]
Try = Callable[[Gpus], ServiceRun]

_GROWTH = 1.25
#: Maximum multiple of the busy GPUs: beyond it latency is not caused by waiting.
_MAX_FACTOR = 20.0


def gpus_that_hold(qps: float, stages: Sequence[Stage], slo: float, simulated: Try) -> Gpus | None:
    """Search the fewest GPUs with a simulated p99 within ``slo`` seconds; None if none are found.

    First the common multiple of the busy GPUs of all stages is searched, by growth and bisection;
    then GPUs are removed stage by stage (greedy descent). No stage gets so few GPUs that they are
    busy all the time: its queue would grow with the simulated time.

    Args:
        simulated: returns the simulation with some GPUs.
    """

    def hold(gpus: Gpus) -> bool:
        return simulated(gpus).latency.p99 <= slo

    too_few, factor = None, 1.0
    while not hold(enough := _scaled_gpus(qps, stages, factor)):
        too_few, factor = factor, factor * _GROWTH
        if factor > _MAX_FACTOR:
            return None
    if too_few is not None:
        enough = _bisected(qps, stages, too_few, factor, hold)
    return _reduced(qps, stages, enough, hold) if sum(map(bool, enough)) > 1 else enough


def _scaled_gpus(qps: float, stages: Sequence[Stage], factor: float) -> Gpus:
    """Return ``factor`` times the busy GPUs of each stage, rounded up, at least ``least``."""
    return tuple(
        max(math.ceil(busy * factor), least(busy)) if (busy := busy_gpus(qps, stage)) else 0
        for stage in stages
    )


def more(gpus: Gpus) -> Gpus:
    """Add one GPU in a hundred to the stage that has the most."""
    index = gpus.index(max(gpus))
    return (*gpus[:index], gpus[index] + math.ceil(gpus[index] / 100), *gpus[index + 1 :])


def least(busy: float) -> int:
    """Return the fewest GPUs that are not busy all the time."""
    return math.floor(busy * (1 + 1e-9)) + 1


def _bisected(
    qps: float, stages: Sequence[Stage], low: float, high: float, hold: Callable[[Gpus], bool]
) -> Gpus:
    """Bisect the multiple of the busy GPUs, between ``low`` (too few) and ``high`` (enough)."""
    too_few, enough = (_scaled_gpus(qps, stages, factor) for factor in (low, high))
    while sum(enough) - sum(too_few) > 1:
        middle = (low + high) / 2
        gpus = _scaled_gpus(qps, stages, middle)
        if gpus in (too_few, enough) and high - low < 1e-6:
            break
        if hold(gpus):
            high, enough = middle, gpus
        else:
            low, too_few = middle, gpus
    return enough


def _reduced(
    qps: float, stages: Sequence[Stage], enough: Gpus, hold: Callable[[Gpus], bool]
) -> Gpus:
    """Remove GPUs from one stage after another while the SLO holds, the largest stage first."""
    lowest = [least(busy_gpus(qps, stage)) for stage in stages]
    for at in sorted(range(len(enough)), key=lambda at: -enough[at]):
        while enough[at] > lowest[at]:
            gpus = (*enough[:at], enough[at] - 1, *enough[at + 1 :])
            if not hold(gpus):
                break
            enough = gpus
    return enough


# -- results ---------------------------------------------------------------------------------------

#: Loads of the points of the curve.
CURVE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, HIGH_LOAD, 0.9, 0.95, 0.98)
#: Reasons of a choice.
FORMULAS, GIVEN = "as the formulas say", "as given"
AT_HIGH_LOAD, FOR_SLO = f"busy for {HIGH_LOAD:.0%}", "fewest for the SLO"


class ServiceChoice(NamedTuple):
    """A number of GPUs, simulated.

    Attributes:
        why: reason of the choice.
        gpus: number of GPUs of each stage; 0 for a stage without.
        load: load of the busiest stage, by the formulas.
    """

    why: str
    gpus: Gpus
    load: float
    run: ServiceRun


class Point(NamedTuple):
    """Point of the curve of latency against throughput.

    Attributes:
        load: load of the busiest stage, by the formulas.
        qps: requests a second.
        mean: mean latency by the formulas, in seconds.
    """

    load: float
    qps: float
    mean: float
    run: ServiceRun
