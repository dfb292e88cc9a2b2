"""Queueing simulation of a service: every request through the queues of all GPUs, in batches.

    arrivals -> stage: balanced over its GPUs -> batches -> inference -> delay -> the next stage

A free GPU takes the waiting requests, up to a batch; if they are fewer it waits for more, at most
``Stage.wait`` after the arrival of the first. All requests of a batch are done at once. Load
balancing, the choice of a request's GPU:

    random          uniformly at random; a queue for each GPU
    round-robin     in turn; a queue for each GPU
    shared          the first free GPU; one queue for all

The same seed gives the same results.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lazygt.serving.stages import Stage, StageNumbers, parse_duration, parse_settings, read_settings

# -- arrival times of requests: at random, in bursts, or from a file -------------------------------
# poisson                                     independent, at a constant rate
# bursty:peak=3,share=0.2,burst=500ms         three times the mean for a fifth of the time
# arrivals.txt                                a time a line: seconds, or with a unit

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Poisson:
    """Poisson process: independent arrivals at a constant rate."""

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return the arrivals in ``seconds`` seconds, in order."""
        return _uniform(rng.poisson(qps * seconds), seconds, rng)

    def __str__(self) -> str:
        return "Poisson arrivals"


@dataclass(frozen=True, slots=True)
class Bursty:
    """Markov-modulated Poisson process: bursts and calm phases of exponential length.

    Attributes:
        peak: rate in a burst, as a multiple of the mean.
        share: share of the time in bursts.
        burst: mean seconds of a burst.

    Raises:
        ValueError: the bursts alone exceed the mean rate.
    """

    peak: float = 3.0
    share: float = 0.2
    burst: float = 0.5

    def __post_init__(self) -> None:
        if not (self.peak >= 1 and 0 < self.share < 1 and self.burst > 0):
            raise ValueError(
                f"bursts of {self.peak:g} times the mean for {self.share:g} of the time, "
                f"{self.burst:g} s each: expected peak >= 1, 0 < share < 1, burst > 0"
            )
        if self.peak * self.share > 1:
            raise ValueError(
                f"bursts of {self.peak:g} times the mean for {self.share:g} of the time bring more "
                f"than the mean; peak x share is at most 1: lower one of them"
            )

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return arrivals in about ``seconds`` seconds, in order; ``qps * seconds`` on average."""
        calm_rate = (1 - self.peak * self.share) / (1 - self.share)
        cycles = max(round(seconds * self.share / self.burst), 1)
        phases = np.empty(2 * cycles)
        phases[::2] = rng.exponential(self.burst * (1 - self.share) / self.share, cycles)
        phases[1::2] = rng.exponential(self.burst, cycles)
        phases *= seconds / phases.sum()
        switches = np.concatenate(([0.0], np.cumsum(phases)))
        rates = qps * np.tile([calm_rate, self.peak], cycles)
        expected = np.concatenate(([0.0], np.cumsum(phases * rates)))
        total = float(expected[-1])
        # time change: uniform in the cumulated rate, then mapped back to seconds
        warped = _uniform(rng.poisson(qps * seconds), total, rng)
        return np.interp(warped, expected, switches)

    def __str__(self) -> str:
        return (
            f"bursty arrivals ({self.peak:g} times the mean for {self.share:.0%} of the time, "
            f"{self.burst:g} s each)"
        )


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """Recorded arrivals, scaled in time to the requested rate.

    Attributes:
        name: name of the file.
        seen: arrival times in seconds since the first one, in order.
    """

    name: str
    seen: tuple[float, ...]

    @property
    def qps(self) -> float:
        """Recorded requests a second."""
        return (len(self.seen) - 1) / self.seen[-1]

    def times(self, qps: float, seconds: float, rng: np.random.Generator) -> Times:
        """Return all arrivals, scaled to ``qps`` requests a second; ``seconds`` is ignored."""
        return np.array(self.seen) * (self.qps / qps)

    def __str__(self) -> str:
        return f"{len(self.seen):,} arrivals of {self.name}"


Arrivals = Poisson | Bursty | RecordedArrivals
_KEYS: dict[str, Callable[[str], float]] = {
    "peak": float, "share": float, "burst": parse_duration,
}  # fmt: skip


def parse_arrivals(text: str) -> Arrivals:
    """Parse arrivals: ``poisson``, ``bursty:...`` or the path of a file.

    Raises:
        ValueError: the text is invalid, or the file can't be read.
    """
    if text == "poisson":
        return Poisson()
    if text == "bursty":
        return Bursty()
    if text.startswith("bursty:"):
        _, settings = parse_settings(text, "bursty:peak=3,share=0.2,burst=500ms")
        return Bursty(**read_settings("bursty", settings, _KEYS))
    return read_arrivals(Path(text))


def read_arrivals(path: Path) -> RecordedArrivals:
    """Read arrivals from a file: a time a line, in any order; # begins a comment.

    Raises:
        ValueError: the file can't be read, or has fewer than two times.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"arrivals are poisson, bursty or a file of times, and {str(path)!r} can't be read: "
            f"{error}"
        ) from None
    times = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                times.append(parse_duration(text, "s"))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {text!r}: {error}") from None
    times.sort()
    if len(times) < 2 or not math.isfinite(times[-1]) or times[-1] == times[0]:
        raise ValueError(f"{path} has no two times: expected an arrival a line, in seconds")
    return RecordedArrivals(path.name, tuple(time - times[0] for time in times))


