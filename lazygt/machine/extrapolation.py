"""Extrapolation in predictions: sizes beyond those of the calibration.

The cost models of ``prices`` apply to any size, but were calibrated in a range only. A machine with
figures of datasheets has no ranges.
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
    """Ops of one kind beyond the calibrated range: the farthest, and their number."""

    what: str  # the calibrated quantity, such as ``products``
    op: str  # op, line: the farthest op
    line: str
    size: str  # its size, with the unit
    measured: str  # the calibrated range
    times: int  # number of ops outside over all runs
    far: float  # factor by which the farthest is outside


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
    """Yield the rows of a graph's ops, and of those inside fused groups."""
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
    """Yield the rows of collectives: payloads and numbers of ranks."""
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

    Args:
        what: one of ``model.RANGES``.
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
