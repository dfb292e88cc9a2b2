"""Benchmarks of one device: matmuls, families of pointwise ops, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from lazygt.machine.model import Carrier, LinkFigures
from lazygt.machine.prices import link_for, tiled_flops

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


def minimum_seconds(
    clock: Clock,
    works: Mapping[K, Work],
    rounds: int,
    spend: float,
    progress: Callable[[], object] = lambda: None,
) -> dict[K, float]:
    """Return the minimum seconds of each work over all rounds.

    Disturbances only add time, and last a while: so every work is timed once in each round.

    Args:
        works: functions to time, by any key.
        spend: approximate seconds of a work in a round, by which its number of calls is chosen.
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


# -- fits of the cost models in ``machine.prices`` to measured times -------------------------------


class ProductFit(NamedTuple):
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


def fit_matmul(rows: Sequence[ProductFit], units: int) -> MatmulLaw:
    """Grid search of tile sizes and depth: those with the most equal rates over all sizes.

    Of equally good ones the smallest win.
    """
    laws = (_law(rows, units, *sizes) for sizes in product(_TILES, _TILES, _DEPTHS))
    return min(laws, key=lambda law: round(law.error, 3))


def _law(
    rows: Sequence[ProductFit], units: int, tile_rows: int, tile_columns: int, depth: int
) -> MatmulLaw:
    """Return the cost model with these tile sizes: the median rate of each dtype, and its error."""
    rates_of_dtype: dict[str, list[float]] = {}
    for dtype, m, n, k, seconds in rows:
        flops = tiled_flops(tile_rows, tile_columns, units, depth, m, n, k)
        rates_of_dtype.setdefault(dtype, []).append(flops / seconds)
    rate = {dtype: median(values) for dtype, values in rates_of_dtype.items()}
    errors = [
        abs(math.log(value / rate[d])) for d, values in rates_of_dtype.items() for value in values
    ]
    return MatmulLaw(rate, tile_rows, tile_columns, depth, sum(errors) / len(errors))


class ExchangeFit(NamedTuple):
    """Timed collective."""

    sent: float  # bytes that each rank sends
    ranks: int
    seconds: float


def fit_carrier(rows: Sequence[ExchangeFit], slope: float) -> Carrier:
    """Fit latency and bandwidth, in two pieces by payload size if that halves the maximum error.

    Args:
        rows: collectives timed on one carrier (such as sockets).
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


def _link(rows: Sequence[ExchangeFit], slope: float) -> LinkFigures:
    """Fit latency, seconds a rank and seconds a byte: non-negative least squares, relative errors.

    Args:
        slope: seconds a rank, if all rows have the same number of ranks.
    """
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
    return LinkFigures(latency, fitted_slope if several else slope, bandwidth)


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


def _max_error(carrier: Carrier, rows: Sequence[ExchangeFit]) -> float:
    """Return the maximum error of a carrier's model, as the logarithm of a ratio."""
    return max(abs(math.log(_seconds(carrier, row) / row.seconds)) for row in rows)


def _seconds(carrier: Carrier, row: ExchangeFit) -> float:
    return max(link_for(carrier, row.sent).seconds(row.sent, row.ranks), 1e-9)


# -- benchmarks of one device: matmuls, families of pointwise ops, memory --------------------------

_DTYPES = {
    "cpu": {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16},
    "cuda": {
        "f32": torch.float32,
        "f64": torch.float64,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
    },
}


class BenchmarkSize(NamedTuple):
    """Sizes and rounds of measurements.

    Attributes:
        rounds, spend: see ``minimum_seconds``.
        products: (m, n, k) of matmuls on a CPU.
        on_gpus: factor of these sizes on a GPU.
        cached, large: bytes of an operand that fits into the cache, and of one that does not.
        collectives: payloads in bytes.
    """

    rounds: int
    spend: float
    products: tuple[tuple[int, int, int], ...]
    on_gpus: int
    cached: int
    large: int
    collectives: tuple[int, ...]


_GRID = (
    (512, 512, 512), (256, 256, 256), (128, 128, 128), (64, 64, 64),
    (8, 512, 512), (20, 512, 512), (100, 512, 512), (512, 8, 512), (512, 20, 512),
    (512, 100, 512), (512, 512, 8), (512, 512, 32), (512, 512, 128),
)  # fmt: skip
FULL = BenchmarkSize(
    9, 0.003, _GRID, 8, 64 << 10, 64 << 20, tuple(4 << 10 + 2 * i for i in range(8))
)
QUICK = BenchmarkSize(
    4, 0.002, (*_GRID[1:3], _GRID[4]), 8, 64 << 10, 16 << 20, (4 << 10, 64 << 10, 1 << 20)
)
#: For tests: everything is measured once.
SMALLEST = BenchmarkSize(
    1, 0.0, ((32, 32, 32), (8, 32, 32)), 1, 4 << 10, 256 << 10, (4 << 10, 256 << 10)
)


