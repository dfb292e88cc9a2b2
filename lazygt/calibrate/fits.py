"""Fits of the cost laws in ``machine.prices`` to measured times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from lazygt.machine.model import Carrier, Link

# -- clocks, and minimum times on a machine with other load ----------------------------------------

Work = Callable[[], object]
K = TypeVar("K", bound=Hashable)
#: At most so many calls are timed together.
_MOST = 10_000


class Clock(Protocol):
    """Times work on one kind of device."""

    def seconds(self, work: Work, times: int) -> float:
        """Of ``times`` calls in a row, until the last one is done."""
        ...


class HostClock:
    """Clock for work that is done when its call returns.

    Args:
        threads: that do the work. A single thread's CPU time counts, so that other load on its
            core does not matter.
    """

    def __init__(self, threads: int = 1) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter

    def seconds(self, work: Work, times: int) -> float:
        begin = self._now()
        for _ in range(times):
            work()
        return self._now() - begin


class EventClock:
    """Clock for kernels of a GPU: events before and behind them, on the same stream.

    Args:
        cuda: ``torch.cuda``, or a stand-in of a test.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def seconds(self, work: Work, times: int) -> float:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()  # what was launched before is none of this
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


def least(
    clock: Clock,
    works: Mapping[K, Work],
    rounds: int,
    spend: float,
    told: Callable[[], object] = lambda: None,
) -> dict[K, float]:
    """Return the minimum seconds of each work over all rounds.

    Disturbances only ever add time, and last a while: so all works are timed once a round.

    Args:
        spend: seconds for each in a round, about.
        told: called after each.
    """
    times = {}
    for key, work in works.items():
        clock.seconds(work, 1)
        once = max(clock.seconds(work, 1), 1e-7)
        times[key] = min(max(int(spend / once), 1), _MOST)
    best: dict[K, float] = {}
    for _ in range(rounds):
        for key, work in works.items():
            took = clock.seconds(work, times[key]) / times[key]
            best[key] = min(best.get(key, took), took)
            told()
    return best


# -- fits of the cost laws in ``machine.prices`` to measured times ---------------------------------


class Product(NamedTuple):
    """A product of [m, k] and [k, n] that was timed, without its launch."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


class MatmulLaw(NamedTuple):
    """See ``machine.model.Matmul``; ``error`` is the mean relative error of the fit."""

    rate: dict[str, float]
    tile_rows: int
    tile_columns: int
    depth: int
    error: float


_TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DEPTHS = (0, 4, 8, 16, 32, 64, 128, 256)


def fit_matmul(rows: Sequence[Product], units: int) -> MatmulLaw:
    """The tile and depth by which rates differ least between sizes; of equals the smallest."""
    laws = (_law(rows, units, *sizes) for sizes in product(_TILES, _TILES, _DEPTHS))
    return min(laws, key=lambda law: round(law.error, 3))


def _law(
    rows: Sequence[Product], units: int, tile_rows: int, tile_columns: int, depth: int
) -> MatmulLaw:
    reached: dict[str, list[float]] = {}
    for dtype, m, n, k, seconds in rows:
        tiles = math.ceil(m / tile_rows) * math.ceil(n / tile_columns)
        rounds = math.ceil(tiles / units) * units
        flops = 2 * rounds * tile_rows * tile_columns * (k + depth)
        reached.setdefault(dtype, []).append(flops / seconds)
    rate = {dtype: median(values) for dtype, values in reached.items()}
    errors = [abs(math.log(each / rate[d])) for d, values in reached.items() for each in values]
    return MatmulLaw(rate, tile_rows, tile_columns, depth, sum(errors) / len(errors))


class Exchange(NamedTuple):
    """A collective that was timed: the bytes that each of so many ranks sent."""

    sent: float
    ranks: int
    seconds: float


def fit_carrier(rows: Sequence[Exchange], slope: float) -> Carrier:
    """Fit latency and bandwidth, by payload size where two pieces fit far better.

    Args:
        slope: seconds for each rank beyond the second, where only two ranks were timed.
    """
    whole = _link(rows, slope)
    best: Carrier = (whole,)
    least = _worst(best, rows)
    sizes = sorted({row.sent for row in rows})
    for bound in sizes[2:-3]:
        parts = [r for r in rows if r.sent <= bound], [r for r in rows if r.sent > bound]
        small, large = (_link(part, slope) for part in parts)
        split = (small._replace(up_to=bound), large)
        if (worst := _worst(split, rows)) < least / 2:
            best, least = split, worst
    return best


def _link(rows: Sequence[Exchange], slope: float) -> Link:
    """The line that is off by the smallest part of each time; no slope or latency is negative."""
    several = len({row.ranks for row in rows}) > 1
    known = 0.0 if several else slope
    matrix = np.array([[1.0, row.ranks - 2 if several else 0.0, row.sent] for row in rows])
    seconds = np.array([row.seconds - known * (row.ranks - 2) for row in rows])
    weights = 1 / np.array([row.seconds for row in rows])
    latency, fitted, byte = _not_negative(matrix * weights[:, None], seconds * weights)
    fastest = max(row.sent / row.seconds for row in rows)
    bandwidth = 1 / byte if byte > 0 else fastest
    return Link(latency, fitted if several else slope, bandwidth)


def _not_negative(matrix: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Solve a least-squares problem; coefficients that would be negative are 0."""
    used = [at for at in range(matrix.shape[1]) if matrix[:, at].any()]
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)
        below = [at for at, value in zip(used, solved, strict=True) if value < 0]
        if not below:
            break
        used = [at for at in used if at not in below]
    values = dict(zip(used, map(float, solved), strict=True))
    return [values.get(at, 0.0) for at in range(matrix.shape[1])]


def _worst(carrier: Carrier, rows: Sequence[Exchange]) -> float:
    """By how much the law is off at most."""
    return max(abs(math.log(_seconds(carrier, row) / row.seconds)) for row in rows)


def _seconds(carrier: Carrier, row: Exchange) -> float:
    link = next(link for link in carrier if row.sent <= link.up_to)
    took = link.latency + (row.ranks - 2) * link.each + row.sent / link.bandwidth
    return max(took, 1e-9)
