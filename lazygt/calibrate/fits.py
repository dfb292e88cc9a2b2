"""Fits of the cost models in ``machine.prices`` to measured times."""

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

# -- clocks and minimum times ----------------------------------------------------------------------

Work = Callable[[], object]
K = TypeVar("K", bound=Hashable)
#: Maximum number of calls that are timed together.
_MAX_CALLS = 10_000


class Clock(Protocol):
    """Clock of one kind of device."""

    def seconds(self, work: Work, times: int) -> float:
        """Return the seconds of ``times`` calls in a row, until the last one is done."""
        ...


class HostClock:
    """Clock for synchronous work, done when its call returns.

    Args:
        threads: number of threads of the work. For a single thread its CPU time is measured, so
            that other load on the core does not matter; else wall-clock time.
    """

    def __init__(self, threads: int = 1) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter

    def seconds(self, work: Work, times: int) -> float:
        begin = self._now()
        for _ in range(times):
            work()
        return self._now() - begin


class EventClock:
    """Clock for kernels of a GPU: events before and after the kernels, on the same stream.

    Args:
        cuda: ``torch.cuda``, or a stand-in of a test.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def seconds(self, work: Work, times: int) -> float:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()  # earlier kernels are not part of the measurement
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
    progress: Callable[[], object] = lambda: None,
) -> dict[K, float]:
    """Return the minimum seconds of each work over all rounds.

    Disturbances only add time, and last a while: so every work is timed once in each round.

    Args:
        spend: approximate seconds of a work in a round.
        progress: called after each measurement.
    """
    times = {}
    for key, work in works.items():
        clock.seconds(work, 1)
        once = max(clock.seconds(work, 1), 1e-7)
        times[key] = min(max(int(spend / once), 1), _MAX_CALLS)
    best: dict[K, float] = {}
    for _ in range(rounds):
        for key, work in works.items():
            seconds = clock.seconds(work, times[key]) / times[key]
            best[key] = min(best.get(key, seconds), seconds)
            progress()
    return best


# -- fits ------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """Timed matrix product of [m, k] and [k, n]; ``seconds`` are without the launch."""

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
    """Grid search of tile sizes and depth: those with the most equal rates over all sizes.

    Of equally good ones the smallest win.
    """
    laws = (_law(rows, units, *sizes) for sizes in product(_TILES, _TILES, _DEPTHS))
    return min(laws, key=lambda law: round(law.error, 3))


def _law(
    rows: Sequence[Product], units: int, tile_rows: int, tile_columns: int, depth: int
) -> MatmulLaw:
    """Return the cost model with these tile sizes: the median rate of each dtype, and its error."""
    rates_of_dtype: dict[str, list[float]] = {}
    for dtype, m, n, k, seconds in rows:
        tiles = math.ceil(m / tile_rows) * math.ceil(n / tile_columns)
        rounds = math.ceil(tiles / units) * units
        flops = 2 * rounds * tile_rows * tile_columns * (k + depth)
        rates_of_dtype.setdefault(dtype, []).append(flops / seconds)
    rate = {dtype: median(values) for dtype, values in rates_of_dtype.items()}
    errors = [
        abs(math.log(value / rate[d])) for d, values in rates_of_dtype.items() for value in values
    ]
    return MatmulLaw(rate, tile_rows, tile_columns, depth, sum(errors) / len(errors))


class Exchange(NamedTuple):
    """Timed collective; ``sent``: bytes that each rank sends."""

    sent: float
    ranks: int
    seconds: float


def fit_carrier(rows: Sequence[Exchange], slope: float) -> Carrier:
    """Fit latency and bandwidth, in two pieces by payload size if that halves the maximum error.

    Args:
        slope: seconds for each rank beyond the second, used if only two ranks were timed.
    """
    single = _link(rows, slope)
    best: Carrier = (single,)
    least_error = _max_error(best, rows)
    sizes = sorted({row.sent for row in rows})
    for bound in sizes[2:-3]:
        pieces = [r for r in rows if r.sent <= bound], [r for r in rows if r.sent > bound]
        small, large = (_link(piece, slope) for piece in pieces)
        two_links = (small._replace(up_to=bound), large)
        if (error := _max_error(two_links, rows)) < least_error / 2:
            best, least_error = two_links, error
    return best


def _link(rows: Sequence[Exchange], slope: float) -> Link:
    """Fit latency, seconds a rank and seconds a byte by least squares of relative errors, >= 0."""
    several = len({row.ranks for row in rows}) > 1
    known_slope = 0.0 if several else slope
    matrix = np.array([[1.0, row.ranks - 2 if several else 0.0, row.sent] for row in rows])
    seconds = np.array([row.seconds - known_slope * (row.ranks - 2) for row in rows])
    weights = 1 / np.array([row.seconds for row in rows])
    latency, fitted_slope, seconds_per_byte = _nonnegative_lstsq(
        matrix * weights[:, None], seconds * weights
    )
    fastest = max(row.sent / row.seconds for row in rows)
    bandwidth = 1 / seconds_per_byte if seconds_per_byte > 0 else fastest
    return Link(latency, fitted_slope if several else slope, bandwidth)


def _nonnegative_lstsq(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Non-negative least squares: drop columns with negative coefficients until none is left."""
    used = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    while True:
        coefficients, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        negative = [column for column, value in zip(used, coefficients, strict=True) if value < 0]
        if not negative:
            break
        used = [column for column in used if column not in negative]
    values = dict(zip(used, map(float, coefficients), strict=True))
    return [values.get(column, 0.0) for column in range(matrix.shape[1])]


def _max_error(carrier: Carrier, rows: Sequence[Exchange]) -> float:
    """Return the maximum error of a carrier's model, as the logarithm of a ratio."""
    return max(abs(math.log(_seconds(carrier, row) / row.seconds)) for row in rows)


def _seconds(carrier: Carrier, row: Exchange) -> float:
    link = next(link for link in carrier if row.sent <= link.up_to)
    seconds = link.latency + (row.ranks - 2) * link.each + row.sent / link.bandwidth
    return max(seconds, 1e-9)
