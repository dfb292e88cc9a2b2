"""The rows of every node with their costs, looked up once for each kind of node in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lazygt.graph.cost import family, graph_costs
from lazygt.graph.label import Interleaved, Replicated
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.passes.base import renumbered
from lazygt.passes.rules.base import Metas, Row
from lazygt.passes.rules.interleaved import interleaved_rows
from lazygt.passes.sharding.cost import Machine, row_seconds, ticks, work_share
from lazygt.passes.sharding.places import MARKS, PLACE

#: The rows of a node, with or without the one that is R everywhere.
RowsOf = Callable[[Node], Sequence[Row]]
#: For each operand of a node the interleaved labels that it may have.
Reached = tuple[tuple[Interleaved, ...], ...]


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


class Catalogue:
    """The entries of a graph.

    Nodes of one op with equal metas and arguments have one entry; ``rows_of`` is asked about the
    first of them.

    Args:
        metas: ``graph.values``.

    Attributes:
        entries: one a kind of node, then those that were asked for later.
        numbers: of each node, which entry is its own.
    """

    def __init__(
        self, graph: Graph, metas: Metas, rows_of: RowsOf, parts: int, machine: Machine
    ) -> None:
        self._metas, self._parts, self._machine = metas, parts, machine
        kinds: dict[tuple[Any, ...], int] = {}
        self.numbers: list[int] = []
        self._firsts: list[Node] = []
        for node in graph.nodes:
            kind = _signature(node, metas)
            number = kinds.setdefault(kind, len(kinds))
            if number == len(self._firsts):
                self._firsts.append(node)
            self.numbers.append(number)
        self._costs = graph_costs(_apart(self._firsts, metas, graph.params))
        self.entries = [
            self._entry(number, _every(node, rows_of(node)))
            for number, node in enumerate(self._firsts)
        ]
        self._wider: dict[tuple[int, Reached], int] = {}

    def interleaved(self, number: int, reached: Reached) -> int:
        """The entry of a kind of node with the rows that take operands interleaved besides.

        Args:
            number: of the entry without such rows.
            reached: for each operand the labels that it may have.
        """
        key = number, reached
        found = self._wider.get(key)
        if found is None:
            node, rows = self._firsts[number], self.entries[number].rows
            more = {
                (row.inputs, row.outputs): row
                for place, labels in enumerate(reached)
                for label in labels
                for row in interleaved_rows(node, self._metas, self._parts, rows, place, label)
            }
            found = self._wider[key] = len(self.entries) if more else number
            if more:
                self.entries.append(self._entry(number, (*rows, *more.values())))
        return found

    def _entry(self, number: int, rows: tuple[Row, ...]) -> Entry:
        node, cost, parts = self._firsts[number], self._costs[number], self._parts
        operands = [self._metas[value] for value in node.refs()]
        seconds = [
            0.0 if node.op in MARKS
            else row_seconds(self._machine, cost, row, operands, node.results, parts)
            for row in rows
        ]  # fmt: skip
        shares = [work_share(row, operands, node.results, parts) for row in rows]
        return Entry(rows, np.array(list(map(ticks, seconds))), tuple(shares), _is_heavy(node))


def _every(node: Node, rows: Sequence[Row]) -> tuple[Row, ...]:
    """All rows; the one that is R everywhere as its rule has it, if it says how to do that."""
    if node.op == PLACE:
        return tuple(rows)
    whole = next((row for row in rows if not _is_cut(row)), replicated(node))
    return (whole, *filter(_is_cut, rows))


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


def replicated(node: Node) -> Row:
    """The row that is R everywhere."""
    return Row((Replicated(),) * len(node.refs()), (Replicated(),) * len(node.results))


def _is_cut(row: Row) -> bool:
    return any(label != Replicated() for label in (*row.inputs, *row.outputs))


def _is_heavy(node: Node) -> bool:
    return family(node) == "matmul"
