"""Cost models: seconds of work on a machine, from its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.collectives import Communication, goes_by_sockets, ring_bytes, socket_bytes
from lazygt.graph.cost import base_name, family, graph_costs, product_sizes
from lazygt.graph.meta import TensorMeta, short_dtype
from lazygt.graph.node import Graph, Node
from lazygt.graph.text import amount
from lazygt.machine.model import Carrier, LinkFigures, Machine, Range

# -- extrapolation in predictions: sizes beyond those of the calibration ---------------------------
# The cost models of ``prices`` apply to any size, but were calibrated in a range only. A machine
# with figures of datasheets has no ranges.


class Outside(NamedTuple):
    """Ops of one kind beyond the calibrated range: the farthest, and their number.

    Attributes:
        what: the calibrated quantity, such as ``products``.
        op, line: the farthest op.
        size: its size, with the unit.
        measured: the calibrated range.
        times: number of ops outside over all runs.
        far: factor by which the farthest is outside.
    """

    what: str
    op: str
    line: str
    size: str
    measured: str
    times: int
    far: float


def outside(machine: Machine, graph: Graph, sent: Iterable[Communication]) -> list[Outside]:
    """Find the ops of one run of a graph outside of the calibrated ranges, one row for each kind.

    Args:
        sent: collectives of the run.
    """
    if not machine.ranges:
        return []
    rows = [*_of_nodes(machine, graph), *_of_collectives(machine.ranges, sent)]
    return farthest(rows)


def farthest(rows: Iterable[Outside]) -> list[Outside]:
    """Reduce rows to the farthest of each kind, with the number of ops of the kind."""
    farthest_of_kind: dict[str, Outside] = {}
    for row in rows:
        previous = farthest_of_kind.get(row.what)
        if previous is None:
            farthest_of_kind[row.what] = row
        else:
            farthest_of_kind[row.what] = max(previous, row, key=_far)._replace(
                times=previous.times + row.times
            )
    return list(farthest_of_kind.values())


def _far(row: Outside) -> float:
    return row.far


def _of_nodes(machine: Machine, graph: Graph) -> Iterator[Outside]:
    metas = graph.values
    for number, (node, cost) in enumerate(zip(graph.nodes, graph_costs(graph), strict=True)):
        nbytes = cost.bytes
        if nbytes and family(node) != "collective":
            yield from _outside_range(
                machine.ranges, "bytes", base_name(node.op), graph.line(number), nbytes, "B"
            )
        yield from _of_product(machine, node, metas, graph.line(number))
        if node.body is not None:
            inner = node.body.values
            for index, member in enumerate(node.body.nodes):
                yield from _of_product(machine, member, inner, node.body.line(index))


def _of_product(
    machine: Machine, node: Node, metas: Sequence[TensorMeta | None], line: str
) -> Iterator[Outside]:
    """Yield the rows of a matrix product: its largest excess in size, and an unmeasured dtype."""
    sizes = product_sizes(node, metas)
    if sizes is None:
        return
    op = base_name(node.op)
    rows = [
        row
        for size in sizes[:3]
        for row in _outside_range(machine.ranges, "products", op, line, size)
    ]
    if rows:
        size_text = " x ".join(f"{size:,}" for size in sizes[:3])
        yield max(rows, key=_far)._replace(size=size_text)
    operand = next((meta for value in node.refs() if (meta := metas[value]) is not None), None)
    dtype = "f32" if operand is None else short_dtype(operand.dtype)
    if dtype not in machine.matmul.rate and not dtype.startswith("float8"):
        yield Outside("dtypes", op, line, dtype, ", ".join(machine.matmul.rate), 1, 1.0)


def _of_collectives(
    ranges: Mapping[str, Range], sent: Iterable[Communication]
) -> Iterator[Outside]:
    for exchange in sent:
        kind, line = exchange.kind, exchange.source
        yield from _outside_range(ranges, "payloads", kind, line, exchange.nbytes, "B")
        yield from _outside_range(ranges, "ranks", kind, line, exchange.ranks)


def _outside_range(
    ranges: Mapping[str, Range], what: str, op: str, line: str, size: int, unit: str = ""
) -> Iterator[Outside]:
    """Yield a row if a size is outside of its range.

    Sizes below the range count for products only; others cost a launch or a latency, which are
    calibrated.
    """
    calibrated = ranges.get(what)
    least = 0.0 if calibrated is None or what != "products" else calibrated.least
    if calibrated is None or not size or least <= size <= calibrated.most:
        return
    far = max(size / calibrated.most, least / size)
    measured = f"{_shown(calibrated.least, unit)} to {_shown(calibrated.most, unit)}"
    yield Outside(what, op, line, _shown(size, unit), measured, 1, far)


def _shown(size: float, unit: str) -> str:
    return amount(round(size), unit) if unit else f"{round(size):,}"


# -- cost models: seconds of work on a machine, from its figures -----------------------------------

#: Collectives of indexed rows: ranks exchange counts, indices and rows (three rounds), and some
#: ranks have more rows than others (skew).
_INDEXED = ("take_rows", "put_rows")
_ROUNDS, _SKEW = 3, 2


def collective_seconds(machine: Machine, kind: str, nbytes: int, ranks: int) -> float:
    """Return the seconds of one collective between ranks of a host.

    The payload is that of ``Communication``. The ranks are on several hosts if the machine's
    ``share`` is below 1. A collective on one rank takes no time.
    """
    if ranks == 1:
        return 0.0
    if machine.share < 1 and machine.collectives.network:
        return _between_hosts(machine, kind, nbytes, ranks, max(round(machine.share * ranks), 1))
    carrier, sent = machine.collectives.local, ring_bytes(kind, nbytes, ranks)
    if machine.collectives.sockets and goes_by_sockets(kind, nbytes, ranks):
        carrier, sent = machine.collectives.sockets, socket_bytes(kind, nbytes, ranks)
    link = link_for(carrier, sent)
    start = link.latency + (ranks - 2) * link.each
    if kind in _INDEXED:
        return _ROUNDS * start + _SKEW * sent / link.bandwidth
    return start + sent / link.bandwidth


def line_seconds(machine: Machine, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
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
    """
    sent = ring_bytes(kind, nbytes, ranks)
    link = link_for(machine.collectives.network, sent)
    local = link_for(machine.collectives.local, sent)
    rings = 1 if kind in ("send_recv", "all_to_all") else ranks_here
    bandwidth = min(link.bandwidth * rings, local.bandwidth)
    return link.latency + (ranks - 2) * link.each + sent / bandwidth


