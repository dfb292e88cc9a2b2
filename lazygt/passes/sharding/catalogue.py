"""The rows of every node with their costs, looked up once for each kind of node in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lazygt.graph.cost import Cost, family, graph_costs
from lazygt.graph.label import Replicated
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.passes.base import renumbered
from lazygt.passes.rules.base import Metas, Row
from lazygt.passes.sharding.cost import Machine, row_seconds, ticks, work_share
from lazygt.passes.sharding.places import MARKS, PLACE

#: The rows of a node, with or without the one that is R everywhere.
RowsOf = Callable[[Node], Sequence[Row]]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The rows that one kind of node may be run as.

    Attributes:
        rows: all R first, then in the order of the rule; of a placement those that keep it.
        costs: the time of each, in ticks.
        shares: the part of the node's arithmetic that a rank does, of each.
        heavy: whether the node is a matmul, a convolution or an attention.
    """

    rows: tuple[Row, ...]
    costs: npt.NDArray[np.float64]
    shares: tuple[float, ...]
    heavy: bool

    def keep(self, wanted: Callable[[int, Row], bool]) -> Entry:
        """The entry with the rows that are wanted; itself where no row is, or every one is."""
        kept = [number for number, row in enumerate(self.rows) if wanted(number, row)]
        if not kept or len(kept) == len(self.rows):
            return self
        return replace(
            self,
            rows=tuple([self.rows[number] for number in kept]),
            costs=self.costs[kept],
            shares=tuple([self.shares[number] for number in kept]),
        )


def catalogue(
    graph: Graph, metas: Metas, rows_of: RowsOf, parts: int, machine: Machine
) -> tuple[list[Entry], list[int]]:
    """The entries of a graph, and the number of each node's own among them.

    Nodes of one op with equal metas and arguments have one entry; ``rows_of`` is asked about the
    first of them.

    Args:
        metas: ``graph.values``.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    firsts: list[Node] = []
    for node in graph.nodes:
        kind = _signature(node, metas)
        number = kinds.setdefault(kind, len(kinds))
        if number == len(firsts):
            firsts.append(node)
        numbers.append(number)
    costs = graph_costs(_apart(firsts, metas, graph.params))
    made = [
        _entry(node, rows_of(node), cost, metas, parts, machine)
        for node, cost in zip(firsts, costs, strict=True)
    ]
    return made, numbers


def _signature(node: Node, metas: Metas) -> tuple[Any, ...]:
    """Equal for nodes with the same op, metas and arguments, whatever values they read."""
    refs = node.refs()
    repeats = () if len(set(refs)) == len(refs) else tuple(map(refs.index, refs))
    return (
        node.op,
        _structure(node.args),
        tuple([(name, _structure((arg,))) for name, arg in node.kwargs]),
        tuple([id(metas[value]) for value in refs]),  # equal metas are one object
        tuple(map(id, node.results)),
        repeats,
        tuple(map(refs.index, node.writes)),
        id(node.body),
    )


def _structure(args: tuple[Arg, ...]) -> tuple[Any, ...]:
    return tuple([
        type(arg) if type(arg) is Ref or type(arg) is Param
        else _structure(arg) if type(arg) is tuple
        else arg
        for arg in args
    ])  # fmt: skip


def _apart(nodes: Sequence[Node], metas: Metas, params: tuple[str, ...]) -> Graph:
    """A graph of these nodes alone, each with inputs of its own."""
    inputs: list[TensorMeta] = []
    moved: list[Mapping[int, int]] = []
    for node in nodes:
        places: dict[int, int] = {}
        for value in node.refs():
            meta = metas[value]
            if value not in places and meta is not None:
                places[value] = len(inputs)
                inputs.append(meta)
        moved.append(places)
    alone = tuple([renumbered(node, places) for node, places in zip(nodes, moved, strict=True)])
    return Graph(tuple(inputs), params, alone, ())


def _entry(
    node: Node,
    rows: Sequence[Row],
    cost: Cost,
    metas: Metas,
    parts: int,
    machine: Machine,
) -> Entry:
    operands = [metas[value] for value in node.refs()]
    every = tuple(rows) if node.op == PLACE else (replicated(node), *filter(_is_cut, rows))
    seconds = [
        0.0 if node.op in MARKS else row_seconds(machine, cost, row, operands, node.results, parts)
        for row in every
    ]
    shares = [work_share(row, operands, node.results, parts) for row in every]
    return Entry(every, np.array(list(map(ticks, seconds))), tuple(shares), _is_heavy(node))


def replicated(node: Node) -> Row:
    """The row that is R everywhere."""
    return Row((Replicated(),) * len(node.refs()), (Replicated(),) * len(node.results))


def _is_cut(row: Row) -> bool:
    return any(label != Replicated() for label in (*row.inputs, *row.outputs))


def _is_heavy(node: Node) -> bool:
    return family(node) == "matmul"
