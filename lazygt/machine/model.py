"""Cost model of a machine: figures in the sections of its file."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

# -- schema of a machine file: units and bounds of its figures, and the required ones --------------
# A change that would misread old files needs a new VERSION.

VERSION = 1
DEVICES = ("cpu", "cuda")
#: Origins of figures.
BASES = ("measured", "datasheet")
#: Dtypes of matmuls, as graphs print them; f8 stands for both of torch's eight-bit floats.
DTYPES = ("f64", "f32", "f16", "bf16", "f8", "i8")
#: Families of elementwise ops, by the work on an element.
FAMILIES = ("add", "exp", "gelu", "norm", "softmax", "reduction")
#: Carriers of collectives: between ranks of a host, between CPUs of a host for small payloads, and
#: between hosts.
CARRIERS = ("local", "sockets", "network")


class Quantity(NamedTuple):
    """Definition of a figure."""

    unit: str  # unit in the file
    least: float  # plausible minimum
    most: float  # plausible maximum
    about: str  # description
    needed: bool = True  # required in every file


_SECONDS = (0.0, 10.0)
_BANDWIDTH = (1e6, 1e15)

FIGURES: dict[str, Quantity] = {
    "memory.capacity": Quantity("B", 1e6, 1e15, "memory that a rank has"),
    "memory.bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes read and written, beyond the cache"),
    "memory.cache": Quantity("B", 1e3, 1e12, "operands and results up to which the cache has them"),
    "memory.cache_bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes read and written, in the cache"),
    "memory.fresh_bandwidth": Quantity(
        "B/s", *_BANDWIDTH, "bytes of memory that is touched for the first time", False
    ),
    "matmul.tile_rows": Quantity("1", 1, 4096, "rows of a result that are computed together"),
    "matmul.tile_columns": Quantity("1", 1, 4096, "columns likewise"),
    "matmul.units": Quantity("1", 1, 1e5, "tiles that are computed at once"),
    "matmul.depth": Quantity(
        "1", 0, 1e5, "steps of the sum that beginning and ending a tile takes as long as", False
    ),
    **{
        f"matmul.peak.{dtype}": Quantity(
            "flop/s", 1e6, 1e18, f"what the hardware could do at most in {dtype}", False
        )
        for dtype in DTYPES
    },
    **{
        f"matmul.rate.{dtype}": Quantity(
            "flop/s", 1e6, 1e18, f"what large products in {dtype} reach", dtype == "f32"
        )
        for dtype in DTYPES
    },
    **{
        f"pointwise.{family}": Quantity(
            "element/s", 1e3, 1e16, f"elements of {family}, where memory is fast enough"
        )
        for family in FAMILIES
    },
    "host.launch": Quantity("s", *_SECONDS, "an op with next to no work"),
    "host.call": Quantity("s", *_SECONDS, "a call of compiled code"),
    "host.record": Quantity("s", *_SECONDS, "recording an op"),
    "host.message": Quantity("s", *_SECONDS, "a run that is sent, and its answer"),
    "collectives.packed": Quantity(
        "B", 0, 1e12, "values up to which travel faster packed with others than alone"
    ),
    "collectives.ranks": Quantity("1", 1, 1e6, "ranks that a host has room for"),
    **{
        f"range.{what}.{end}": Quantity(unit, 1, 1e15, f"the {end} {about}", False)
        for what, unit, about in (
            ("products", "1", "rows, columns or depth of the products that were measured"),
            ("bytes", "B", "that an op read and wrote which was measured"),
            ("payloads", "B", "payload of the collectives that were measured"),
            ("ranks", "1", "ranks that met in them"),
        )
        for end in ("least", "most")
    },
}
#: Quantities with a measured range of sizes; predictions beyond it are reported.
RANGES = ("products", "bytes", "payloads", "ranks")

#: Figures of each entry of ``[[collectives.CARRIER]]``; ``up_to`` in all but the last.
LINK: dict[str, Quantity] = {
    "latency": Quantity("s", *_SECONDS, "a collective with no payload to speak of"),
    "each": Quantity("s", *_SECONDS, "the same, for each rank beyond the second"),
    "bandwidth": Quantity("B/s", *_BANDWIDTH, "bytes that a rank sends while it receives as many"),
    "up_to": Quantity("B", 1, 1e15, "bytes that a rank sends, to which the entry holds", False),
}


def quantity(key: str) -> Quantity:
    """Return the definition of a figure by its key, as in ``collectives.local[0].each``."""
    return FIGURES.get(key) or LINK[key.rpartition(".")[2]]


# -- cost model of a machine: figures in the sections of its file ----------------------------------

_CARRIER = re.compile(r"collectives\.(\w+)\[(\d+)\]\.(\w+)")


class Figure(NamedTuple):
    """A number with its origin."""

    value: float  # in the schema's unit
    basis: str  # ``measured`` or ``datasheet``
    source: str  # one of the file's sources


class LinkFigures(NamedTuple):
    """Latency and bandwidth of collectives, for payloads of some size."""

    latency: float  # seconds of a collective with a tiny payload on two ranks
    each: float  # additional seconds for each rank beyond the second
    bandwidth: float  # bytes a second that a rank sends while it receives as many
    up_to: float = math.inf  # sent bytes of a rank, up to which this entry holds

    def start(self, ranks: int) -> float:
        """Return the seconds of a collective with a tiny payload."""
        return self.latency + (ranks - 2) * self.each

    def seconds(self, sent: float, ranks: int) -> float:
        """Return the seconds of a collective in which each rank sends a number of bytes."""
        return self.start(ranks) + sent / self.bandwidth


#: Way on which bytes of collectives travel (see ``CARRIERS``): its links by payload size, in
#: ascending order; the last one has no bound.
Carrier = tuple[LinkFigures, ...]


class MemorySpec(NamedTuple):
    """Memory of a rank in bytes, and its bandwidths in bytes a second; see the schema."""

    capacity: float
    bandwidth: float
    cache: float
    cache_bandwidth: float
    fresh_bandwidth: float = math.inf


class Matmul(NamedTuple):
    """Throughput of products of matrices; see ``prices.matmul_seconds``."""

    rate: Mapping[str, float]  # arithmetic operations a second, by dtype
    peak: Mapping[str, float]
    tile_rows: float
    tile_columns: float
    units: float
    depth: float = 0.0

    def rate_of(self, dtype: str) -> float:
        """Return the rate in a dtype; that of f32 if the dtype has none."""
        return self.rate.get(dtype) or self.rate["f32"]

    def most(self, dtype: str) -> float:
        """Return the hardware's peak rate in a dtype, or the measured rate if it is unknown."""
        return self.peak.get(dtype) or self.rate_of(dtype)