@dataclass(frozen=True)
class Device:
    """Device under measurement, its clock and the sizes."""

    type: str
    clock: Clock
    size: BenchmarkSize
    progress: Callable[[], object] = lambda: None

    @property
    def scale(self) -> int:
        """Factor of matrix sizes over those of a CPU."""
        return self.size.on_gpus if self.type == "cuda" else 1

    @property
    def cached(self) -> int:
        """Bytes of an operand that fits into the cache, and keeps the device busy."""
        return self.size.cached * self.scale**2

    @property
    def large(self) -> int:
        """Bytes of an operand that does not fit into the cache."""
        return self.size.large * self.scale

    def minimum_seconds(self, works: dict[str, Work]) -> dict[str, float]:
        """Return the minimum seconds of each work on this device."""
        return minimum_seconds(self.clock, works, self.size.rounds, self.size.spend, self.progress)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of ones on this device."""
        return torch.ones(shape, dtype=dtype, device=self.type)


def launch(device: Device) -> float:
    """Measure the launch: seconds of an op with almost no work."""
    a, out = device.ones(4), device.ones(4)
    return device.minimum_seconds({"launch": lambda: torch.add(a, a, out=out)})["launch"]


def matmuls(device: Device, launch_seconds: float, units: int) -> MatmulLaw:
    """Measure matmuls of several sizes and dtypes, and fit their cost model.

    Args:
        launch_seconds: time of a launch, which is subtracted.
        units: number of tiles that the device computes at once.
    """
    shapes = [tuple(device.scale * size for size in shape) for shape in device.size.products]
    works = {
        f"{name} {m} {n} {k}": _product(device, dtype, m, n, k)
        for name, dtype in _DTYPES[device.type].items()
        for m, n, k in shapes
    }
    rows = []
    for key, seconds in device.minimum_seconds(works).items():
        name, *shape = key.split()
        m, n, k = map(int, shape)
        rows.append(ProductFit(name, m, n, k, _without_launch(seconds, launch_seconds)))
    return fit_matmul(rows, units)


def _product(device: Device, dtype: torch.dtype, m: int, n: int, k: int) -> Work:
    """Return a function that multiplies an [m, k] by a [k, n] matrix."""
    a, b = device.ones(m, k, dtype=dtype), device.ones(k, n, dtype=dtype)
    out = device.ones(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def pointwise(device: Device, launch_seconds: float) -> dict[str, float]:
    """Measure the elements per second of each family of pointwise ops, with cached operands."""
    elements = device.cached // 4
    seconds_of_family = device.minimum_seconds(dict(_families(device, elements)))
    return {
        family: elements / _without_launch(seconds, launch_seconds)
        for family, seconds in seconds_of_family.items()
    }


def _families(device: Device, elements: int) -> Iterator[tuple[str, Work]]:
    """Yield an op of each family of pointwise ops, on operands of so many elements."""
    x, out = device.ones(elements), device.ones(elements)
    rows = x.view(-1, math.gcd(elements, 256))
    width = (rows.shape[1],)
    yield "add", lambda: torch.add(x, x, out=out)
    yield "exp", lambda: torch.exp(x, out=out)
    yield "gelu", lambda: F.gelu(x)
    yield "norm", lambda: F.layer_norm(rows, width)
    yield "softmax", lambda: torch.softmax(rows, -1)
    yield "reduction", lambda: rows.sum(-1)


class MemoryFigures(NamedTuple):
    """See ``machine.model.MemorySpec``; ``fresh_bandwidth`` of a CPU only."""

    bandwidth: float
    cache: float
    cache_bandwidth: float
    fresh_bandwidth: float | None


def memory(device: Device, launch_seconds: float) -> MemoryFigures:
    """Measure the bandwidth of memory and cache by additions of operands of many sizes."""
    sizes = _operands(device)
    operands = {size: [device.ones(size // 4) for _ in range(3)] for size in sizes}
    works: dict[str, Work] = {str(size): _addition(*operands[size]) for size in sizes}
    a, b, _ = operands[device.large]
    if device.type == "cpu":  # a result in new memory, of which the kernel first clears the pages
        works["fresh"] = lambda: torch.add(a, b)
    seconds = device.minimum_seconds(works)
    fresh_bandwidth = None
    if device.type == "cpu":
        fresh_bandwidth = device.large / max(seconds["fresh"] - seconds[str(device.large)], 1e-9)
    bandwidth, cache, cached = split_at_cache(
        {3 * size: 3 * size / _without_launch(seconds[str(size)], launch_seconds) for size in sizes}
    )
    return MemoryFigures(bandwidth, cache, cached, fresh_bandwidth)


def _operands(device: Device) -> list[int]:
    """Return the bytes of the operands of additions, the smallest first."""
    sizes = [device.cached]
    while 4 * sizes[-1] < device.large:
        sizes.append(4 * sizes[-1])
    return [*sizes, device.large]


def addition_bytes(device: Device) -> list[int]:
    """Return the bytes that each measured addition reads and writes."""
    return [3 * size for size in _operands(device)]


def split_at_cache(rates: Mapping[int, float]) -> tuple[float, float, float]:
    """Split measured rates at the cache: (memory bandwidth, cache size, cache bandwidth).

    The cache is the largest size with a rate above the geometric mean of both bandwidths.

    Args:
        rates: bytes -> bytes a second; small sizes may be slow because of the launch.
    """
    memory_rate, cache_rate = rates[max(rates)], max(rates.values())
    threshold = math.sqrt(memory_rate * cache_rate)
    return memory_rate, max(size for size, rate in rates.items() if rate >= threshold), cache_rate


def _addition(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Work:
    return lambda: torch.add(a, b, out=out)


def _without_launch(seconds: float, launch_seconds: float) -> float:
    """Subtract the launch from a time; at least a tenth of the time remains."""
    return max(seconds - launch_seconds, seconds / 10)
