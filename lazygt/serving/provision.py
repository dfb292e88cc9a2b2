"""Provisioning: the fewest simulated GPUs with a p99 within the SLO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lazygt.serving.formulas import HIGH_LOAD, busy_gpus
from lazygt.serving.simulation import Run
from lazygt.serving.stages import Stage

#: GPUs of each stage; 0 where there are none.
Gpus = tuple[int, ...]
Try = Callable[[Gpus], Run]

_STEP = 1.25
#: Most times the busy GPUs that are tried: beyond it waiting is not the cause of a latency.
_MOST = 20.0


def gpus_that_hold(qps: float, stages: Sequence[Stage], slo: float, simulated: Try) -> Gpus | None:
    """Return the fewest GPUs with a simulated p99 within ``slo`` seconds; None: none hold it.

    First all stages get the same multiple of their busy GPUs, then each as few as it can do with.
    Never so few that they are busy all the time: then the queue grows as long as it is simulated.
    """

    def hold(gpus: Gpus) -> bool:
        return simulated(gpus).latency.p99 <= slo

    too_few, factor = None, 1.0
    while not hold(enough := _gpus(qps, stages, factor)):
        too_few, factor = factor, factor * _STEP
        if factor > _MOST:
            return None
    if too_few is not None:
        enough = _between(qps, stages, too_few, factor, hold)
    return _fewer(qps, stages, enough, hold) if sum(map(bool, enough)) > 1 else enough


def _gpus(qps: float, stages: Sequence[Stage], factor: float) -> Gpus:
    """Return ``factor`` times the busy GPUs of each stage, and more than those."""
    return tuple(
        max(math.ceil(busy * factor), least(busy)) if (busy := busy_gpus(qps, stage)) else 0
        for stage in stages
    )


def more(gpus: Gpus) -> Gpus:
    """Add one GPU in a hundred to the stage that has the most."""
    at = gpus.index(max(gpus))
    return (*gpus[:at], gpus[at] + math.ceil(gpus[at] / 100), *gpus[at + 1 :])


def least(busy: float) -> int:
    """Return the fewest GPUs that are not busy all the time."""
    return math.floor(busy * (1 + 1e-9)) + 1


def _between(
    qps: float, stages: Sequence[Stage], low: float, high: float, hold: Callable[[Gpus], bool]
) -> Gpus:
    few, enough = (_gpus(qps, stages, factor) for factor in (low, high))
    while sum(enough) - sum(few) > 1:
        middle = (low + high) / 2
        gpus = _gpus(qps, stages, middle)
        if gpus in (few, enough) and high - low < 1e-6:
            break
        if hold(gpus):
            high, enough = middle, gpus
        else:
            low, few = middle, gpus
    return enough


def _fewer(qps: float, stages: Sequence[Stage], enough: Gpus, hold: Callable[[Gpus], bool]) -> Gpus:
    """Take GPUs from one stage after another, the one with the most of them first."""
    lowest = [least(busy_gpus(qps, stage)) for stage in stages]
    for at in sorted(range(len(enough)), key=lambda at: -enough[at]):
        while enough[at] > lowest[at]:
            gpus = (*enough[:at], enough[at] - 1, *enough[at + 1 :])
            if not hold(gpus):
                break
            enough = gpus
    return enough


# -- results of simulations by number of GPUs and by requests a second -----------------------------

#: Of the GPUs, at which latency is simulated for the curve.
CURVE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, HIGH_LOAD, 0.9, 0.95, 0.98)
#: Why so many GPUs.
FORMULAS, GIVEN = "as the formulas say", "as given"
AT_HIGH_LOAD, FOR_SLO = f"busy for {HIGH_LOAD:.0%}", "fewest for the SLO"


class Choice(NamedTuple):
    """So many GPUs.

    Attributes:
        gpus: of each stage; 0 where there are none.
        load: of the busiest stage, by the formulas.
    """

    why: str
    gpus: Gpus
    load: float
    run: Run


class Point(NamedTuple):
    """So many requests a second.

    Attributes:
        load: of the busiest stage, by the formulas.
        mean: seconds by the formulas.
    """

    load: float
    qps: float
    mean: float
    run: Run