class Range(NamedTuple):
    """Range of measured sizes."""

    least: float
    most: float


class Host(NamedTuple):
    """Overheads in seconds; see the schema."""

    launch: float
    call: float
    record: float
    message: float


class Collectives(NamedTuple):
    """Carriers of collectives; a missing one is empty."""

    packed: float  # bytes up to which a value is faster to send packed with others than alone
    ranks: float  # capacity of a host
    local: Carrier = ()
    sockets: Carrier = ()  # of payloads for which ``goes_by_sockets`` holds
    network: Carrier = ()


@dataclass(frozen=True, eq=False)
class Machine:
    """Cost model of one rank and its links to others."""

    name: str
    device: str  # ``cpu`` or ``cuda``
    about: str
    figures: Mapping[str, Figure]  # by key, such as ``memory.bandwidth``; ``FIGURES`` has them all
    sources: Mapping[str, str]  # name -> origin of the measurement, or the datasheet
    path: str = ""  # path of its file; empty for a shipped machine
    #: axis of a mesh that crosses hosts -> share of its ranks on one host (see ``on_hosts``)
    shares: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0  # that share for the one axis of ``along``; 1: all ranks are on one host

    def along(self, axis: str) -> Machine:
        """Return the machine for collectives along an axis (cached: always the same object)."""
        return self._along.get(axis, self)

    @cached_property
    def _along(self) -> Mapping[str, Machine]:
        """Machine for collectives along each axis that crosses hosts."""
        return {axis: replace(self, shares={}, share=share) for axis, share in self.shares.items()}

    @cached_property
    def memory(self) -> MemorySpec:
        return MemorySpec(**self._section("memory"))

    @cached_property
    def matmul(self) -> Matmul:
        """Throughput of matrix products, by dtype."""
        rates = {d: self.figures[f"matmul.rate.{d}"].value for d in DTYPES if self.has("rate", d)}
        peaks = {d: self.figures[f"matmul.peak.{d}"].value for d in DTYPES if self.has("peak", d)}
        return Matmul(rates, peaks, **self._section("matmul"))

    def has(self, what: str, dtype: str) -> bool:
        """Return whether there is a ``rate``, or a ``peak``, of matmuls in a dtype."""
        return f"matmul.{what}.{dtype}" in self.figures

    @cached_property
    def pointwise(self) -> Mapping[str, float]:
        """Elements a second, by family."""
        return {family: self.figures[f"pointwise.{family}"].value for family in FAMILIES}

    @cached_property
    def host(self) -> Host:
        return Host(**self._section("host"))

    @cached_property
    def collectives(self) -> Collectives:
        """Carriers, from figures such as ``collectives.local[0].latency``."""
        links: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for key, figure in self.figures.items():
            if match := _CARRIER.fullmatch(key):
                links[match[1]][int(match[2])][match[3]] = figure.value
        carriers = {
            carrier: tuple([LinkFigures(**links[carrier][at]) for at in sorted(links[carrier])])
            for carrier in CARRIERS
        }
        return Collectives(**{**self._section("collectives"), **carriers})

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Measured sizes by quantity (``RANGES``).

        Quantities without a range, as those of datasheets, are missing.
        """
        ends = {what: [f"range.{what}.{end}" for end in Range._fields] for what in RANGES}
        return {
            what: Range(*[self.figures[key].value for key in keys])
            for what, keys in ends.items()
            if all(key in self.figures for key in keys)
        }

    def _section(self, name: str) -> dict[str, Any]:
        """Return the figures directly in a section, by name."""
        entries = ((key.split("."), figure.value) for key, figure in self.figures.items())
        return {
            key[1]: value
            for key, value in entries
            if key[0] == name and len(key) == 2 and "[" not in key[1]
        }

    def with_values(self, values: Mapping[str, float]) -> Machine:
        """Return a copy of the machine with other values of some figures."""
        figures = {
            **self.figures, **{key: self.figures[key]._replace(value=values[key]) for key in values}
        }  # fmt: skip
        return replace(self, figures=figures, path="")

    def __str__(self) -> str:
        return f"{self.name} ({self.path})" if self.path else self.name
