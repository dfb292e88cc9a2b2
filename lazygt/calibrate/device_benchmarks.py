"""Benchmarks of one device: matmuls, families of pointwise ops, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lazygt.calibrate.fits import Clock, MatmulLaw, Product, Work, fit_matmul, least

_DTYPES = {
    "cpu": {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16},
    "cuda": {
        "f32": torch.float32,
        "f64": torch.float64,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
    },
}


class Size(NamedTuple):
    """Sizes and rounds of measurements.

    Attributes:
        rounds, spend: see ``least``.
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
FULL = Size(9, 0.003, _GRID, 8, 64 << 10, 64 << 20, tuple(4 << 10 + 2 * i for i in range(8)))
QUICK = Size(4, 0.002, (*_GRID[1:3], _GRID[4]), 8, 64 << 10, 16 << 20, (4 << 10, 64 << 10, 1 << 20))
#: For tests: everything is measured once.
SMALLEST = Size(1, 0.0, ((32, 32, 32), (8, 32, 32)), 1, 4 << 10, 256 << 10, (4 << 10, 256 << 10))


@dataclass(frozen=True)
class Device:
    """Device under measurement, its clock and the sizes."""

    type: str
    clock: Clock
    size: Size
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

    def least(self, works: dict[str, Work]) -> dict[str, float]:
        return least(self.clock, works, self.size.rounds, self.size.spend, self.progress)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self.type)


def launch(device: Device) -> float:
    """Measure the launch: seconds of an op with almost no work."""
    a, out = device.ones(4), device.ones(4)
    return device.least({"launch": lambda: torch.add(a, a, out=out)})["launch"]


def matmuls(device: Device, launched: float, units: int) -> MatmulLaw:
    """Measure matmuls of several sizes and dtypes, and fit their cost model."""
    shapes = [tuple(device.scale * size for size in shape) for shape in device.size.products]
    works = {
        f"{name} {m} {n} {k}": _product(device, dtype, m, n, k)
        for name, dtype in _DTYPES[device.type].items()
        for m, n, k in shapes
    }
    rows = []
    for key, seconds in device.least(works).items():
        name, *shape = key.split()
        m, n, k = map(int, shape)
        rows.append(Product(name, m, n, k, _without_launch(seconds, launched)))
    return fit_matmul(rows, units)


def _product(device: Device, dtype: torch.dtype, m: int, n: int, k: int) -> Work:
    a, b = device.ones(m, k, dtype=dtype), device.ones(k, n, dtype=dtype)
    out = device.ones(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def pointwise(device: Device, launched: float) -> dict[str, float]:
    """Measure the elements per second of each family of pointwise ops, with cached operands."""
    elements = device.cached // 4
    seconds_of_family = device.least(dict(_families(device, elements)))
    return {
        family: elements / _without_launch(seconds, launched)
        for family, seconds in seconds_of_family.items()
    }


def _families(device: Device, elements: int) -> Iterator[tuple[str, Work]]:
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
    """See ``machine.model.Memory``; ``fresh_bandwidth`` of a CPU only."""

    bandwidth: float
    cache: float
    cache_bandwidth: float
    fresh_bandwidth: float | None


def memory(device: Device, launched: float) -> MemoryFigures:
    """Measure the bandwidth of memory and cache by additions of operands of many sizes."""
    sizes = _operands(device)
    operands = {size: [device.ones(size // 4) for _ in range(3)] for size in sizes}
    works: dict[str, Work] = {str(size): _addition(*operands[size]) for size in sizes}
    a, b, _ = operands[device.large]
    if device.type == "cpu":
        works["fresh"] = lambda: torch.add(a, b)
    seconds = device.least(works)
    fresh_bandwidth = None
    if device.type == "cpu":
        fresh_bandwidth = device.large / max(seconds["fresh"] - seconds[str(device.large)], 1e-9)
    bandwidth, cache, cached = by_size(
        {3 * size: 3 * size / _without_launch(seconds[str(size)], launched) for size in sizes}
    )
    return MemoryFigures(bandwidth, cache, cached, fresh_bandwidth)


def _operands(device: Device) -> list[int]:
    """Return the bytes of the operands of additions, the smallest first."""
    sizes = [device.cached]
    while 4 * sizes[-1] < device.large:
        sizes.append(4 * sizes[-1])
    return [*sizes, device.large]


def moved(device: Device) -> list[int]:
    """Return the bytes that each measured addition reads and writes."""
    return [3 * size for size in _operands(device)]


def by_size(rates: Mapping[int, float]) -> tuple[float, float, float]:
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


def _without_launch(seconds: float, launched: float) -> float:
    """Subtract the launch from a time; at least a tenth of the time remains."""
    return max(seconds - launched, seconds / 10)
