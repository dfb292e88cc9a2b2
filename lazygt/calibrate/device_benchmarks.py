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
    """Amount of measurement.

    Attributes:
        rounds, spend: see ``least``.
        products: (m, n, k) of matmuls, and how many times larger they are on a GPU.
        cached, large: bytes of an operand that the cache has, and of one that it hasn't.
        collectives: payloads.
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
#: For tests: everything once.
SMALLEST = Size(1, 0.0, ((32, 32, 32), (8, 32, 32)), 1, 4 << 10, 256 << 10, (4 << 10, 256 << 10))


@dataclass(frozen=True)
class Device:
    """Device under measurement, its clock and the sizes."""

    type: str
    clock: Clock
    size: Size
    told: Callable[[], object] = lambda: None

    @property
    def scale(self) -> int:
        """Factor of matrix sizes over those of a CPU."""
        return self.size.on_gpus if self.type == "cuda" else 1

    @property
    def cached(self) -> int:
        """Bytes of an operand that the cache has, and that keeps the device busy."""
        return self.size.cached * self.scale**2

    @property
    def large(self) -> int:
        """Bytes of an operand that the cache has not."""
        return self.size.large * self.scale

    def least(self, works: dict[str, Work]) -> dict[str, float]:
        return least(self.clock, works, self.size.rounds, self.size.spend, self.told)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self.type)


def launch(device: Device) -> float:
    """Seconds of an op with next to no work."""
    a, into = device.ones(4), device.ones(4)
    return device.least({"launch": lambda: torch.add(a, a, out=into)})["launch"]


def matmuls(device: Device, launched: float, units: int) -> MatmulLaw:
    """The law of products of matrices."""
    shapes = [tuple(device.scale * each for each in shape) for shape in device.size.products]
    works = {
        f"{name} {m} {n} {k}": _product(device, dtype, m, n, k)
        for name, dtype in _DTYPES[device.type].items()
        for m, n, k in shapes
    }
    rows = []
    for key, seconds in device.least(works).items():
        name, *shape = key.split()
        m, n, k = map(int, shape)
        rows.append(Product(name, m, n, k, _beyond(seconds, launched)))
    return fit_matmul(rows, units)


def _product(device: Device, dtype: torch.dtype, m: int, n: int, k: int) -> Work:
    a, b = device.ones(m, k, dtype=dtype), device.ones(k, n, dtype=dtype)
    into = device.ones(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=into)


def pointwise(device: Device, launched: float) -> dict[str, float]:
    """Elements a second of each family, in the cache."""
    elements = device.cached // 4
    took = device.least(dict(_families(device, elements)))
    return {family: elements / _beyond(seconds, launched) for family, seconds in took.items()}


def _families(device: Device, elements: int) -> Iterator[tuple[str, Work]]:
    x, into = device.ones(elements), device.ones(elements)
    rows = x.view(-1, math.gcd(elements, 256))
    width = (rows.shape[1],)
    yield "add", lambda: torch.add(x, x, out=into)
    yield "exp", lambda: torch.exp(x, out=into)
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
    """Bytes a second of an addition, by the size of its operands."""
    sizes = _operands(device)
    operands = {size: [device.ones(size // 4) for _ in range(3)] for size in sizes}
    works: dict[str, Work] = {str(size): _added(*operands[size]) for size in sizes}
    a, b, _ = operands[device.large]
    if device.type == "cpu":
        works["fresh"] = lambda: torch.add(a, b)
    took = device.least(works)
    fresh = None
    if device.type == "cpu":
        fresh = device.large / max(took["fresh"] - took[str(device.large)], 1e-9)
    bandwidth, cache, cached = by_size(
        {3 * size: 3 * size / _beyond(took[str(size)], launched) for size in sizes}
    )
    return MemoryFigures(bandwidth, cache, cached, fresh)


def _operands(device: Device) -> list[int]:
    """Bytes of the operands of additions, the least first."""
    sizes = [device.cached]
    while 4 * sizes[-1] < device.large:
        sizes.append(4 * sizes[-1])
    return [*sizes, device.large]


def moved(device: Device) -> list[int]:
    """Bytes that the measured additions read and write."""
    return [3 * size for size in _operands(device)]


def by_size(rates: Mapping[int, float]) -> tuple[float, float, float]:
    """Bytes a second beyond the cache, the bytes that it has, and bytes a second in it.

    Args:
        rates: bytes -> bytes a second; small ones may be slow, since an op takes a while to begin.
    """
    beyond, within = rates[max(rates)], max(rates.values())
    between = math.sqrt(beyond * within)
    return beyond, max(size for size, rate in rates.items() if rate >= between), within


def _added(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> Work:
    return lambda: torch.add(a, b, out=into)


def _beyond(seconds: float, launched: float) -> float:
    """Subtract the launch from a time; of tiny times a tenth remains."""
    return max(seconds - launched, seconds / 10)
