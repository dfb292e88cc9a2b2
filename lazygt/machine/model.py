"""Cost model of a machine: figures in the sections of its file."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lazygt.machine.schema import CARRIERS, DTYPES, FAMILIES, RANGES

_CARRIER = re.compile(r"collectives\.(\w+)\[(\d+)\]\.(\w+)")


class Figure(NamedTuple):
    """A number with its origin."""

    value: float  # in the schema's unit
    basis: str  # ``measured`` or ``datasheet``
    source: str  # one of the file's sources


class Link(NamedTuple):
    """Latency and bandwidth of collectives, for payloads of some size."""

    latency: float  # seconds of a collective with a tiny payload on two ranks
    each: float  # additional seconds for each rank beyond the second
    bandwidth: float  # bytes a second that a rank sends while it receives as many
    up_to: float = math.inf  # sent bytes of a rank, up to which this entry holds


#: Links by payload size, ascending; the last one has no bound.
Carrier = tuple[Link, ...]


class Memory(NamedTuple):
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
    figures: Mapping[str, Figure]  # by key, such as ``memory.bandwidth``; ``schema`` has them all
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
        return {axis: replace(self, shares={}, share=share) for axis, share in self.shares.items()}

    @cached_property
    def memory(self) -> Memory:
        return Memory(**self._section("memory"))

    @cached_property
    def matmul(self) -> Matmul:
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
        links: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for key, figure in self.figures.items():
            if match := _CARRIER.fullmatch(key):
                links[match[1]][int(match[2])][match[3]] = figure.value
        carriers = {
            carrier: tuple([Link(**links[carrier][at]) for at in sorted(links[carrier])])
            for carrier in CARRIERS
        }
        return Collectives(**{**self._section("collectives"), **carriers})

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Measured sizes by quantity (``schema.RANGES``).

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
