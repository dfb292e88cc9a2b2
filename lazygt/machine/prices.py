"""Cost laws: seconds of work on a machine, with its figures as constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.machine.model import Carrier, Link, Machine

#: Of rows ranks exchange how many there are, their places, and the rows; and some ranks have more
#: of them than others.
_OF_ROWS = ("take_rows", "put_rows")
_ROUNDS, _SKEW = 3, 2


def collective_seconds(machine: Machine, kind: str, nbytes: int, parts: int) -> float:
    """Return the seconds of one collective between ranks of a host.

    The payload is as ``Communication`` has it. Ranks are on several hosts where the machine's
    ``share`` is below 1. On one rank it takes no time.
    """
    if parts == 1:
        return 0.0
    if machine.share < 1 and machine.collectives.network:
        return _between_hosts(machine, kind, nbytes, parts, max(round(machine.share * parts), 1))
    carrier, sent = machine.collectives.local, ring_bytes(kind, nbytes, parts)
    if machine.collectives.sockets and goes_by_sockets(kind, nbytes, parts):
        carrier, sent = machine.collectives.sockets, socket_bytes(kind, nbytes, parts)
    link = link_for(carrier, sent)
    start = link.latency + (parts - 2) * link.each
    if kind in _OF_ROWS:
        return _ROUNDS * start + _SKEW * sent / link.bandwidth
    return start + sent / link.bandwidth


def line_seconds(machine: Machine, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Return the seconds of one collective between ranks of a mesh.

    A host has as many consecutive ranks as the machine says.
    """
    here = max(Counter(int(rank // machine.collectives.ranks) for rank in ranks).values())
    if here == len(ranks) or not machine.collectives.network:
        return collective_seconds(machine, kind, nbytes, len(ranks))
    return _between_hosts(machine, kind, nbytes, len(ranks), here)


def _between_hosts(machine: Machine, kind: str, nbytes: int, parts: int, here: int) -> float:
    """The time of one collective between ranks of which so many are here, on one host.

    Between hosts every rank has a link of its own into the network, and a ring goes from host to
    host once for each rank that the line has there; it is no faster than inside a host.
    """
    sent = ring_bytes(kind, nbytes, parts)
    link = link_for(machine.collectives.network, sent)
    local = link_for(machine.collectives.local, sent)
    rings = 1 if kind in ("send_recv", "all_to_all") else here
    bandwidth = min(link.bandwidth * rings, local.bandwidth)
    return link.latency + (parts - 2) * link.each + sent / bandwidth


def link_for(carrier: Carrier, sent: float) -> Link:
    """The entry that holds for so many bytes."""
    return next(link for link in carrier if sent <= link.up_to)


def matmul_seconds(machine: Machine, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
    """The time of ``batch`` products of [m, k] and [k, n], without the launch.

    Tiles of the results are computed whole, so many at a time; each takes some steps of the sum
    more than it has. Where that is faster than memory, memory decides.
    """
    law = machine.matmul
    tiles = batch * math.ceil(m / law.tile_rows) * math.ceil(n / law.tile_columns)
    rounds = math.ceil(tiles / law.units) * law.units
    flops = 2 * rounds * law.tile_rows * law.tile_columns * (k + law.depth)
    rate = law.rate_of(dtype)
    nbytes = batch * (m * k + k * n + m * n) * _ITEMSIZES[dtype]
    return max(flops / rate, moving_seconds(machine, nbytes))


_ITEMSIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8": 1, "i8": 1}


def moving_seconds(machine: Machine, nbytes: float) -> float:
    """The time in which so many bytes are read and written."""
    memory = machine.memory
    cached = nbytes <= memory.cache
    return nbytes / (memory.cache_bandwidth if cached else memory.bandwidth)


def pointwise_seconds(machine: Machine, family: str, elements: int, nbytes: float) -> float:
    """The time of an op that goes through ``elements``, without the launch.

    Args:
        family: one of ``schema.FAMILIES``.
        nbytes: that it reads and writes.
    """
    return max(elements / machine.pointwise[family], moving_seconds(machine, nbytes))