def _uniform(count: int, end: float, rng: np.random.Generator) -> Times:
    """Draw sorted uniform times before ``end``, by exponential gaps instead of a sort."""
    times: Times = np.cumsum(rng.standard_exponential(count + 1))
    times *= end / times[-1]
    return times[:-1]


# -- queueing simulation of a service: requests through the queues of all GPUs ---------------------

BALANCES = ("random", "round-robin", "shared")
#: Default length of a simulation: a minute, with bounds on requests, and a minimum of inferences.
_SECONDS, _MAX_REQUESTS, _MIN_REQUESTS, _MIN_INFERENCES = 60.0, 2_000_000, 20_000, 100
#: Requests of a short simulation: a trial, or a point of a curve.
_TRIAL_REQUESTS = 300_000
#: Maximum number of requests that fit into memory.
_MEMORY_LIMIT = 50_000_000
#: Share of the simulated time at its beginning that is not counted, in which queues fill.
_WARM_UP = 0.1


class Latency(NamedTuple):
    """Latency statistics of requests, in seconds."""

    mean: float
    p50: float
    p99: float


class StageRun(NamedTuple):
    """Simulated figures of a stage.

    Attributes:
        latency: latency of requests in this stage alone.
        load: share of the time that the GPUs were busy.
        requests: mean requests of a batch.
    """

    name: str
    latency: Latency
    load: float
    requests: float


class ServiceRun(NamedTuple):
    """Result of a simulation.

    Attributes:
        requests: number of counted requests.
        seconds: simulated seconds.
        latency: latency from a request's arrival to the end of its last stage.
    """

    requests: int
    seconds: float
    latency: Latency
    stages: tuple[StageRun, ...]


class Served(NamedTuple):
    """Result of serving the requests of a stage or a queue."""

    done: Times  # end times of the requests, in their order
    sizes: npt.NDArray[np.int64]  # sizes of the batches
    busy: float  # GPU seconds of all batches


def simulated_seconds(qps: float, stages: Sequence[Stage]) -> float:
    """Return the seconds to simulate: a minute, unless that has too few or too many requests."""
    requests_per_second = qps * max(stage.fan for stage in stages)
    batches = _MIN_INFERENCES * max(stage.inference for stage in stages)
    return max(
        min(_SECONDS, _MAX_REQUESTS / requests_per_second),
        _MIN_REQUESTS / requests_per_second,
        batches,
    )


def short_seconds(qps: float, stages: Sequence[Stage]) -> float:
    """Return the seconds of a short simulation."""
    requests_per_second = qps * max(stage.fan for stage in stages)
    return max(
        _TRIAL_REQUESTS / requests_per_second,
        _MIN_INFERENCES / 2 * max(stage.inference for stage in stages),
    )


def simulate(
    qps: float,
    stages: Sequence[StageNumbers],
    arrivals: Arrivals,
    seconds: float,
    balance: str = "random",
    seed: int = 0,
) -> ServiceRun:
    """Simulate all requests through the stages, and return the latencies after the warm-up.

    Args:
        qps: requests a second.
        stages: the stages, with the GPUs of each.
        seconds: duration of arrivals; recorded ones have their own.
        balance: load balancing, one of ``BALANCES``.

    Raises:
        ValueError: the requests don't fit into memory, or there are none.
    """
    count = qps * seconds * max(each.stage.fan for each in stages)
    if count > _MEMORY_LIMIT:
        raise ValueError(
            f"{seconds:g} s of {qps:g} requests a second are {count:.3g} to simulate, and at most "
            f"{_MEMORY_LIMIT:.3g} can be: give fewer seconds"
        )
    rng = np.random.default_rng(seed)
    arrived = arrivals.times(qps, seconds, rng)
    if not len(arrived):
        raise ValueError(
            f"nothing arrives in {seconds:g} s of {qps:g} requests a second: give more seconds"
        )
    warm_up = 0.0 if isinstance(arrivals, RecordedArrivals) else _WARM_UP * seconds
    counted = arrived >= warm_up
    if not counted.any():
        counted[:] = True
    left, runs = arrived, []
    for numbers in stages:
        before, (left, sizes, busy) = left, _serve_stage(left, numbers, balance, rng)
        duration = float(left.max() - before.min())
        load = busy / (numbers.gpus * duration) if numbers.gpus else 0.0
        runs.append(StageRun(
            numbers.stage.name, _latency((left - before)[counted]), load,
            float(sizes.mean()) if len(sizes) else 0.0,
        ))  # fmt: skip
    return ServiceRun(
        int(counted.sum()), float(arrived[-1]), _latency((left - arrived)[counted]), tuple(runs)
    )  # fmt: skip