def link_for(carrier: Carrier, sent: float) -> LinkFigures:
    """Return the entry of a carrier for a number of sent bytes."""
    return next(link for link in carrier if sent <= link.up_to)


def matmul_seconds(machine: Machine, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
    """Return the seconds of ``batch`` products of [m, k] and [k, n], without the launch.

    Roofline with tile quantization: results are computed in full tiles, ``units`` at a time, and
    each tile costs ``depth`` additional steps of the sum. The result is at least the time in which
    memory moves the operands and results.
    """
    model = machine.matmul
    tiles = batch * math.ceil(m / model.tile_rows) * math.ceil(n / model.tile_columns)
    rounds = math.ceil(tiles / model.units) * model.units
    flops = 2 * rounds * model.tile_rows * model.tile_columns * (k + model.depth)
    rate = model.rate_of(dtype)
    nbytes = batch * (m * k + k * n + m * n) * _ITEMSIZES[dtype]
    return max(flops / rate, moving_seconds(machine, nbytes))


_ITEMSIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8": 1, "i8": 1}


def moving_seconds(machine: Machine, nbytes: float) -> float:
    """Return the seconds to read and write a number of bytes, by cache or memory bandwidth."""
    memory = machine.memory
    cached = nbytes <= memory.cache
    return nbytes / (memory.cache_bandwidth if cached else memory.bandwidth)


def pointwise_seconds(machine: Machine, family: str, elements: int, nbytes: float) -> float:
    """Return the seconds of an elementwise op, without the launch (roofline).

    Args:
        family: one of ``schema.FAMILIES``.
        nbytes: bytes read and written.
    """
    return max(elements / machine.pointwise[family], moving_seconds(machine, nbytes))
