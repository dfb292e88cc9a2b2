"""Cost models: seconds of work on a machine, from its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.machine.model import Carrier, LinkFigures, Machine

#: Collectives of indexed rows: ranks exchange counts, indices and rows (three rounds), and some
#: ranks have more rows than others (skew).
_INDEXED = ("take_rows", "put_rows")
_ROUNDS, _SKEW = 3, 2


def collective_seconds(machine: Machine, kind: str, nbytes: int, ranks: int) -> float:
    """Return the seconds of one collective between ranks of a host.

    The ranks are on several hosts if the machine's ``share`` is below 1. A collective on one rank
    takes no time.

    Args:
        kind: such as ``all_reduce``, as in ``Communication``.
        nbytes: payload, as in ``Communication``.
    """
    if ranks == 1:
        return 0.0
    if machine.share < 1 and machine.collectives.network:
        return _between_hosts(machine, kind, nbytes, ranks, max(round(machine.share * ranks), 1))
    carrier, sent = machine.collectives.local, ring_bytes(kind, nbytes, ranks)
    if machine.collectives.sockets and goes_by_sockets(kind, nbytes, ranks):
        carrier, sent = machine.collectives.sockets, socket_bytes(kind, nbytes, ranks)
    link = link_for(carrier, sent)
    if kind in _INDEXED:
        return _ROUNDS * link.start(ranks) + _SKEW * sent / link.bandwidth
    return link.seconds(sent, ranks)


def axis_group_seconds(machine: Machine, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Return the seconds of one collective between ranks of a mesh.

    Consecutive ranks share a host, up to the machine's ranks per host.

    Args:
        ranks: the ranks of the axis group, numbered in the mesh.
    """
    ranks_here = max(Counter(int(rank // machine.collectives.ranks) for rank in ranks).values())
    if ranks_here == len(ranks) or not machine.collectives.network:
        return collective_seconds(machine, kind, nbytes, len(ranks))
    return _between_hosts(machine, kind, nbytes, len(ranks), ranks_here)


def _between_hosts(machine: Machine, kind: str, nbytes: int, ranks: int, ranks_here: int) -> float:
    """Return the seconds of one collective across hosts.

    Every rank has its own link into the network, so as many rings run in parallel as the group has
    ranks on a host (``ranks_here``); they are no faster than a ring inside a host.

    Args:
        nbytes: payload, as in ``Communication``.
        ranks: number of ranks.
        ranks_here: ranks on the host with the most of them.
    """
    sent = ring_bytes(kind, nbytes, ranks)
    link = link_for(machine.collectives.network, sent)
    local = link_for(machine.collectives.local, sent)
    rings = 1 if kind in ("send_recv", "all_to_all") else ranks_here
    bandwidth = min(link.bandwidth * rings, local.bandwidth)
    return link._replace(bandwidth=bandwidth).seconds(sent, ranks)


def link_for(carrier: Carrier, sent: float) -> LinkFigures:
    """Return the entry of a carrier for a number of sent bytes."""
    return next(link for link in carrier if sent <= link.up_to)


def matmul_seconds(machine: Machine, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
    """Return the seconds of ``batch`` products of [m, k] and [k, n], without the launch.

    Roofline with tile quantization: results are computed in full tiles, ``units`` at a time, and
    each tile costs ``depth`` additional steps of the sum. The result is at least the time in which
    memory moves the operands and results.

    Args:
        dtype: a name such as ``bf16``, see ``machine.model.DTYPES``.
    """
    model = machine.matmul
    flops = tiled_flops(
        model.tile_rows, model.tile_columns, model.units, model.depth, m, n, k, batch
    )
    rate = model.rate_of(dtype)
    nbytes = batch * (m * k + k * n + m * n) * _ITEMSIZES[dtype]
    return max(flops / rate, moving_seconds(machine, nbytes))


def tiled_flops(
    tile_rows: float, tile_columns: float, units: float, depth: float, m: int, n: int, k: int,
    batch: int = 1,
) -> float:  # fmt: skip
    """Return the flops of ``batch`` products of [m, k] and [k, n] in full tiles and rounds.

    Args:
        tile_rows, tile_columns, units, depth: see ``machine.model.FIGURES``.
    """
    tiles = batch * math.ceil(m / tile_rows) * math.ceil(n / tile_columns)
    rounds = math.ceil(tiles / units) * units
    return 2 * rounds * tile_rows * tile_columns * (k + depth)


_ITEMSIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8": 1, "i8": 1}


def moving_seconds(machine: Machine, nbytes: float) -> float:
    """Return the seconds to read and write a number of bytes, by cache or memory bandwidth."""
    memory = machine.memory
    cached = nbytes <= memory.cache
    return nbytes / (memory.cache_bandwidth if cached else memory.bandwidth)