def _latency(seconds: Times) -> Latency:
    """Return the statistics of latencies."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return Latency(float(seconds.mean()), float(p50), float(p99))


def _serve_stage(
    arrived: Times, numbers: StageNumbers, balance: str, rng: np.random.Generator
) -> Served:
    """Serve requests in a stage; return the times at which they leave it, in the same order.

    Each request becomes ``fan`` requests, and leaves with the last of them.

    Args:
        arrived: times at which requests arrive at the stage.
        balance: one of ``BALANCES``.
    """
    stage = numbers.stage
    if not stage.on_gpus:
        return Served(arrived + stage.delay, np.empty(0, dtype=np.int64), 0.0)
    fanned_out = np.repeat(arrived, stage.fan)
    order = np.argsort(fanned_out, kind="stable")
    served = _serve_balanced(fanned_out[order], stage, numbers.gpus, balance, rng)
    done = np.empty_like(served.done)
    done[order] = served.done
    left = done.reshape(-1, stage.fan).max(axis=1) + stage.delay
    return Served(left, served.sizes, served.busy)


def _serve_balanced(
    arrived: Times, stage: Stage, gpus: int, balance: str, rng: np.random.Generator
) -> Served:
    """Distribute requests over the GPUs by the load balancing, and serve each queue."""
    if balance == "shared":
        return _serve_queue(arrived, stage, gpus)
    done = np.empty_like(arrived)
    sizes, busy = [], 0.0
    for requests in _requests_of_gpus(len(arrived), gpus, balance, rng):
        served = _serve_queue(arrived[requests], stage, 1)
        done[requests] = served.done
        sizes.append(served.sizes)
        busy += served.busy
    return Served(done, np.concatenate(sizes), busy)


def _requests_of_gpus(
    count: int, gpus: int, balance: str, rng: np.random.Generator
) -> list[npt.NDArray[np.int64]]:
    """Return the indices of the requests of each GPU, in order."""
    if balance == "round-robin":
        return [np.arange(gpu, count, gpus) for gpu in range(gpus)]
    # a stable sort of small integers is a radix sort
    gpu_of_request = rng.integers(0, gpus, count).astype(np.uint16 if gpus <= 1 << 16 else np.int64)
    order = np.argsort(gpu_of_request, kind="stable")
    return np.split(order, np.cumsum(np.bincount(gpu_of_request, minlength=gpus))[:-1])


def _serve_queue(arrived: Times, stage: Stage, gpus: int) -> Served:
    """Serve the requests of one queue, first in, first out, by equal GPUs."""
    return (
        _serve_singly(arrived, stage, gpus)
        if stage.batch == 1
        else _serve_batches(arrived, stage, gpus)
    )


def _serve_singly(arrived: Times, stage: Stage, gpus: int) -> Served:
    """Serve single requests of equal length: request k gets the GPU of request k - ``gpus``.

    On each GPU the end times follow Lindley's recursion: end = max(arrival, previous end) + length.
    """
    seconds, done = stage.seconds(1), np.empty_like(arrived)
    for gpu in range(min(gpus, len(arrived))):
        arrived_here = arrived[gpu::gpus]
        service_ends = seconds * np.arange(1, len(arrived_here) + 1)
        # the recursion's closed form: end[k] = max over j <= k of arrival[j] + (k - j + 1) * length
        done[gpu::gpus] = (
            np.maximum.accumulate(arrived_here - service_ends + seconds) + service_ends
        )
    return Served(done, np.ones(len(arrived), dtype=np.int64), len(arrived) * seconds)


def _serve_batches(arrived: Times, stage: Stage, gpus: int) -> Served:
    """Serve requests in batches: each is started by the GPU that becomes free first (a heap).

    A batch starts when a GPU is free and it is full, or its first request has waited for ``wait``.
    """
    times: list[float] = arrived.tolist()
    count, batch, wait = len(times), stage.batch, stage.wait
    seconds_of_size = [stage.seconds(size) for size in range(batch + 1)]
    free_at = [0.0] * gpus  # heap of the times at which GPUs become free
    ends, done, busy = [], [], 0.0  # of each batch: index after its last request, and end time
    first = 0  # first waiting request
    while first < count:
        start = max(times[first], free_at[0])
        if wait:
            full_at = times[first + batch - 1] if first + batch <= count else math.inf
            # the last arrival closes the last batch
            start = max(start, min(full_at, times[first] + wait, times[-1]))
        end = bisect_right(times, start, first, min(first + batch, count))
        seconds = seconds_of_size[end - first]
        heapq.heapreplace(free_at, start + seconds)
        done.append(start + seconds)
        ends.append(end)
        busy += seconds
        first = end
    bounds = np.array([0, *ends], dtype=np.int64)
    sizes = bounds[1:] - bounds[:-1]
    return Served(np.repeat(np.array(done), sizes), sizes, busy)
