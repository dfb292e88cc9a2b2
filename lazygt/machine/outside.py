"""Extrapolation in predictions: sizes beyond those of the calibration.

The laws of ``prices`` hold for any size, but were measured in a range only. A machine that was not
calibrated, with figures of datasheets, has no ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lazygt.graph.collectives import Communication
from lazygt.graph.cost import base_name, family, graph_costs, product_sizes
from lazygt.graph.meta import TensorMeta, short_dtype
from lazygt.graph.node import Graph, Node
from lazygt.graph.text import amount
from lazygt.machine.model import Machine, Range


class Outside(NamedTuple):
    """Ops of one kind beyond the calibrated range: the farthest, and their number.

    Attributes:
        what: the calibrated quantity, such as ``products``.
        op, line: of the farthest.
        size: of it, with its unit.
        measured: from the least to the most.
        times: number of such ops over all runs.
        far: the factor by which it is outside.
    """

    what: str
    op: str
    line: str
    size: str
    measured: str
    times: int
    far: float


def outside(machine: Machine, graph: Graph, sent: Iterable[Communication]) -> list[Outside]:
    """Find the ops of one run of a graph outside of the calibrated ranges, a row a kind.

    Args:
        sent: its collectives.
    """
    if not machine.ranges:
        return []
    rows = [*_of_nodes(machine, graph), *_of_collectives(machine.ranges, sent)]
    return farthest(rows)


def farthest(rows: Iterable[Outside]) -> list[Outside]:
    """The farthest of each kind, with how many there are of it."""
    kinds: dict[str, Outside] = {}
    for row in rows:
        known = kinds.get(row.what)
        if known is None:
            kinds[row.what] = row
        else:
            kinds[row.what] = max(known, row, key=_far)._replace(times=known.times + row.times)
    return list(kinds.values())


def _far(row: Outside) -> float:
    return row.far


def _of_nodes(machine: Machine, graph: Graph) -> Iterator[Outside]:
    metas = graph.values
    for number, (node, cost) in enumerate(zip(graph.nodes, graph_costs(graph), strict=True)):
        nbytes = cost.bytes
        if nbytes and family(node) != "collective":
            yield from _beyond(
                machine.ranges, "bytes", base_name(node.op), graph.line(number), nbytes, "B"
            )
        yield from _of_product(machine, node, metas, graph.line(number))
        if node.body is not None:
            inner = node.body.values
            for place, member in enumerate(node.body.nodes):
                yield from _of_product(machine, member, inner, node.body.line(place))


def _of_product(
    machine: Machine, node: Node, metas: Sequence[TensorMeta | None], line: str
) -> Iterator[Outside]:
    sizes = product_sizes(node, metas)
    if sizes is None:
        return
    op = base_name(node.op)
    both = [
        row for size in sizes[:3] for row in _beyond(machine.ranges, "products", op, line, size)
    ]
    if both:
        shown = " x ".join(f"{size:,}" for size in sizes[:3])
        yield max(both, key=_far)._replace(size=shown)
    operand = next((meta for value in node.refs() if (meta := metas[value]) is not None), None)
    dtype = "f32" if operand is None else short_dtype(operand.dtype)
    if dtype not in machine.matmul.rate and not dtype.startswith("float8"):
        yield Outside("dtypes", op, line, dtype, ", ".join(machine.matmul.rate), 1, 1.0)


def _of_collectives(
    ranges: Mapping[str, Range], sent: Iterable[Communication]
) -> Iterator[Outside]:
    for exchange in sent:
        kind, line = exchange.kind, exchange.source
        yield from _beyond(ranges, "payloads", kind, line, exchange.nbytes, "B")
        yield from _beyond(ranges, "ranks", kind, line, exchange.ranks)


def _beyond(
    ranges: Mapping[str, Range], what: str, op: str, line: str, size: int, unit: str = ""
) -> Iterator[Outside]:
    """Yield a row if a size is outside of its range.

    Smaller sizes, products aside, take no longer than a launch or a latency, which are known.
    """
    known = ranges.get(what)
    least = 0.0 if known is None or what != "products" else known.least
    if known is None or not size or least <= size <= known.most:
        return
    far = max(size / known.most, least / size)
    measured = f"{_shown(known.least, unit)} to {_shown(known.most, unit)}"
    yield Outside(what, op, line, _shown(size, unit), measured, 1, far)


def _shown(size: float, unit: str) -> str:
    return amount(round(size), unit) if unit else f"{round(size):,}"
