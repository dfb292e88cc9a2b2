"""Requests one by one through the queues of all GPUs, batch by batch.

    arrivals -> stage: balanced over its GPUs -> batches -> inference -> delay -> the next stage

A GPU that is free takes the requests that wait, up to a batch; if they are fewer it waits for more,
at most ``Stage.wait`` since the first of them came. All of a batch are done at once. Which GPU a
request goes to:

    random          any of them; each has a queue of its own
    round-robin     one after another; each has a queue of its own
    shared          whichever is free first; there is one queue

The same seed gives the same numbers.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.serving.arrivals import Arrivals, Recorded, Times
from lazygt.serving.formulas import StageNumbers
from lazygt.serving.stages import Stage

BALANCES = ("random", "round-robin", "shared")
#: Default length of a simulation: a minute, with bounds on requests, and fewest inferences.
_SECONDS, _MOST, _FEWEST, _INFERENCES = 60.0, 2_000_000, 20_000, 100
#: Requests of a simulation that is only a trial, or one of many.
_TRIED = 300_000
#: More take too much memory.
_LIMIT = 50_000_000
#: Share of the simulated time that is not counted, in which queues fill.
_WARM_UP = 0.1


class Latency(NamedTuple):
    """Seconds that requests took."""

    mean: float
    p50: float
    p99: float


class StageRun(NamedTuple):
    """Simulated figures of a stage.

    Attributes:
        latency: of requests in this stage alone.
        load: share of the time that its GPUs were busy.
        requests: in a batch, on average.
    """

    name: str
    latency: Latency
    load: float
    requests: float


class Run(NamedTuple):
    """One simulation.

    Attributes:
        requests: that were counted.
        seconds: that were simulated.
        latency: from a request's arrival to the end of its last stage.
    """

    requests: int
    seconds: float
    latency: Latency
    stages: tuple[StageRun, ...]


class Served(NamedTuple):
    """End times of requests, in their order; and of each batch its size and seconds."""

    done: Times
    sizes: npt.NDArray[np.int64]
    busy: float


def simulated_seconds(qps: float, stages: Sequence[Stage]) -> float:
    """Return the seconds to simulate: a minute, unless that is too few or too many requests."""
    coming = qps * max(stage.fan for stage in stages)
    batches = _INFERENCES * max(stage.inference for stage in stages)
    return max(min(_SECONDS, _MOST / coming), _FEWEST / coming, batches)


def tried_seconds(qps: float, stages: Sequence[Stage]) -> float:
    """Return the seconds of one of many simulations."""
    coming = qps * max(stage.fan for stage in stages)
    return max(_TRIED / coming, _INFERENCES / 2 * max(stage.inference for stage in stages))


def simulate(
    qps: float,
    stages: Sequence[StageNumbers],
    arrivals: Arrivals,
    seconds: float,
    balance: str = "random",
    seed: int = 0,
) -> Run:
    """Send requests through the stages.

    Args:
        qps: requests a second.
        stages: with the GPUs of each.
        seconds: so long they come, unless a file says when they come.
        balance: which GPU a request goes to.

    Raises:
        ValueError: so many that they don't fit into memory, or none at all.
    """
    count = qps * seconds * max(each.stage.fan for each in stages)
    if count > _LIMIT:
        raise ValueError(
            f"{seconds:g} s of {qps:g} requests a second are {count:.3g} to simulate, and at most "
            f"{_LIMIT:.3g} can be: give fewer seconds"
        )
    rng = np.random.default_rng(seed)
    came = arrivals.times(qps, seconds, rng)
    if not len(came):
        raise ValueError(
            f"nothing arrives in {seconds:g} s of {qps:g} requests a second: give more seconds"
        )
    spared = 0.0 if isinstance(arrivals, Recorded) else _WARM_UP * seconds
    counted = came >= spared
    if not counted.any():
        counted[:] = True
    now, runs = came, []
    for numbers in stages:
        before, (now, sizes, busy) = now, _stage(now, numbers, balance, rng)
        took = float(now.max() - before.min())
        load = busy / (numbers.gpus * took) if numbers.gpus else 0.0
        runs.append(StageRun(
            numbers.stage.name, _latency((now - before)[counted]), load,
            float(sizes.mean()) if len(sizes) else 0.0,
        ))  # fmt: skip
    return Run(
        int(counted.sum()), float(came[-1]), _latency((now - came)[counted]), tuple(runs)
    )  # fmt: skip


def _latency(took: Times) -> Latency:
    p50, p99 = np.percentile(took, (50, 99))
    return Latency(float(took.mean()), float(p50), float(p99))


def _stage(came: Times, numbers: StageNumbers, balance: str, rng: np.random.Generator) -> Served:
    """Return the time at which each request has left a stage, in the given order."""
    stage = numbers.stage
    if not stage.on_gpus:
        return Served(came + stage.delay, np.empty(0, dtype=np.int64), 0.0)
    parts = np.repeat(came, stage.fan)
    order = np.argsort(parts, kind="stable")
    served = _balanced(parts[order], stage, numbers.gpus, balance, rng)
    done = np.empty_like(served.done)
    done[order] = served.done
    last = done.reshape(-1, stage.fan).max(axis=1) + stage.delay
    return Served(last, served.sizes, served.busy)


def _balanced(
    came: Times, stage: Stage, gpus: int, balance: str, rng: np.random.Generator
) -> Served:
    if balance == "shared":
        return _queue(came, stage, gpus)
    done = np.empty_like(came)
    sizes, busy = [], 0.0
    for rows in _shares(len(came), gpus, balance, rng):
        served = _queue(came[rows], stage, 1)
        done[rows] = served.done
        sizes.append(served.sizes)
        busy += served.busy
    return Served(done, np.concatenate(sizes), busy)


def _shares(
    count: int, gpus: int, balance: str, rng: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    """Return the requests of each GPU."""
    if balance == "round-robin":
        return [np.arange(gpu, count, gpus) for gpu in range(gpus)]
    # small numbers are sorted by their digits, in one go
    drawn = rng.integers(0, gpus, count).astype(np.uint16 if gpus <= 1 << 16 else np.int64)
    order = np.argsort(drawn, kind="stable")
    return np.split(order, np.cumsum(np.bincount(drawn, minlength=gpus))[:-1])


def _queue(came: Times, stage: Stage, gpus: int) -> Served:
    """Serve requests of one queue, in order, by GPUs that are all alike."""
    return _one_by_one(came, stage, gpus) if stage.batch == 1 else _in_batches(came, stage, gpus)


def _one_by_one(came: Times, stage: Stage, gpus: int) -> Served:
    """Serve requests of equal length: the k-th gets the GPU of the one ``gpus`` before it."""
    seconds, done = stage.seconds(1), np.empty_like(came)
    for gpu in range(min(gpus, len(came))):
        mine_came = came[gpu::gpus]
        ends = seconds * np.arange(1, len(mine_came) + 1)
        done[gpu::gpus] = np.maximum.accumulate(mine_came - ends + seconds) + ends
    return Served(done, np.ones(len(came), dtype=np.int64), len(came) * seconds)


def _in_batches(came: Times, stage: Stage, gpus: int) -> Served:
    times: list[float] = came.tolist()
    count, batch, wait = len(times), stage.batch, stage.wait
    took = [stage.seconds(size) for size in range(batch + 1)]
    free = [0.0] * gpus  # when each GPU is; a heap
    ends, done, at, busy = [], [], 0, 0.0
    while at < count:
        start = max(times[at], free[0])
        if wait:
            full = times[at + batch - 1] if at + batch <= count else math.inf
            # the end of the simulation closes the last batch
            start = max(start, min(full, times[at] + wait, times[-1]))
        end = bisect_right(times, start, at, min(at + batch, count))
        seconds = took[end - at]
        heapq.heapreplace(free, start + seconds)
        done.append(start + seconds)
        ends.append(end)
        busy += seconds
        at = end
    upto = np.array([0, *ends], dtype=np.int64)
    sizes = upto[1:] - upto[:-1]
    return Served(np.repeat(np.array(done), sizes), sizes, busy)
